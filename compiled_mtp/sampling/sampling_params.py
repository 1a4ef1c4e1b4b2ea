"""SamplingParams: the parameters of one request, checked when they are created. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compiled_mtp.errors import escape, quote
from compiled_mtp.model_config import GENERATION_FIELDS
from compiled_mtp.sampling import parameter_checks as checks

_ELSE = "default: the checkpoint's, else"
_FLAGS = ("ignore_eos", "include_stop", "include_drafts", "parallel_tool_calls", "return_routed_experts")

# Bounds: each request with stop strings keeps a tree of their characters.
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 256
MOST_SALT = 256


class SamplingParams(BaseModel):
    """How one request's tokens are sampled, which grammar they follow and when they end.

    Names and ranges are OpenAI's where OpenAI has them, else vLLM's. A field that is not set takes the value
    of the checkpoint's generation_config.json, else the default here. temperature 0 is greedy; top_k 0 or -1
    is off. The text leaves a stop string out unless include_stop is set; a stop string that names a special
    token means its id. eos ids end a request unless ignore_eos is set; `stop_token_ids` always do. At most
    one field may set a grammar. cache_salt changes no token. docs/sampling.md has the order in which the
    parameters apply. Raises ValueError, one line, for an unknown or refused name and for a value out of
    range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(default=128, description="most tokens to decode")
    temperature: float = Field(default=1.0, description=f"0 (greedy) to 2; {_ELSE} 1.0")
    top_k: int = Field(default=0, description=f"keep the k likeliest tokens, 0 or -1 is off; {_ELSE} 0")
    top_p: float = Field(
        default=1.0, description=f"keep the likeliest tokens up to this total probability; {_ELSE} 1.0"
    )
    min_p: float = Field(
        default=0.0, description=f"drop tokens below this fraction of the likeliest one; {_ELSE} 0"
    )
    presence_penalty: float = Field(
        default=0.0, description=f"-2 to 2, subtracted from the logits of tokens in the output; {_ELSE} 0"
    )
    frequency_penalty: float = Field(
        default=0.0, description=f"-2 to 2, subtracted once per occurrence in the output; {_ELSE} 0"
    )
    repetition_penalty: float = Field(
        default=1.0,
        description=f"above 0 to 2, lowers the logits of tokens in the prompt and the output; {_ELSE} 1",
    )
    logit_bias: dict[int, float] | None = Field(
        default=None, description='added to the logits of these ids, -100 to 100: {"50": -100}'
    )
    min_tokens: int = Field(
        default=0, description="tokens before which no eos, stop id or stop string ends the request"
    )
    allowed_token_ids: tuple[int, ...] | None = Field(
        default=None, description="the only ids that may be drawn"
    )
    bad_words: tuple[str, ...] = Field(
        default=(),
        description="bans the ids of each word, encoded alone and after a space, at most 64 sequences; the "
        "same letters inside other tokens (Error in TypeError) are not banned",
    )
    stop: tuple[str, ...] = Field(
        default=(), description="strings that end the text, at most 64 of at most 256 characters each"
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="token ids that end the request, at most 64"
    )
    ignore_eos: bool = Field(default=False, description="continue after an eos token")
    include_stop: bool = Field(default=False, description="keep the stop string in the text")
    seed: int | None = Field(
        default=None,
        description="seed of the sampling noise; default: derived from the engine's seed and the order of "
        "arrival, else drawn from the operating system",
    )
    n: int = Field(default=1, description="choices, 1 to 16; more than one need a temperature above 0")
    logprobs: int | None = Field(
        default=None,
        description="log probabilities of the output's tokens and of this many likeliest ids, 0 to 20",
    )
    logprobs_mode: Literal["raw", "processed", "both"] = Field(
        default="raw",
        description="raw for the model's own, processed for those after masks, temperature and filters, "
        "both for raw entries that contain the processed ones",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        description="raw log probabilities of the prompt's tokens and of this many likeliest ids, 0 to 20",
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="OpenAI's: text, json_object or json_schema"
    )
    guided_regex: str | None = Field(default=None, description="a regex that the whole output matches")
    guided_choice: tuple[str, ...] | None = Field(default=None, description="the output is one of these")
    guided_grammar: str | None = Field(default=None, description="a Lark grammar of the output")
    include_drafts: bool = Field(default=False, description="list the drafts of each round in the outputs")
    return_routed_experts: bool = Field(
        default=False,
        description="return the experts that every token was routed to, by layer; needs an engine with "
        "routed_experts",
    )
    cache_salt: str | None = Field(
        default=None,
        description="the prompt shares cached prefixes only with prompts of the same salt, at most 256 "
        "characters",
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="OpenAI's: the chat template shows them, and tool_choice names one"
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="none, auto, required, or the function of tools that the model must call"
    )
    parallel_tool_calls: bool = Field(
        default=True, description="whether tool_choice required allows several calls"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description='variables of the chat template: {"enable_thinking": false}'
    )

    if not TYPE_CHECKING:  # Type checkers keep the signature that pydantic makes from the fields.

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ValueError("; ".join(map(_describe, error.errors()))) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, fields: Any) -> Any:
        checks.check_names(fields, list(cls.model_fields))
        # Python takes True for the number 1; a caller who passes it here has mistaken the field.
        for name, value in fields.items():
            several = value if isinstance(value, (list, tuple)) else (value,)
            if name not in _FLAGS and any(isinstance(one, bool) for one in several):
                raise ValueError(
                    f"{name} must not be a boolean, got {quote(value)}; give a value of its own type"
                )
        return fields

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_single_stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("bad_words", "stop_token_ids", mode="before")
    @classmethod
    def _take_none_for_no_entries(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias(cls, value: Any) -> Any:
        return None if value is None else checks.logit_bias(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, is_met, rule, remedy in _rules(self):
            if not is_met:
                raise ValueError(f"{name} must {rule}, got {quote(getattr(self, name))}; {remedy}")
        checks.allowed_token_ids(self.allowed_token_ids)
        checks.check_bad_words(self.bad_words)
        checks.check_stop_ids(self.stop_token_ids)
        checks.only_one_grammar(self.__dict__)
        return self

    def with_defaults(self, generation_defaults: Mapping[str, Any]) -> SamplingParams:
        """Return a copy in which fields that the caller did not set take a generation_config's values.

        Ignores keys that are not about sampling. Raises ValueError for a default out of range.
        """
        defaults = {
            name: generation_defaults[name] for name in GENERATION_FIELDS if name in generation_defaults
        }
        fields = {name: value for name, value in defaults.items() if value is not None}
        try:
            return SamplingParams(**(fields | {name: getattr(self, name) for name in self.model_fields_set}))
        except ValueError as error:
            raise ValueError(f"generation_config.json of the checkpoint: {error}") from None


def _rules(one: SamplingParams) -> tuple[tuple[str, bool, str, str], ...]:
    """Return (name, whether the rule is met, rule, remedy) for each rule."""
    most = MOST_STOP_CHARACTERS
    penalty, listed = "be a number from -2 to 2", f"be an integer from 0 to {checks.MAX_LOGPROBS}"
    return (
        ("max_tokens", one.max_tokens >= 1, "be at least 1", "ask for one token or more"),
        ("temperature", 0 <= one.temperature <= 2, "be from 0 to 2", "0 is greedy"),
        ("top_k", one.top_k >= -1, "be -1 or more", "0 or -1 turns it off"),
        ("top_p", 0 < one.top_p <= 1, "be above 0 and at most 1", "use temperature=0 for greedy decoding"),
        ("min_p", 0 <= one.min_p <= 1, "be from 0 to 1", "0 turns it off"),
        ("presence_penalty", -2 <= one.presence_penalty <= 2, penalty, "0 turns it off"),
        ("frequency_penalty", -2 <= one.frequency_penalty <= 2, penalty, "0 turns it off"),
        ("repetition_penalty", 0 <= one.repetition_penalty <= 2, "be a number from 0 to 2", "1 turns it off"),
        ("repetition_penalty", one.repetition_penalty > 0, "be above 0", "1 turns it off"),
        (
            "min_tokens",
            0 <= one.min_tokens <= one.max_tokens,
            f"be an integer from 0 to {one.max_tokens}",
            "raise max_tokens or lower it",
        ),
        (
            "n",
            1 <= one.n <= checks.MAX_CHOICES,
            f"be an integer from 1 to {checks.MAX_CHOICES}",
            "send more requests",
        ),
        (
            "n",
            one.n == 1 or one.temperature >= 1e-5,
            "be 1 at temperature 0",
            "all choices would be equal; raise temperature",
        ),
        ("logprobs", 0 <= (one.logprobs or 0) <= checks.MAX_LOGPROBS, listed, "0 lists the token alone"),
        (
            "prompt_logprobs",
            0 <= (one.prompt_logprobs or 0) <= checks.MAX_LOGPROBS,
            listed,
            "0 lists the token alone",
        ),
        ("stop", all(one.stop), "hold no empty string", "leave it out"),
        ("stop", len(one.stop) <= MOST_STOPS, f"hold at most {MOST_STOPS} strings", "leave some out"),
        (
            "stop",
            all(len(stop) <= most for stop in one.stop),
            f"hold strings of at most {most} characters",
            "end them earlier",
        ),
        ("stop", all(map(is_unicode, one.stop)), "hold Unicode text", "leave lone surrogates out"),
        (
            "cache_salt",
            one.cache_salt is None or (len(one.cache_salt) <= MOST_SALT and is_unicode(one.cache_salt)),
            f"be Unicode text of at most {MOST_SALT} characters",
            "shorten it",
        ),
        ("bad_words", all(map(is_unicode, one.bad_words)), "hold Unicode text", "leave lone surrogates out"),
        (
            "seed",
            one.seed is None or -(2**63) <= one.seed < 2**63,
            "fit into 64 signed bits",
            "choose a smaller one",
        ),
    )


def is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8: text from JSON may have halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(problem: Any) -> str:
    name = escape(".".join(str(part) for part in problem["loc"]), 80)
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    rule = problem["msg"].replace("Input should be", "must be", 1)
    return f"{name} {rule}, got {quote(problem['input'])}; correct the value"
