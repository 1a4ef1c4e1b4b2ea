"""Whether a prompt ends inside a reasoning part: one rule for grammars and the answers' parser. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.frontend.tokenizer import Tokenizer

_BEGIN, _END, _TURN = "<think>", "</think>", "<|im_start|>"
_ROLE = b"assistant"
# The most tokens of the role and the whitespace after it.
_MAX_HEAD = 16


class ReasoningTokens:
    """The tokens that begin and end a reasoning part. end: the id of the end token."""

    def __init__(self, tokenizer: Tokenizer, begin: int, end: int) -> None:
        self.end = end
        self._begin = begin
        self._turn = tokenizer.added_ids.get(_TURN)
        self._token_bytes = tokenizer.token_bytes

    def is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the prompt leaves a reasoning part open.

        That is so if the last turn is the assistant's and begins with a reasoning part without an end, or if
        a prompt of any kind ends with the begin token and whitespace. A begin token elsewhere opens nothing.
        """
        ids = list(prompt_token_ids)
        start = _after_last(ids, self._turn)
        turn = ids[start:]
        if self._begin not in turn:
            return False
        head = turn[: turn.index(self._begin)]
        is_at_head = start > 0 and len(head) <= _MAX_HEAD and b"".join(self._bytes(head)).strip() == _ROLE
        if is_at_head and self.end not in turn:
            return True
        following = self._bytes(turn[_after_last(turn, self._begin) :])
        return all(text.isspace() for text in following)

    def _bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return [self._token_bytes(token_id) for token_id in token_ids]


def find_reasoning(tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Return the checkpoint's tokens around a reasoning part, None if it lacks one of them."""
    begin, end = tokenizer.added_ids.get(_BEGIN), tokenizer.added_ids.get(_END)
    return None if begin is None or end is None else ReasoningTokens(tokenizer, begin, end)


def _after_last(ids: list[int], token_id: int | None) -> int:
    """Return the index after the last `token_id`, 0 if there is none."""
    return len(ids) - ids[::-1].index(token_id) if token_id in ids else 0
