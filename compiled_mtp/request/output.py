"""RequestOutput: the output of one step for one request."""

from __future__ import annotations

from typing import Literal, NamedTuple

from compiled_mtp.request.metrics import RequestMetrics
from compiled_mtp.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]
# The source of an error: the caller's parameters, which fail on any engine, or the engine and its device.
ErrorKind = Literal["parameters", "engine"]


class RoundDrafts(NamedTuple):
    """The drafts of one verify round, in order; the first num_accepted were kept.

    is_looked_up: the drafts come from the request's own text, otherwise from the MTP head. The kept drafts
    are the round's first tokens; the token after them is the target's own, in place of the next draft if
    there was one. A draft that a stop cut off counts as not kept.
    """

    token_ids: list[int]
    num_accepted: int
    is_looked_up: bool = False


class RoutedExperts(NamedTuple):
    """The experts that computed the tokens: `data` has the ids as little-endian int16, [tokens, layers, k] as
    `shape` says, the likeliest expert of each layer first."""

    shape: tuple[int, int, int]
    data: bytes


class RequestOutput(NamedTuple):
    """The output of one step for one request: the new tokens and text, and the reason if the request ended.

    new_token_ids: includes the token that ended the request. new_text: includes the stop only with
    `include_stop`. error: why the request ended with "error", why the engine ended it with "abort", or which
    limit ended it with "length" before max_tokens and max_model_len. error_kind: the source of the error,
    None unless the request ended with "error". index: the number of the choice. drafts: one entry per verify
    round of these tokens, None unless requested.

    logprobs: one entry per token with text in new_text, None unless requested; the engine delivers an entry
    together with its text, and all outputs together have one per token. prompt_logprobs: if requested, in the
    first output of choice 0, one entry per prompt token except the first; None in all other outputs, and if
    the request ended before its prompt was read. routed_experts: if requested, in the last output, the
    experts of the prompt and of all output tokens except the last, which is never an input; None in other
    outputs, and for a request that was aborted or failed.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    metrics: RequestMetrics
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    index: int = 0  # type: ignore[assignment]  # OpenAI's name; it hides tuple.index, which is not used.
    prompt_logprobs: list[TokenLogprob] | None = None
    drafts: list[RoundDrafts] | None = None
    error_kind: ErrorKind | None = None
    routed_experts: RoutedExperts | None = None
