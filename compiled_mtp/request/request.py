"""Request: a request's prompt and parameters, and the tokens that it has so far.

The scheduler owns a request's phase and its resources on the device.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from compiled_mtp.errors import quote
from compiled_mtp.plan import ImageSpan, RowLogprobs, new_tuple
from compiled_mtp.request.metrics import LOOKED_UP, MOST_KEPT, RequestHistory, RequestMetrics
from compiled_mtp.request.output import FinishReason, RequestOutput, RoundDrafts
from compiled_mtp.sampling.logprobs import LogprobQueue, TokenLogprob, make_entries
from compiled_mtp.sampling.sampling_params import SamplingParams
from compiled_mtp.sampling.stop_strings import StopStrings


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the request that arrived after `index` others: `seed` itself for the first.

    Requests with one seed would share their noise, and different prompts would begin alike.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Detokenizer(Protocol):
    """Turns ids into text one at a time; holds back incomplete characters."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe empty."""

    def flush(self) -> str:
        """Return, once, at the end, the text that was held back."""


class Guide(Protocol):
    """A request's position in its grammar: a `sampling.grammar.Matcher`.

    is_ended: a token ended the grammar, and with it the request. error: why the grammar cannot continue.
    """

    is_ended: bool
    error: str | None

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that a round emitted; return how many of them count."""

    def reset(self) -> None:
        """Go back to the beginning of the output, to take its tokens again."""


# The id in place of a missing draft, if a request skipped a round or was offloaded and so has fewer drafts.
NO_DRAFT = 0


def _no_bytes(token_id: int) -> bytes:
    return b""


class PromptImage(NamedTuple):
    """An image of a prompt: its tokens there, its RGB bytes, and a digest of these and of the shape."""

    span: ImageSpan
    pixels: bytes
    digest: bytes


@dataclass(slots=True, eq=False)
class Request:
    """A request's prompt and parameters, and what the host knows of its output: tokens, text and counts.

    index: the number of the choice, among the choices that share the request_id. bad_word_ids: the token ids
    of `params.bad_words`. guide: the grammar, owned by the stepping thread. token_bytes: returns a token's
    text in bytes, for log probabilities. images: the prompt's images, in order. priority: a request of lower
    priority starts sooner. forced_ids: the whole output, if it is given instead of drawn: log probabilities
    are then its scores, and neither stop ids nor stop strings end it. error: why the grammar ended the
    request, or length_reason if that limit ended it before max_tokens and max_model_len. `max_output`,
    length_reason, and seed, mtp_step and max_drafts of `history`, may be changed until the scheduler has the
    request. Raises ValueError for an empty prompt and for stop strings without a detokenizer.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    index: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    token_bytes: Callable[[int], bytes] = _no_bytes
    images: tuple[PromptImage, ...] = ()
    priority: int = 0
    forced_ids: tuple[int, ...] = ()
    arrival_s: float = field(default_factory=time.monotonic)
    error: str | None = None
    max_output: int = field(init=False)
    length_reason: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    history: RequestHistory = field(init=False)
    metrics: RequestMetrics = field(init=False)
    _stop_strings: StopStrings = field(init=False)
    _stop_ids: frozenset[int] = field(init=False)
    # The stop ids that end the request: none if its output is given.
    _end_ids: frozenset[int] = field(init=False)
    _held_logprobs: LogprobQueue = field(default_factory=LogprobQueue)
    _new_logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] | None = None
    # Characters that `append` has returned.
    _num_shown: int = 0
    # At the last `commit`: characters, entries held back with their text, and metrics.
    _num_delivered: int = 0
    _held_back: tuple[TokenLogprob, ...] = ()
    _delivered: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt must have at least one token, got none; give some text or token ids")
        if self.params.stop and self.detokenizer is None:
            raise ValueError(
                f"stop must be empty without a tokenizer, got {quote(self.params.stop)}; use stop_token_ids"
            )
        seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.history = RequestHistory(len(self.prompt_token_ids), seed)
        self.history.is_given = bool(self.forced_ids)
        self.history.image_tokens = sum(image.span.num_tokens for image in self.images)
        self.metrics = RequestMetrics(self.history, 0, 0, 0.0)
        self._delivered = self.metrics
        self.max_output = self.params.max_tokens
        self._prompt_logprobs = [] if self.has_prompt_logprobs else None
        stops = () if self.forced_ids else self.params.stop
        self._stop_strings = StopStrings(stops, self.params.include_stop)
        self._stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._stop_ids |= self.eos_token_ids
        self._end_ids = frozenset() if self.forced_ids else self._stop_ids

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def rotary_delta(self) -> int:
        """The rotary position of an output token minus its index."""
        return sum(image.span.extent - image.span.num_tokens for image in self.images)

    @property
    def key(self) -> tuple[str, int]:
        """The unique name of this choice."""
        return self.request_id, self.index

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends the request, or would if its output were not given."""
        return self._stop_ids

    @property
    def is_two_phase(self) -> bool:
        """Whether its rounds have two phases: for the masks of a grammar, or for log probabilities."""
        return self.guide is not None or self.params.logprobs is not None

    @property
    def has_processed_logprobs(self) -> bool:
        """Whether it returns log probabilities of its processed logits."""
        return self.params.logprobs is not None and self.params.logprobs_mode != "raw"

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether this choice returns log probabilities of the prompt.

        Every row of the prompt must then be computed, also of a cached prefix. Choices share a prompt, so
        only choice 0 returns them.
        """
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to be delivered."""
        return self._prompt_logprobs is not None

    def append(
        self,
        token_ids: list[int],
        num_drafts: int | None,
        now_s: float,
        *,
        has_bonus: bool = True,
        is_looked_up: bool = False,
        logprobs: RowLogprobs | None = None,
    ) -> tuple[list[int], str]:
        """Take the tokens of one result; return those kept and their text, cut together at the first stop.

        num_drafts: the drafts of the verify round that emitted the tokens; None for the token of a prefill.
        All tokens were drafts except the last; with has_bonus False, the last too. is_looked_up: the drafts
        were looked up in the text. There may be more kept tokens than drafts, because a round verifies id 0
        in place of a missing draft. now_s: the time by time.monotonic(). logprobs: the log probabilities of
        token_ids, if requested. Sets finish_reason and error. Call `commit` once the output can be taken.
        """
        kept, text, output = token_ids, "", self.output_token_ids
        num_before = len(output)
        room = self.max_output - num_before
        if len(kept) >= room:
            kept = kept[:room]
            self.finish_reason, self.error = "length", self.length_reason
        num_stopless = self.params.min_tokens - num_before
        if not self._end_ids.isdisjoint(kept):
            kept = self._cut_at_stop_id(kept, num_stopless)
        if self.guide is not None:
            kept = self._cut_at_grammar(kept, self.guide)
        entries = None
        if logprobs is not None and self.params.logprobs is not None:
            mode = self.params.logprobs_mode
            entries = make_entries(kept, logprobs, self.params.logprobs, self.token_bytes, mode)
        if self.detokenizer is not None:
            kept, text = self._take_text(kept, self.detokenizer, num_stopless, entries)
        elif entries is not None:
            self._new_logprobs += entries
        output.extend(kept)
        history, total_s = self.history, now_s - self.arrival_s
        rounds = history.rounds
        if num_drafts is None:
            history.time_to_first_token_s = total_s
        else:
            num_kept = len(kept)
            # A stop that cut the round cut its bonus token off.
            if has_bonus and num_kept == len(token_ids):
                num_kept -= 1
            rounds.append(max(num_drafts, num_kept) * MOST_KEPT + num_kept)
            if is_looked_up:
                rounds[-1] += LOOKED_UP
        self.metrics = new_tuple(RequestMetrics, (history, len(rounds), len(output), total_s))
        if self.finish_reason is not None:
            text += self.finish(self.finish_reason)
        self._num_shown += len(text)
        return kept, text

    def commit(self) -> None:
        """Mark the last appended tokens, and the prompt log probabilities, as delivered: their output can be
        taken.
        """
        self._num_delivered = self._num_shown
        if self.params.logprobs is not None:
            self._held_back = (*self._new_logprobs, *self._held_logprobs)
        # After the fields above: if an interrupt comes before this store, `cut_short` commits again.
        self._delivered = self.metrics
        if self._prompt_logprobs is not None and self.take_prompt_logprobs() is not None:
            self._prompt_logprobs = None

    def cut_short(
        self, reason: FinishReason, last: RequestOutput | None = None
    ) -> tuple[str, list[TokenLogprob] | None]:
        """End the request after its delivered tokens; return their text and entries that were held back.

        An interrupt may have stopped `append`, or an earlier call of this method, at any point; a repeated
        call returns the same. last: the request's last output that waits to be taken.
        """
        if last is not None and last.metrics.output_tokens > self._delivered.output_tokens:
            self.commit()
        self.finish_reason = reason
        self.metrics = self._delivered._replace(total_s=time.monotonic() - self.arrival_s)
        text = ""
        if self.detokenizer is not None:
            self.detokenizer.flush()
            told = self.output_token_ids[: self._delivered.output_tokens]
            text = "".join(map(self.detokenizer.add, told)) + self.detokenizer.flush()
        return text[self._num_delivered :], None if self.params.logprobs is None else list(self._held_back)

    def finish(self, reason: FinishReason) -> str:
        """End the request; return the text that was held back, unless a stop string ended it."""
        self.finish_reason = reason
        self.metrics = self.metrics._replace(total_s=time.monotonic() - self.arrival_s)
        self._new_logprobs += self._held_logprobs.flush()
        held = self.detokenizer.flush() if self.detokenizer is not None else ""
        return self._stop_strings.flush() + held

    def take_logprobs(self) -> list[TokenLogprob] | None:
        """Return the entries whose text was returned after the last call; None unless requested."""
        if self.params.logprobs is None:
            return None
        taken, self._new_logprobs = self._new_logprobs, []
        return taken

    def list_drafts(
        self, drafts: Sequence[int] | None = None, num_known: int = 0
    ) -> list[RoundDrafts] | None:
        """Return the drafts of the round that was appended last; None unless requested.

        drafts: those made for the round; an earlier output delivered the first num_known. None if there was
        no round: returns [].
        """
        if not self.params.include_drafts:
            return None
        if drafts is None:
            return []
        last = self.history.rounds[-1]
        verified, kept = divmod(last % LOOKED_UP, MOST_KEPT)
        own = list(drafts[num_known : num_known + verified])
        # The ids 0 that it verified in place of missing drafts may have been right too.
        return [RoundDrafts(own + [NO_DRAFT] * (verified - len(own)), kept, last >= LOOKED_UP)]

    def add_prompt_logprobs(self, start: int, token_ids: Sequence[int], rows: RowLogprobs) -> None:
        """Take the log probabilities that a chunk from `start` on gives to token_ids, the prompt's next ids.

        A replayed chunk overwrites the entries with equal ones.
        """
        if self._prompt_logprobs is not None and self.params.prompt_logprobs is not None:
            entries = make_entries(token_ids, rows, self.params.prompt_logprobs, self.token_bytes)
            self._prompt_logprobs[start : start + len(entries)] = entries

    def take_prompt_logprobs(self) -> list[TokenLogprob] | None:
        """Return the entries of all prompt tokens except the first, once complete and until `commit`; else
        None.
        """
        entries = self._prompt_logprobs
        return None if entries is None or len(entries) < self.prompt_len - 1 else entries

    def _cut_at_stop_id(self, token_ids: list[int], num_stopless: int) -> list[int]:
        """Return the tokens up to the first stop id after the first num_stopless; set finish_reason."""
        for index, token_id in enumerate(token_ids):
            if index >= num_stopless and token_id in self._end_ids:
                self.finish_reason, self.error = "stop", None
                return token_ids[: index + 1]
        return token_ids

    def _cut_at_grammar(self, token_ids: list[int], guide: Guide) -> list[int]:
        """Return the tokens up to the one that ended the grammar, or before the first that it cannot take.

        Sets finish_reason and error. Neither min_tokens nor ignore_eos changes where a grammar ends.
        """
        num_kept = guide.accept(token_ids)
        if guide.is_ended:
            self.finish_reason, self.error = "stop", None
        elif guide.error is not None:
            self.finish_reason, self.error = "error", guide.error
        return token_ids[:num_kept]

    def _take_text(
        self,
        token_ids: list[int],
        detokenizer: Detokenizer,
        num_stopless: int,
        entries: list[TokenLogprob] | None,
    ) -> tuple[list[int], str]:
        """Return the tokens up to the one that completes a stop string, and their text; set finish_reason."""
        text, last = "", len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            added = shown = ""
            is_stop_string = False
            is_stop_id = index == last and index >= num_stopless and token_id in self._end_ids
            if self.params.include_stop or not is_stop_id:
                added = detokenizer.add(token_id)
                shown, is_stop_string = self._stop_strings.add(added, can_end=index >= num_stopless)
                text += shown
            if entries is not None:
                self._held_logprobs.add(entries[index], len(added))
                self._new_logprobs += self._held_logprobs.take(len(shown))
            if is_stop_string:
                self.finish_reason, self.error = "stop", None
                detokenizer.flush()
                return token_ids[: index + 1], text
        return token_ids, text
