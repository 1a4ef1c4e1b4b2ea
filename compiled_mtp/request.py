"""What a caller asks for, what it gets back, and what a request has gained so far. No torch.

Where a request stands and what it holds of the device is the scheduler's.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compiled_mtp.errors import escape, quote
from compiled_mtp.stop_strings import StopStrings

# Makes a named tuple in a third of the time that its class takes; for what is made for each request and step.
new_tuple = tuple.__new__

FinishReason = Literal["stop", "length", "abort", "error"]

# Fields that a checkpoint's generation_config.json may set, under the same names.
_GENERATION_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

_ELSE = "default: the checkpoint's, else"
_FLAGS = ("ignore_eos", "include_stop")

# Each request with stop strings keeps a tree of their characters.
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 256

# Known by name, so that they are refused instead of ignored.
_NOT_IN_THIS_VERSION: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
    "logprobs": None,
    "n": 1,
}


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen and when they end.

    Names and ranges are OpenAI's where OpenAI has them. What is not set comes from the checkpoint's
    generation_config.json, if it says it, else it is the default here. temperature 0 is greedy; top_k 0 or -1
    is off; a stop string is cut from the text unless include_stop, and the name of a special token means its
    id; eos ids end a request unless ignore_eos, `stop_token_ids` always do. Raises ValueError, one line, for
    an unknown name, a value out of range and for what this version lacks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(default=128, description="most tokens to decode")
    temperature: float = Field(default=1.0, description=f"0 (greedy) to 2; {_ELSE} 1.0")
    top_k: int = Field(default=0, description=f"keep the k likeliest tokens, 0 or -1 is off; {_ELSE} 0")
    top_p: float = Field(
        default=1.0, description=f"keep the likeliest tokens that hold this probability; {_ELSE} 1.0"
    )
    min_p: float = Field(
        default=0.0, description=f"drop tokens below this fraction of the likeliest one; {_ELSE} 0"
    )
    presence_penalty: float = Field(default=0.0, description="not in this version")
    frequency_penalty: float = Field(default=0.0, description="not in this version")
    repetition_penalty: float = Field(default=1.0, description="not in this version")
    logit_bias: dict[int, float] | None = Field(default=None, description="not in this version")
    min_tokens: int = Field(default=0, description="not in this version")
    stop: tuple[str, ...] = Field(
        default=(), description="strings that end the text, at most 64 of at most 256 characters each"
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="token ids that end the request")
    ignore_eos: bool = Field(default=False, description="go on after an eos token")
    include_stop: bool = Field(default=False, description="leave the stop in the text")
    seed: int | None = Field(
        default=None,
        description="of the noise, taken as it is; none: derived from the engine's seed and the order of "
        "arrival, else drawn from the operating system",
    )
    logprobs: int | None = Field(default=None, description="not in this version")
    n: int = Field(default=1, description="not in this version")

    if not TYPE_CHECKING:  # Type checkers keep the signature that pydantic makes from the fields.

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ValueError("; ".join(_describe(problem) for problem in error.errors())) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_single_stop(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _refuse_bools(cls, fields: Any) -> Any:
        # To Python True is the number 1; whoever writes it for one of these has mistaken the field.
        for name, value in fields.items() if isinstance(fields, dict) else ():
            several = value if isinstance(value, (list, tuple)) else (value,)
            if name not in _FLAGS and any(isinstance(one, bool) for one in several):
                raise ValueError(
                    f"{name} must not be a boolean, got {quote(value)}; give a value of its own type"
                )
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "be at least 1", "ask for one token or more"),
            ("temperature", 0 <= self.temperature <= 2, "be from 0 to 2", "0 is greedy"),
            ("top_k", self.top_k >= -1, "be -1 or more", "0 or -1 turns it off"),
            (
                "top_p",
                0 < self.top_p <= 1,
                "be above 0 and at most 1",
                "use temperature=0 for greedy decoding",
            ),
            ("min_p", 0 <= self.min_p <= 1, "be from 0 to 1", "0 turns it off"),
            ("stop", all(self.stop), "hold no empty string", "leave it out"),
            ("stop", len(self.stop) <= MOST_STOPS, f"hold at most {MOST_STOPS} strings", "leave some out"),
            (
                "stop",
                all(len(stop) <= MOST_STOP_CHARACTERS for stop in self.stop),
                f"hold strings of at most {MOST_STOP_CHARACTERS} characters",
                "end them earlier",
            ),
            ("stop", all(map(_is_unicode, self.stop)), "hold Unicode text", "leave lone surrogates out"),
            (
                "stop_token_ids",
                all(i >= 0 for i in self.stop_token_ids),
                "hold no negative id",
                "leave it out",
            ),
            (
                "seed",
                self.seed is None or -(2**63) <= self.seed < 2**63,
                "fit into 64 signed bits",
                "choose a smaller one",
            ),
        )
        for name, is_met, rule, remedy in rules:
            if not is_met:
                raise ValueError(f"{name} must {rule}, got {quote(getattr(self, name))}; {remedy}")
        for name, neutral in _NOT_IN_THIS_VERSION.items():
            value = getattr(self, name)
            if value != neutral:
                raise ValueError(
                    f"{name} must be {neutral!r}, got {quote(value)}; {name} is not in this version, "
                    f"leave it out or set {name}={neutral!r}"
                )
        return self

    def with_defaults(self, generation_defaults: Mapping[str, Any]) -> SamplingParams:
        """Return these parameters with the fields the caller did not set taken from a generation_config.

        Other keys than those of sampling are left alone. Raises ValueError if the checkpoint asks for what
        this version lacks.
        """
        defaults = {
            name: generation_defaults[name] for name in _GENERATION_FIELDS if name in generation_defaults
        }
        fields = {name: value for name, value in defaults.items() if value is not None}
        try:
            return SamplingParams(**(fields | {name: getattr(self, name) for name in self.model_fields_set}))
        except ValueError as error:
            raise ValueError(f"generation_config.json of the checkpoint: {error}") from None


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the request that arrived after `index` others: the first has `seed` itself.

    Requests that shared one would share their noise, and different prompts would begin alike.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(problem: Any) -> str:
    name = escape(".".join(str(part) for part in problem["loc"]), 80)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(SamplingParams.model_fields)
        return f"{name} must be a sampling parameter, got an unknown name; known are {known}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    rule = problem["msg"].replace("Input should be", "must be", 1)
    return f"{name} {rule}, got {quote(problem['input'])}; correct the value"


class Detokenizer(Protocol):
    """Turns ids into text one at a time; holds back what is not yet a whole character."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe none."""

    def flush(self) -> str:
        """Return what was held back, once, at the end."""


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


class RequestOutput(NamedTuple):
    """What one step gave one request: the new tokens and text, and how it ended if it did.

    new_token_ids holds the token that ended the request; new_text holds its stop only with `include_stop`.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    metrics: RequestMetrics
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: None = None


@dataclass(slots=True, eq=False)
class Request:
    """What one request asks for and what it has gained so far: the tokens that the host knows, and counts.

    `max_output`, and seed and mtp_step of `history`, may be changed until the scheduler has it. Raises
    ValueError for an empty prompt and for stop strings without a detokenizer.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    arrival_s: float = field(default_factory=time.monotonic)
    max_output: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    history: RequestHistory = field(init=False)
    metrics: RequestMetrics = field(init=False)
    _stop_strings: StopStrings = field(init=False)
    _stop_ids: frozenset[int] = field(init=False)

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
        self._stop_strings = StopStrings(self.params.stop, self.params.include_stop)
        self._stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._stop_ids |= self.eos_token_ids

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    def append(
        self, token_ids: list[int], num_drafts: int | None, now_s: float, *, has_bonus: bool = True
    ) -> tuple[list[int], str]:
        """Take the tokens of one result; return those kept and their text, cut together at the first stop.

        num_drafts is what the verify round had that emitted them: all were drafts but the last, and that one
        too without `has_bonus`; None for the token that prefill emits. `now_s` is the time by
        time.monotonic(). Sets finish_reason.
        """
        kept, text, output = token_ids, "", self.output_token_ids
        room = self.max_output - len(output)
        if len(kept) >= room:
            kept = kept[:room]
            self.finish_reason = "length"
        if not self._stop_ids.isdisjoint(kept):
            first = next(index for index, token_id in enumerate(kept) if token_id in self._stop_ids)
            kept = kept[: first + 1]
            self.finish_reason = "stop"
        if self.detokenizer is not None:
            kept, text = self._take_text(kept, self.detokenizer)
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
            rounds.append(num_drafts * _MOST_KEPT + num_kept)
        self.metrics = new_tuple(RequestMetrics, (history, len(rounds), len(output), total_s))
        if self.finish_reason is not None:
            text += self.finish(self.finish_reason)
        return kept, text

    def finish(self, reason: FinishReason) -> str:
        """End the request; return the text that was held back, unless a stop string ended it."""
        self.finish_reason = reason
        self.metrics = self.metrics._replace(total_s=time.monotonic() - self.arrival_s)
        held = self.detokenizer.flush() if self.detokenizer is not None else ""
        return self._stop_strings.flush() + held

    def _take_text(self, token_ids: list[int], detokenizer: Detokenizer) -> tuple[list[int], str]:
        """The tokens up to the one that completes a stop string, and their text; sets finish_reason."""
        text = ""
        for index, token_id in enumerate(token_ids):
            if token_id in self._stop_ids and not self.params.include_stop:
                break  # the last one
            shown, is_stop_string = self._stop_strings.add(detokenizer.add(token_id))
            text += shown
            if is_stop_string:
                self.finish_reason = "stop"
                detokenizer.flush()
                return token_ids[: index + 1], text
        return token_ids, text
