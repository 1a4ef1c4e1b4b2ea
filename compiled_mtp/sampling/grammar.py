"""Grammars in a verify window: each row's mask of allowed ids, given the drafts before it.

`GrammarCompiler` turns a source into a `Matcher`, in the caller's thread. `MaskFiller` fills the masks of all
requests' rows of a round in one parallel call, and `Matcher.accept` takes the tokens that the round emitted,
one by one. The extra `guided` (llguidance) is needed from the first `compile` on.

Tokens may depend on no draft and on no other request, but llguidance's limits count work: a lexer keeps
every state that it has ever made, and `LLMatcher.deep_copy` shares that lexer. So each matcher is compiled
from text, and every error is checked against another new one that took the accepted tokens alone. Steps have
no limit of lexer fuel, since a lexer that has done part of the work before would need less.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_mtp.errors import escape
from compiled_mtp.sampling.grammar_source import GrammarSource, Schema, children

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Of one lexer, at some 450 bytes each.
_MAX_LEXER_STATES = 100_000
_FUEL_TO_COMPILE, _NO_LIMIT = 1_000_000, 2**62
# Schemas compiled alone to find where in a request an error stands.
_PLACE_TRIES = 256
_ALL_IDS = -1
# Sets of tokens that enter a mask as a whole where all their text may follow: that of JSON strings, as
# llguidance has them, and before it that without "<", for text in calls that are not JSON.
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_IN_TEXT = r'[^"\\\x00-\x1F\x7F<]'
_REPEATS = ("{1,10}", "{1,30}", "+")
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{one}{end}" for one in (_IN_TEXT, _IN_STRINGS) for end in _REPEATS)]


class Reasoning(NamedTuple):
    """A part before the grammar: any ids but those that end a request, up to the ids `end`; `lead` may follow
    once."""

    end: tuple[int, ...]
    lead: str = "\n\n"


class GrammarCompiler:
    """Compiles grammars for one tokenizer; any thread may call it.

    tokenizer_json: the text of the checkpoint's tokenizer.json. num_ids: width of the logits. eos_token_ids:
    all ids that end a request. step_max_items bounds the parser items of one mask, max_lexer_states the
    memory of one matcher. The tokenizer's trie is built by `warm_up` or the first `compile`.
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
        self._goes_on = _allow_but(self._eos_token_ids, num_ids)
        self._step_max_items = step_max_items
        self._max_lexer_states = max_lexer_states
        # A signal's handler may add a request while its thread is adding one.
        self._lock = threading.RLock()
        self._tokenizer: LLTokenizer | None = None

    def warm_up(self) -> None:
        """Build the trie, with the interpreter's lock held. Raises ValueError without llguidance."""
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
        """Return a new matcher. Raises ValueError, naming the place, for what cannot be compiled."""
        _llguidance(source.place)
        self.warm_up()
        text = source.lark(reasoning.lead if reasoning else "")
        start = self._make(text, self._limits(_FUEL_TO_COMPILE))
        if start.is_error():
            place, problem = _find_place(source, start.get_error(), self._limits(_FUEL_TO_COMPILE))
            raise ValueError(f"{place} must be a grammar that can be compiled, got: {problem}; simplify it")
        # What a new lexer has left of this fuel must do for all tokens that it takes before its next mask.
        make = partial(self._make, text, self._limits(_NO_LIMIT))
        return Matcher(start, make, reasoning.end if reasoning else (), self._goes_on)

    def _make(self, text: str, limits: LLParserLimits) -> LLMatcher:
        """A matcher with a lexer of its own, or one in error."""
        matcher = _llguidance("grammar").LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask shows limits that only matching reaches.
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
    """Where one request stands in its grammar. Owned by the engine's thread once the request is queued.

    is_ended: an accepted token ended the grammar, and with it the request. error: the grammar cannot go on;
    the request ends with it.
    """

    def __init__(
        self,
        start: LLMatcher,
        make: Callable[[], LLMatcher],
        reasoning_end: tuple[int, ...],
        goes_on: torch.Tensor,
    ) -> None:
        self._make = make  # returns one more like `start`
        self._reasoning_end = reasoning_end
        self._goes_on = goes_on  # the mask of a row in the reasoning part
        self._goes_on_words: NDArray[np.int32] = goes_on.numpy()
        self._begin(start)

    def _begin(self, live: LLMatcher) -> None:
        self.is_ended = False
        self.error: str | None = None
        self._live = live
        self._accepted: list[int] = []
        # The last ids of the reasoning part, as many as its end has; None once the grammar has begun.
        self._tail: tuple[int, ...] | None = () if self._reasoning_end else None
        # Drafts after which no mask can be made, and why.
        self._dead_end: tuple[list[int], str] | None = None

    def reset(self) -> None:
        """Stand where the output begins."""
        self._begin(self._make())

    def fork(self) -> Matcher:
        """Return a matcher that stands where this one does and goes its own way; it is compiled anew."""
        other = Matcher(self._replay([]), self._make, self._reasoning_end, self._goes_on)
        other.is_ended, other.error, other._tail = self.is_ended, self.error, self._tail
        other._dead_end, other._accepted = self._dead_end, list(self._accepted)
        return other

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that a round emitted; return how many count.

        Tokens behind the one that ended the grammar, or that it could not take, do not. Mutates is_ended and
        error.
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
        """A new matcher that has taken the accepted tokens and `drafts`, and no others."""
        matcher = self._make()
        matcher.consume_tokens([*self._accepted, *drafts])
        return matcher

    def _first_row(self, drafts: Sequence[int]) -> int | None:
        """The first row of a window that the grammar masks, None if all of it is reasoning."""
        tail = self._tail
        for row, draft in enumerate([*drafts, None]):
            if tail is None:
                return row
            if draft is not None:
                tail = _next_tail(tail, draft, self._reasoning_end)
        return None

    def _fill_reasoning(self, masks: torch.Tensor, drafts: Sequence[int]) -> int | None:
        """Fill the rows of this request up to the first that the grammar masks, and return that; those behind
        it allow every id."""
        first = self._first_row(drafts)
        masks.fill_(_ALL_IDS)
        masks[:first] = self._goes_on
        return first

    def _fill_alone(self, masks: torch.Tensor, drafts: Sequence[int]) -> None:
        """Fill the rows of this request again, each by a matcher that saw nothing but its own prefix."""
        first = self._fill_reasoning(masks, drafts)
        assert first is not None
        for row in range(first, len(drafts) + 1):
            matcher = self._replay(drafts[first:row])
            if row == first:
                self._live = matcher
            if matcher.is_error() and row > first:
                return  # An illegal draft, or one that `accept` will find the grammar cannot take.
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
        """Whether the row behind a draft that the grammar allows was not written.

        A lexer that reaches its limit while it takes a draft forbids that draft, and says nothing.
        """
        for row, draft in enumerate(drafts):
            word, bit = divmod(draft, 32)
            if not 0 <= word < words.shape[1]:
                return False
            if not (words[row, word] & self._goes_on_words[word]) >> bit & 1:
                return False  # Forbidden, or an end.
            behind = words[row + 1]
            if behind[0] == _ALL_IDS and bool((behind == _ALL_IDS).all()):
                return True
        return False


class Window(NamedTuple):
    """The rows of one request in a round's masks: `row`, and one more for each draft."""

    matcher: Matcher
    row: int
    drafts: Sequence[int]


class MaskFiller:
    """Fills masks on a pool of `num_threads` threads (llguidance would take most of the machine)."""

    def __init__(self, num_threads: int) -> None:
        self._executor = _llguidance("grammar").LLExecutor(num_threads)

    def fill(self, windows: Sequence[Window], masks: torch.Tensor) -> None:
        """Write the mask of every row of `windows`; other rows of `masks` are left alone.

        masks [rows, ceil(num_ids / 32)] i32 on the CPU, contiguous, mutated: bit v % 32 of word v // 32 says
        that id v is allowed. All are behind a draft that the grammar forbids, which is rejected, and all but
        those that would end the request in a reasoning part. Ids that no token has are never allowed by a
        grammar. A window's matcher may have its `error` set: its request ends. Each matcher may stand in one
        window only.
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
                # llguidance takes no empty list of drafts.
                without.append((matcher._live, row + first))
        place = (masks.data_ptr(), masks.shape[1] * masks.element_size(), masks.shape[0])
        if with_drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *place)
        if without:
            self._executor.unsafe_compute_mask_ptr(without, *place)
        words = masks.numpy()
        for (matcher, row, drafts), first in masked:
            behind = words[row + first : row + len(drafts) + 1]
            if matcher._live.is_error() or matcher._lacks_a_row(behind, drafts[first:]):
                matcher._fill_alone(masks[row : row + len(drafts) + 1], drafts)


def _allow_but(token_ids: Iterable[int], num_ids: int) -> torch.Tensor:
    """The mask [ceil(num_ids / 32)] i32 of one row that allows every id but these."""
    words = [2**32 - 1] * -(-num_ids // 32)
    for token_id in token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32)
    return torch.tensor([word - 2**32 if word >> 31 else word for word in words], dtype=torch.int32)


def _next_tail(tail: tuple[int, ...], token_id: int, end: tuple[int, ...]) -> tuple[int, ...] | None:
    tail = (*tail, token_id)[-len(end) :]
    return None if tail == end else tail


def _find_place(source: GrammarSource, problem: str, limits: LLParserLimits) -> tuple[str, str]:
    """The deepest schema that alone has the problem of the schema around it, and the problem."""
    for place, root in source.schemas:
        schema, found = root, _schema_problem(root, root, limits)
        tries = iter(range(_PLACE_TRIES))
        while found is not None:
            problem = found
            deeper = next(
                (
                    (place + below, child)
                    for (below, child), _ in zip(children(schema), tries, strict=False)
                    if _schema_problem(child, root, limits) == found
                ),
                None,
            )
            if deeper is None:
                return place, _one_line(problem)
            place, schema = deeper
    return source.place, _one_line(problem)


def _schema_problem(schema: Schema, root: Schema, limits: LLParserLimits) -> str | None:
    """What llguidance has against a schema inside `root`, without the place it would give."""
    matcher = _llguidance("grammar").LLMatcher
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    grammar = matcher.grammar_from_json_schema(json.dumps({**definitions, **schema}))
    is_error, problems = matcher.validate_grammar_with_warnings(grammar, limits=limits)
    return problems[0] if is_error else None


def _one_line(text: str) -> str:
    # It quotes the caller's grammar.
    return escape(" ".join(text.replace("<non-verbose/>", "").split())[:200])


def _llguidance(place: str) -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            f"{place} must be left out without llguidance, got a grammar; pip install 'compiled-mtp[guided]'"
        ) from None
    return llguidance
