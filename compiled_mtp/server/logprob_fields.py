"""Log probabilities in the answers of OpenAI's API, and what an answer says of its prompt.

JSON has no infinity: a log probability that is not finite becomes LOWEST, as in vLLM's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.sampling.logprobs import TokenLogprob, TopLogprob

LOWEST = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token; parts of a character become the replacement character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def of_completion(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int = 0
) -> dict[str, Any] | None:
    """The `logprobs` of a completion whose first entry's text begins at character `offset`."""
    if not entries:
        return None
    tokens = [token_text(tokenizer, e.token_id) for e in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [max(e.logprob, LOWEST) for e in entries],
        "top_logprobs": [_by_text(tokenizer, e.top) for e in entries],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


def of_chat(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """The `logprobs` of a chat's choice."""
    if not entries:
        return None
    content = [
        _named(tokenizer, e.token_id, e.logprob)
        | {"top_logprobs": [_named(tokenizer, one.token_id, one.logprob) for one in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def of_echo(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    of_prompt: Sequence[TokenLogprob],
    entries: Sequence[TokenLogprob],
    num_top: int,
) -> dict[str, Any]:
    """The `logprobs` of a completion that repeats its prompt; nothing comes before the first token, so its
    values are null.

    of_prompt: the entries of all prompt tokens but the first; entries: those of the output.
    """
    first = token_text(tokenizer, prompt_ids[0])
    every = [
        TokenLogprob(e.token_id, e.bytes, e.logprob, e.rank, e.top[:num_top], e.entropy) for e in of_prompt
    ]
    fields: dict[str, list[Any]] = {
        "tokens": [first],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    for name, values in (of_completion(tokenizer, [*every, *entries], len(first)) or {}).items():
        fields[name] += values
    return fields


def of_prompt(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: per position a dict by id of the prompt's token and the num_top likeliest ones.

    The first position has None.
    """
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(one.token_id, one.logprob, rank) for rank, one in enumerate(entry.top[:num_top], start=1)]
        found.append(
            {
                str(token_id): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *ranked]
            }
        )
    return found


def _by_text(tokenizer: Tokenizer, top: Sequence[TopLogprob]) -> dict[str, float]:
    """Log probabilities by text; of ids with one text the likeliest counts."""
    found: dict[str, float] = {}
    for one in top:
        found.setdefault(token_text(tokenizer, one.token_id), one.logprob)
    return found


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {
        "token": token.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(token),
    }
