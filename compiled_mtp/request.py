"""What a caller asks for, what it gets back, and what the scheduler and the runner tell each other.

The host's side of one request lives in `Request`; the device's side lives in the runner, by slot. No torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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
    stop: tuple[str, ...] = Field(default=(), description="strings that end the text")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="token ids that end the request")
    ignore_eos: bool = Field(default=False, description="go on after an eos token")
    include_stop: bool = Field(default=False, description="leave the stop in the text")
    seed: int | None = Field(default=None, description="of the noise; none: drawn from the operating system")
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
                raise ValueError(f"{name} must not be a boolean, got {value!r}; give a value of its own type")
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
                raise ValueError(f"{name} must {rule}, got {getattr(self, name)!r}; {remedy}")
        for name, neutral in _NOT_IN_THIS_VERSION.items():
            value = getattr(self, name)
            if value != neutral:
                raise ValueError(
                    f"{name} must be {neutral!r}, got {value!r}; {name} is not in this version, "
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


def _describe(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = ", ".join(SamplingParams.model_fields)
        return f"{name} must be a sampling parameter, got an unknown name; known are {known}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    rule = problem["msg"].replace("Input should be", "must be", 1)
    return f"{name} {rule}, got {problem['input']!r}; correct the value"


class Detokenizer(Protocol):
    """Turns ids into text one at a time; holds back what is not yet a whole character."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe none."""

    def flush(self) -> str:
        """Return what was held back, once, at the end."""


class StopStrings:
    """Finds the stop string that is complete first in a stream of text.

    "First" counts characters, so the answer does not depend on how the text was cut into tokens or windows;
    of several that end at one character the longest counts.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self.stops = tuple(stops)
        self.include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take more text; return the text that is safe to show, and whether a stop string was found.

        Held back is the longest tail that may be the beginning of a stop string.
        """
        if not self.stops:
            return text, False
        held, self._held = self._held + text, ""
        found = min(
            ((at + len(stop), at) for stop in self.stops if (at := held.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            end, start = found
            return held[: end if self.include_stop else start], True
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if held.endswith(tuple(stop[:length] for stop in self.stops if len(stop) > length)):
                self._held = held[-length:]
                return held[:-length], False
        return held, False

    def flush(self) -> str:
        """Return the text held back, once no stop string can follow."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request so far; ratios are in `spec.stats`.

    All outputs of a request share one object, which goes on counting until the request has finished: copy
    what is to be kept of an unfinished one.

    rounds_by_accepted[n] is the number of verify rounds that kept exactly n drafts. It and output_tokens
    leave out what a stop cut off; the first output token comes from prefill, the others from the rounds.
    Times are seconds from the request's arrival; total_s is that of its last token, or of its end.
    """

    prompt_tokens: int
    seed: int
    output_tokens: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)
    time_to_first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def rounds(self) -> int:
        """Verify rounds so far."""
        return sum(self.rounds_by_accepted)

    @property
    def accepted_by_index(self) -> list[int]:
        """Rounds that kept draft i + 1, for each i."""
        return [sum(self.rounds_by_accepted[n:]) for n in range(1, len(self.rounds_by_accepted))]


# One is made for each request at each step: a frozen dataclass takes four times as long to make.
@dataclass(slots=True)
class RequestOutput:
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
    """The host's state of one request, owned by the scheduler.

    output_token_ids are those that the host knows. slot 0 means none; `generation` tells the owners of a slot
    apart. Raises ValueError for an empty prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    arrival_s: float = field(default_factory=time.monotonic)
    seed: int = field(init=False)
    max_output: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    slot: int = 0
    generation: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    is_first_token_due: bool = False
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics = field(init=False)
    _stop_strings: StopStrings = field(init=False)
    _stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt must have at least one token, got none; give some text or token ids")
        if self.params.stop and self.detokenizer is None:
            raise ValueError(
                f"stop must be empty without a tokenizer, got {self.params.stop!r}; use stop_token_ids"
            )
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.max_output = self.params.max_tokens
        self.metrics = RequestMetrics(len(self.prompt_token_ids), self.seed)
        self._stop_strings = StopStrings(self.params.stop, self.params.include_stop)
        self._stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._stop_ids |= self.eos_token_ids

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    def append(self, token_ids: list[int], is_round: bool, now_s: float) -> tuple[list[int], str]:
        """Take the tokens of one result; return those kept and their text, cut together at the first stop.

        `is_round` says that a verify round emitted them: all but the last were drafts. `now_s` is the time by
        time.monotonic(). Sets finish_reason.
        """
        kept, text, metrics, output = token_ids, "", self.metrics, self.output_token_ids
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
        metrics.output_tokens = len(output)
        metrics.total_s = now_s - self.arrival_s
        if is_round:
            # All but the last were drafts, unless a stop cut that one off.
            is_cut = len(kept) < len(token_ids)
            metrics.rounds_by_accepted[len(kept) if is_cut else len(kept) - 1] += 1
        else:
            metrics.time_to_first_token_s = metrics.total_s
        if self.finish_reason is not None:
            text += self.finish(self.finish_reason)
        return kept, text

    def finish(self, reason: FinishReason) -> str:
        """End the request; return the text that was held back, unless a stop string ended it."""
        self.finish_reason = reason
        self.metrics.total_s = time.monotonic() - self.arrival_s
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
