"""What a caller asks for, what it gets back, and what a request has gained so far. No torch.

Where a request stands and what it holds of the device is the scheduler's.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from compiled_mtp.errors import quote
from compiled_mtp.plan import RowLogprobs
from compiled_mtp.sampling.logprobs import LogprobQueue, TokenLogprob, make_entries
from compiled_mtp.sampling.sampling_params import SamplingParams as SamplingParams
from compiled_mtp.sampling.stop_strings import StopStrings

# Makes a named tuple in a third of the time that its class takes; for what is made for each request and step.
new_tuple = tuple.__new__

FinishReason = Literal["stop", "length", "abort", "error"]
# What an error comes from: the caller's own parameters, which fail everywhere, or the engine and its device.
ErrorKind = Literal["parameters", "engine"]


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the request that arrived after `index` others: the first has `seed` itself.

    Requests that shared one would share their noise, and different prompts would begin alike.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Detokenizer(Protocol):
    """Turns ids into text one at a time; holds back what is not yet a whole character."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe none."""

    def flush(self) -> str:
        """Return what was held back, once, at the end."""


class Guide(Protocol):
    """Where a request stands in its grammar: a `sampling.grammar.Matcher`.

    is_ended: a token ended the grammar, and with it the request. error: why the grammar cannot go on.
    """

    is_ended: bool
    error: str | None

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that a round emitted; return how many of them count."""

    def reset(self) -> None:
        """Stand where the output begins, to take its tokens again."""


@dataclass(slots=True, eq=False)
class RequestHistory:
    """What the metrics of one request are counted from; it only grows, so that each of them is a prefix.

    rounds holds a number for each verify round: its drafts, verified and kept, as verified * 16 + kept.
    """

    prompt_tokens: int
    seed: int
    mtp_step: int = 0
    rounds: list[int] = field(default_factory=list)
    time_to_first_token_s: float | None = None
    cached_tokens: int = 0


class RequestMetrics(NamedTuple):
    """Counts and times of one request up to the output that carries them; ratios are in `spec.stats`.

    It does not change while the request goes on. rounds counts verify rounds. It and output_tokens leave out
    what a stop cut off; the first output token comes from prefill, the others from the rounds. Times are
    seconds from the request's arrival; total_s is that of its last token, or of its end. One is made for each
    request at each step, so what takes time is counted when it is asked for.
    """

    history: RequestHistory
    rounds: int
    output_tokens: int
    total_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.history.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self.history.cached_tokens

    @property
    def seed(self) -> int:
        """Of the noise: given, derived or drawn."""
        return self.history.seed

    @property
    def time_to_first_token_s(self) -> float | None:
        """None before the first token."""
        return self.history.time_to_first_token_s if self.output_tokens else None

    @property
    def rounds_by_accepted(self) -> list[int]:
        """[mtp_step + 1] Verify rounds that kept exactly n drafts, for each n."""
        return self._count_rounds()[0]

    @property
    def accepted_by_index(self) -> list[int]:
        """[mtp_step] Rounds that kept draft i + 1, for each i."""
        return _at_least(self._count_rounds()[0])

    @property
    def drafted_by_index(self) -> list[int]:
        """[mtp_step] Rounds that had a draft i + 1 to verify, for each i."""
        return _at_least(self._count_rounds()[1])

    def _count_rounds(self) -> tuple[list[int], list[int]]:
        """Rounds by the drafts they kept, and by the drafts they verified."""
        width = self.history.mtp_step + 1
        kept, verified = [0] * width, [0] * width
        for pair, count in Counter(self.history.rounds[: self.rounds]).items():
            kept[pair % _MOST_KEPT] += count
            verified[pair // _MOST_KEPT] += count
        return kept, verified


def _at_least(counts: list[int]) -> list[int]:
    """Sums of the counts from n on, for each n of at least 1."""
    return [sum(counts[n:]) for n in range(1, len(counts))]


# Above every mtp_step that is allowed.
_MOST_KEPT = 16
# Stands where a request that sat out a round, or was away, has fewer drafts than the others.
NO_DRAFT = 0


class RoundDrafts(NamedTuple):
    """The drafts that one verify round had, in order, of which the first num_accepted were kept.

    They are the round's tokens; the one behind them is the target's own, in place of the next draft if there
    was one. What a stop cut off counts as a draft that was not kept.
    """

    token_ids: list[int]
    num_accepted: int


class RequestOutput(NamedTuple):
    """What one step gave one request: the new tokens and text, and how it ended if it did.

    new_token_ids holds the token that ended the request; new_text holds its stop only with `include_stop`.
    error says why it ended with "error", or what bounds it where it ends with "length" before max_tokens and
    max_model_len. index is that of the choice. logprobs, None if nobody asked for them, hold an entry for
    each token whose text is in new_text: text that is held back holds entries back, and in all there is one
    for each token. prompt_logprobs, where they were asked for: in the first output of choice 0 an entry for
    each token of the prompt but the first, None in every other output and where the request ended before its
    prompt was read. drafts, None if nobody asked for them, hold an entry for each verify round that gave
    these tokens. error_kind, None unless the request ended with "error": what it comes from.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    metrics: RequestMetrics
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    index: int = 0  # type: ignore[assignment]  # OpenAI's name; nobody looks for an item of an output.
    prompt_logprobs: list[TokenLogprob] | None = None
    drafts: list[RoundDrafts] | None = None
    error_kind: ErrorKind | None = None


def _no_bytes(token_id: int) -> bytes:
    return b""


# What a request had told before an output: its metrics, characters, and entries still held back. A plain
# tuple: one is made for each output.
_Before: TypeAlias = tuple[RequestMetrics, int, tuple[TokenLogprob, ...]]


@dataclass(slots=True, eq=False)
class Request:
    """What one request asks for and what it has gained so far: the tokens that the host knows, and counts.

    index: of the choice, of those that share the request_id. bad_word_ids: what `params.bad_words` means.
    guide: the grammar, owned by whoever steps. token_bytes: of a token's text, for log probabilities.
    priority: whoever has the lower one gets a place sooner. error: why the grammar ended the request, or why
    it ended before max_tokens and max_model_len: length_reason. `max_output`, length_reason, and seed and
    mtp_step of `history`, may be changed until the scheduler has it. Raises ValueError for an empty prompt
    and for stop strings without a detokenizer.
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
    priority: int = 0
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
    _held_logprobs: LogprobQueue = field(default_factory=LogprobQueue)
    _new_logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] | None = None
    # Characters that `append` has returned; and what there was before an output that is still to be told.
    _num_shown: int = 0
    _before: _Before | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt must have at least one token, got none; give some text or token ids")
        if self.params.stop and self.detokenizer is None:
            raise ValueError(
                f"stop must be empty without a tokenizer, got {quote(self.params.stop)}; use stop_token_ids"
            )
        seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.history = RequestHistory(len(self.prompt_token_ids), seed)
        self.metrics = RequestMetrics(self.history, 0, 0, 0.0)
        self.max_output = self.params.max_tokens
        self._prompt_logprobs = [] if self.has_prompt_logprobs else None
        self._stop_strings = StopStrings(self.params.stop, self.params.include_stop)
        self._stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._stop_ids |= self.eos_token_ids

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def key(self) -> tuple[str, int]:
        """What names this choice among all."""
        return self.request_id, self.index

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends the request."""
        return self._stop_ids

    @property
    def is_two_phase(self) -> bool:
        """Whether its rounds run as two halves: masks are made in between, or logits are looked at."""
        return self.guide is not None or self.params.logprobs is not None

    @property
    def has_processed_logprobs(self) -> bool:
        """Whether its log probabilities are those of its processed logits."""
        return self.params.logprobs is not None and self.params.logprobs_mode == "processed"

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether its prompt has log probabilities: every row of it must then be computed, even of a part
        that is known already. The choices of a request share a prompt, of which choice 0 tells.
        """
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether those of its prompt are still to be told."""
        return self._prompt_logprobs is not None

    def append(
        self,
        token_ids: list[int],
        num_drafts: int | None,
        now_s: float,
        *,
        has_bonus: bool = True,
        logprobs: RowLogprobs | None = None,
    ) -> tuple[list[int], str]:
        """Take the tokens of one result; return those kept and their text, cut together at the first stop.

        num_drafts is what the verify round had that emitted them: all were drafts but the last, and that one
        too without `has_bonus`; None for the token that prefill emits. More than that may be right, since a
        round verifies id 0 where it has no draft. `now_s` is the time by
        time.monotonic(). logprobs: those of token_ids, where they are wanted. Sets finish_reason, and error.
        `commit` is to follow once their output can be taken.
        """
        held = () if self.params.logprobs is None else self._undelivered_logprobs()
        self._before = self.metrics, self._num_shown, held
        kept, text, output = token_ids, "", self.output_token_ids
        num_before = len(output)
        room = self.max_output - num_before
        if len(kept) >= room:
            kept = kept[:room]
            self.finish_reason, self.error = "length", self.length_reason
        num_stopless = self.params.min_tokens - num_before
        if not self._stop_ids.isdisjoint(kept):
            kept = self._cut_at_stop_id(kept, num_stopless)
        if self.guide is not None:
            kept = self._cut_at_grammar(kept, self.guide)
        entries = None
        if logprobs is not None and self.params.logprobs is not None:
            entries = make_entries(kept, logprobs, self.params.logprobs, self.token_bytes)
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
            rounds.append(max(num_drafts, num_kept) * _MOST_KEPT + num_kept)
        self.metrics = new_tuple(RequestMetrics, (history, len(rounds), len(output), total_s))
        if self.finish_reason is not None:
            text += self.finish(self.finish_reason)
        self._num_shown += len(text)
        return kept, text

    def commit(self) -> None:
        """The output of what was appended last, and of prompt log probabilities, can be taken."""
        self._before = None
        if self._prompt_logprobs is not None and self.take_prompt_logprobs() is not None:
            self._prompt_logprobs = None

    def cut_short(
        self, reason: FinishReason, last: RequestOutput | None = None
    ) -> tuple[str, list[TokenLogprob] | None]:
        """End the request behind the tokens that were told, wherever `append` or an earlier call of this one
        stopped; return the text and the entries of theirs that were held back. Called again it returns the
        same. last: its last output that waits to be taken.
        """
        before = self._before
        if before is None or _is_behind(last, before[0]):
            before = self.metrics, self._num_shown, self._undelivered_logprobs()
        metrics, num_shown, held = before
        self.finish_reason = reason
        self.metrics = metrics._replace(total_s=time.monotonic() - self.arrival_s)
        text = ""
        if self.detokenizer is not None:
            self.detokenizer.flush()
            told = self.output_token_ids[: metrics.output_tokens]
            text = "".join(map(self.detokenizer.add, told)) + self.detokenizer.flush()
        return text[num_shown:], None if self.params.logprobs is None else list(held)

    def finish(self, reason: FinishReason) -> str:
        """End the request; return the text that was held back, unless a stop string ended it."""
        if self._before is None:
            self._before = self.metrics, self._num_shown, self._undelivered_logprobs()
        self.finish_reason = reason
        self.metrics = self.metrics._replace(total_s=time.monotonic() - self.arrival_s)
        self._new_logprobs += self._held_logprobs.flush()
        held = self.detokenizer.flush() if self.detokenizer is not None else ""
        return self._stop_strings.flush() + held

    def take_logprobs(self) -> list[TokenLogprob] | None:
        """Return the entries whose text has come out since the last call; None if nobody asked for any."""
        if self.params.logprobs is None:
            return None
        taken, self._new_logprobs = self._new_logprobs, []
        return taken

    def list_drafts(
        self, drafts: Sequence[int] | None = None, num_known: int = 0
    ) -> list[RoundDrafts] | None:
        """Return what the round that was appended last had; None if nobody asks for it.

        drafts: those that were made for it, of which the first num_known were told in an earlier output; None
        where there was no round.
        """
        if not self.params.include_drafts:
            return None
        if drafts is None:
            return []
        verified, kept = divmod(self.history.rounds[-1], _MOST_KEPT)
        own = list(drafts[num_known : num_known + verified])
        # Where it had no draft, what it verified may have been right too.
        return [RoundDrafts(own + [NO_DRAFT] * (verified - len(own)), kept)]

    def add_prompt_logprobs(self, start: int, token_ids: Sequence[int], rows: RowLogprobs) -> None:
        """Take what a chunk that begins at `start` gives to the prompt's token_ids behind each of its rows.

        A chunk may come again: it is the same.
        """
        if self._prompt_logprobs is not None and self.params.prompt_logprobs is not None:
            entries = make_entries(token_ids, rows, self.params.prompt_logprobs, self.token_bytes)
            self._prompt_logprobs[start : start + len(entries)] = entries

    def take_prompt_logprobs(self) -> list[TokenLogprob] | None:
        """Return the entries of all the prompt's tokens but the first when they are known, until `commit`."""
        entries = self._prompt_logprobs
        return None if entries is None or len(entries) < self.prompt_len - 1 else entries

    def _undelivered_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of tokens that were told: entries are taken with their output, but for those held back."""
        return () if self.params.logprobs is None else (*self._new_logprobs, *self._held_logprobs)

    def _cut_at_stop_id(self, token_ids: list[int], num_stopless: int) -> list[int]:
        """The tokens up to the first stop id behind those that `min_tokens` protects; sets finish_reason."""
        for index, token_id in enumerate(token_ids):
            if index >= num_stopless and token_id in self._stop_ids:
                self.finish_reason, self.error = "stop", None
                return token_ids[: index + 1]
        return token_ids

    def _cut_at_grammar(self, token_ids: list[int], guide: Guide) -> list[int]:
        """The tokens up to the one that ended the grammar, or before the one it could not take; sets
        finish_reason and error. Neither min_tokens nor ignore_eos changes where a grammar ends.
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
        """The tokens up to the one that completes a stop string, and their text; sets finish_reason."""
        text, last = "", len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            added = shown = ""
            is_stop_string = False
            is_stop_id = index == last and index >= num_stopless and token_id in self._stop_ids
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


def _is_behind(last: RequestOutput | None, metrics: RequestMetrics) -> bool:
    return last is not None and last.metrics.output_tokens > metrics.output_tokens
