"""Grammars in a verify window: each row's mask of allowed ids, given the drafts before it.

`GrammarCompiler` compiles a source to a `Matcher` in the caller's thread. `MaskFiller` fills the masks of all
requests' rows of a round in one parallel call, and `Matcher.accept` takes the tokens that the round emitted,
one by one. The first `compile` needs the extra `guided` (llguidance).

A token must not depend on drafts or on other requests, but llguidance's limits count work: a lexer keeps
every state that it has made, and `LLMatcher.deep_copy` shares the lexer. So each matcher is compiled from
text, and an error counts only if a new matcher that took the accepted tokens alone has it too. A step's lexer
fuel has no limit, because a lexer that did part of the work earlier would need less fuel.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from compiled_mtp.errors import escape
from compiled_mtp.sampling.grammar_source import GrammarSource, Schema, children

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

# States of one lexer; each takes about 450 bytes.
_MAX_LEXER_STATES = 100_000
_FUEL_TO_COMPILE, _NO_LIMIT = 1_000_000, 2**62
# How many schemas `_find_fault` compiles alone to find the field with the error.
_MOST_TRIED_SCHEMAS = 256
_ALL_IDS = -1
# llguidance adds such a set of tokens to a mask at once where the grammar allows all their text. _IN_STRINGS
# is llguidance's own set for JSON strings; _IN_TEXT, which has no "<", is for values of XML calls.
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_IN_TEXT = r'[^"\\\x00-\x1F\x7F<]'
_REPEATS = ("{1,10}", "{1,30}", "+")
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{one}{end}" for one in (_IN_TEXT, _IN_STRINGS) for end in _REPEATS)]


class Reasoning(NamedTuple):
    """The reasoning part before the grammar: all ids except eos ids, up to the ids `end`.

    lead: text that may follow `end` once.
    """

    end: tuple[int, ...]
    lead: str = "\n\n"


class GrammarCompiler:
    """Compiles grammars for one tokenizer; any thread may call it.

    tokenizer_json: the text of the checkpoint's tokenizer.json. num_ids: width of the logits. eos_token_ids:
    all ids that end a request. step_max_items bounds the parser items of one mask; max_lexer_states bounds
    the memory of one matcher. `warm_up` or the first `compile` builds the tokenizer's trie.
    """

    def __init__(
        self,
        tokenizer_json: str,
        num_ids: int,
        eos_token_ids: Iterable[int],
        *,
        step_max_items: int = 50_000,
        max_lexer_states: int = _MAX_LEXER_STATES,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._num_ids = num_ids
        self._eos_token_ids = sorted(eos_token_ids)
        self._reasoning_mask = _allow_except(self._eos_token_ids, num_ids)
        self._step_max_items = step_max_items
        self._max_lexer_states = max_lexer_states
        # Reentrant: a signal handler may add a request while its thread is adding one.
        self._lock = threading.RLock()
        self._tokenizer: LLTokenizer | None = None

    def warm_up(self) -> None:
        """Build the trie; this holds the interpreter lock. Raises ValueError without llguidance."""
        llguidance = _llguidance("grammar")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    self._tokenizer_json,
                    n_vocab=self._num_ids,
                    eos_token=self._eos_token_ids,
                    slices=_SLICES,
                )

    def compile(self, source: GrammarSource, reasoning: Reasoning | None = None) -> Matcher:
        """Return a new matcher. Raises ValueError, with the field's name, if the source does not compile."""
        _llguidance(source.field)
        self.warm_up()
        text = source.lark(reasoning.lead if reasoning else "")
        start = self._make(text, self._limits(_FUEL_TO_COMPILE))
        if start.is_error():
            field, problem = _find_fault(source, start.get_error(), self._limits(_FUEL_TO_COMPILE))
            raise ValueError(f"{field} must be a grammar that can be compiled, got: {problem}; simplify it")
        # Without a limit: a replay spends this fuel on all tokens that it takes before its next mask.
        make = partial(self._make, text, self._limits(_NO_LIMIT))
        return Matcher(start, make, reasoning.end if reasoning else (), self._reasoning_mask)

    def _make(self, text: str, limits: LLParserLimits) -> LLMatcher:
        """Return a matcher with its own lexer; the matcher may be in error."""
        matcher = _llguidance("grammar").LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask finds limits that compilation does not reach.
            matcher.compute_bitmask()
        return matcher

    def _limits(self, initial_lexer_fuel: int) -> LLParserLimits:
        return _llguidance("grammar").LLParserLimits(
            max_grammar_size=50_000,
            step_max_items=self._step_max_items,
            initial_lexer_fuel=initial_lexer_fuel,
            step_lexer_fuel=_NO_LIMIT,
            max_lexer_states=self._max_lexer_states,
            verbose_errors=False,
        )


class Matcher:
    """The position of one request in its grammar. The engine's thread owns it once the request is queued.

    is_ended: an accepted token ended the grammar, and so the request. error: why the grammar cannot continue,
    which ends the request, or None.
    """

    def __init__(
        self,
        start: LLMatcher,
        make: Callable[[], LLMatcher],
        reasoning_end: tuple[int, ...],
        reasoning_mask: torch.Tensor,
    ) -> None:
        self._make = make  # compiles another matcher like `start`
        self._reasoning_end = reasoning_end
        self._reasoning_mask = reasoning_mask  # the mask of a row in the reasoning part
        self._reasoning_words: NDArray[np.int32] = reasoning_mask.numpy()
        self._begin(start)

    def _begin(self, live: LLMatcher) -> None:
        self.is_ended = False
        self.error: str | None = None
        self._live = live
        self._accepted: list[int] = []
        # The last ids of the reasoning part, at most as many as its end has; None once the grammar has begun.
        self._tail: tuple[int, ...] | None = () if self._reasoning_end else None
        # Drafts after which llguidance can make no mask, and its error.
        self._dead_end: tuple[list[int], str] | None = None

    def reset(self) -> None:
        """Return to the beginning of the output."""
        self._begin(self._make())

    def fork(self) -> Matcher:
        """Return an independent matcher at the same position; it is compiled from text."""
        other = Matcher(self._replay([]), self._make, self._reasoning_end, self._reasoning_mask)
        other.is_ended, other.error, other._tail = self.is_ended, self.error, self._tail
        other._dead_end, other._accepted = self._dead_end, list(self._accepted)
        return other

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that a round emitted; return how many the request keeps.

        It keeps none after the token that ended the grammar, and none from the first that the grammar cannot
        take. Mutates is_ended and error.
        """
        dead_end, self._dead_end = self._dead_end, None
        for index, token_id in enumerate(token_ids):
            if self.is_ended or self.error is not None:
                return index
            if dead_end is not None and list(token_ids[:index]) == dead_end[0]:
                self.error = dead_end[1]
                return index
            if self._tail is not None:
                self._tail = _next_tail(self._tail, token_id, self._reasoning_end)
            elif self._consume(token_id):
                self.is_ended = self._live.is_stopped()
            else:
                return index
        return len(token_ids)

    def _consume(self, token_id: int) -> bool:
        is_taken = self._live.consume_token(token_id)
        if not is_taken:
            self._live = self._replay([])
            is_taken = self._live.consume_token(token_id)
        if is_taken:
            self._accepted.append(token_id)
        else:
            self.error = self._describe(self._live)
        return is_taken

    def _describe(self, matcher: LLMatcher, num_drafts: int = 0) -> str:
        num_tokens = len(self._accepted) + num_drafts
        return f"the grammar cannot go on after {num_tokens} tokens: {_one_line(matcher.get_error())}"

    def _replay(self, drafts: Sequence[int]) -> LLMatcher:
        """Return a new matcher that has taken the accepted tokens and then `drafts`."""
        matcher = self._make()
        matcher.consume_tokens([*self._accepted, *drafts])
        return matcher

    def _first_row(self, drafts: Sequence[int]) -> int | None:
        """Return the first row of a window that the grammar masks, None if all rows are reasoning."""
        tail = self._tail
        for row, draft in enumerate([*drafts, None]):
            if tail is None:
                return row
            if draft is not None:
                tail = _next_tail(tail, draft, self._reasoning_end)
        return None

    def _fill_reasoning(self, masks: torch.Tensor, drafts: Sequence[int]) -> int | None:
        """Fill this request's rows before the first that the grammar masks; return that row's index or None.

        From that row on, the rows allow all ids.
        """
        first = self._first_row(drafts)
        masks.fill_(_ALL_IDS)
        masks[:first] = self._reasoning_mask
        return first

    def _fill_alone(self, masks: torch.Tensor, drafts: Sequence[int]) -> None:
        """Fill this request's rows again, each by a new matcher that has taken only the row's prefix."""
        first = self._fill_reasoning(masks, drafts)
        assert first is not None
        for row in range(first, len(drafts) + 1):
            matcher = self._replay(drafts[first:row])
            if row == first:
                self._live = matcher
            if matcher.is_error() and row > first:
                # The grammar forbids the draft before this row, or `accept` will find that it cannot take it.
                return
            mask = masks[row]
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
            if matcher.is_error():
                mask.fill_(_ALL_IDS)
                if row == 0:
                    self.error = self._describe(matcher)
                else:
                    self._dead_end = (list(drafts[:row]), self._describe(matcher, row - first))
                return

    def _lacks_a_row(self, words: NDArray[np.int32], drafts: Sequence[int]) -> bool:
        """Return whether llguidance left the row after an allowed draft unwritten.

        It does so, without an error, where the lexer reaches its limit while it takes the draft.
        """
        for row, draft in enumerate(drafts):
            word, bit = divmod(draft, 32)
            if not 0 <= word < words.shape[1]:
                return False
            if not (words[row, word] & self._reasoning_words[word]) >> bit & 1:
                return False  # The grammar forbids the draft, or the draft ends the request.
            following = words[row + 1]
            if following[0] == _ALL_IDS and bool((following == _ALL_IDS).all()):
                return True
        return False


class Window(NamedTuple):
    """The rows of one request in a round's masks: `row`, then one row for each draft."""

    matcher: Matcher
    row: int
    drafts: Sequence[int]


class MaskFiller:
    """Fills masks on `num_threads` threads; llguidance's default is most cores of the machine."""

    def __init__(self, num_threads: int) -> None:
        self._executor = _llguidance("grammar").LLExecutor(num_threads)

    def fill(self, windows: Sequence[Window], masks: torch.Tensor) -> None:
        """Write the mask of every row of `windows`; other rows of `masks` keep their values.

        masks [rows, ceil(num_ids / 32)] i32 on the CPU, contiguous, mutated: bit v % 32 of word v // 32 says
        that id v is allowed. A row after a draft that the grammar forbids allows all ids, because the round
        rejects the draft. A row in a reasoning part allows all ids except eos ids. A grammar never allows
        ids that no token has. May set `error` of a window's matcher, which ends its request. A matcher must
        not be in two windows.
        """
        with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
        without: list[tuple[LLMatcher, int]] = []
        masked: list[tuple[Window, int]] = []
        for window in windows:
            matcher, row, drafts = window
            matcher._dead_end = None
            first = matcher._fill_reasoning(masks[row : row + len(drafts) + 1], drafts)
            if first is None or matcher.error is not None:
                continue
            masked.append((window, first))
            if first < len(drafts):
                with_drafts.append((matcher._live, row + first, list(drafts[first:])))
            else:
                # llguidance refuses an empty list of drafts.
                without.append((matcher._live, row + first))
        target = (masks.data_ptr(), masks.shape[1] * masks.element_size(), masks.shape[0])
        if with_drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *target)
        if without:
            self._executor.unsafe_compute_mask_ptr(without, *target)
        words = masks.numpy()
        for (matcher, row, drafts), first in masked:
            filled = words[row + first : row + len(drafts) + 1]
            if matcher._live.is_error() or matcher._lacks_a_row(filled, drafts[first:]):
                matcher._fill_alone(masks[row : row + len(drafts) + 1], drafts)


def _allow_except(token_ids: Iterable[int], num_ids: int) -> torch.Tensor:
    """Return the mask [ceil(num_ids / 32)] i32 of one row that allows every id except `token_ids`."""
    words = [2**32 - 1] * -(-num_ids // 32)
    for token_id in token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32)
    return torch.tensor([word - 2**32 if word >> 31 else word for word in words], dtype=torch.int32)


def _next_tail(tail: tuple[int, ...], token_id: int, end: tuple[int, ...]) -> tuple[int, ...] | None:
    tail = (*tail, token_id)[-len(end) :]
    return None if tail == end else tail


def _find_fault(source: GrammarSource, problem: str, limits: LLParserLimits) -> tuple[str, str]:
    """Return the field and the problem of the deepest schema that alone has its outer schema's problem."""
    for field, root in source.schemas:
        schema, found = root, _schema_problem(root, root, limits)
        tries = iter(range(_MOST_TRIED_SCHEMAS))
        while found is not None:
            problem = found
            deeper = next(
                (
                    (field + inner, child)
                    for (inner, child), _ in zip(children(schema), tries, strict=False)
                    if _schema_problem(child, root, limits) == found
                ),
                None,
            )
            if deeper is None:
                return field, _one_line(problem)
            field, schema = deeper
    return source.field, _one_line(problem)


def _schema_problem(schema: Schema, root: Schema, limits: LLParserLimits) -> str | None:
    """Return llguidance's error for a schema inside `root`, without its position, or None."""
    matcher = _llguidance("grammar").LLMatcher
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    grammar = matcher.grammar_from_json_schema(json.dumps({**definitions, **schema}))
    is_error, problems = matcher.validate_grammar_with_warnings(grammar, limits=limits)
    return problems[0] if is_error else None


def _one_line(text: str) -> str:
    # Escape: the error quotes the caller's grammar.
    return escape(" ".join(text.replace("<non-verbose/>", "").split())[:200])


def _llguidance(field: str) -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            f"{field} must be left out without llguidance, got a grammar; pip install 'compiled-mtp[guided]'"
        ) from None
    return llguidance
