"""RequestOutput: what one step gave one request."""

from __future__ import annotations

from typing import Literal, NamedTuple

from compiled_mtp.request.metrics import RequestMetrics
from compiled_mtp.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]
# The source of an error: the caller's parameters, which fail on any engine, or the engine and its device.
ErrorKind = Literal["parameters", "engine"]


class RoundDrafts(NamedTuple):
    """The drafts of one verify round, in order; the first num_accepted were kept. is_looked_up: they stand in
    the request's own text; otherwise the model's MTP head made them.

    The kept drafts are the round's tokens; the token after them is the target's own, in place of the next
    draft if there was one. A draft that a stop cut off counts as not kept.
    """

    token_ids: list[int]
    num_accepted: int
    is_looked_up: bool = False


class RoutedExperts(NamedTuple):
    """The experts that tokens were routed to: `data` holds little-endian int16 ids [tokens, layers, k], of
    `shape`, the likeliest expert of each layer first."""

    shape: tuple[int, int, int]
    data: bytes


class RequestOutput(NamedTuple):
    """What one step gave one request: the new tokens and text, and how it ended if it did.

    new_token_ids includes the token that ended the request; new_text includes its stop only with
    `include_stop`. error: why the request ended with "error" or was ended by the engine with "abort", or
    which limit ended it with "length" before max_tokens and max_model_len. index: the number of the choice.
    logprobs: one entry per token whose text is in new_text, None unless requested; entries are held back with
    the text, and in the end there is one per token. prompt_logprobs: if requested, in the first output of
    choice 0, one entry per prompt token except the first; None in all other outputs, and if the request ended
    before its prompt was read. drafts: one entry per verify round that gave these tokens, None unless
    requested. error_kind: the source of the error, None unless the request ended with "error".
    routed_experts: the experts of the prompt and of all output tokens but the last, which no layer has seen.
    They come in the last output of a request that asked for them; None in other outputs, and for a request
    that was aborted or failed.
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
