"""The last outputs of requests that do not end by a stop or by their length."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.request import ErrorKind, FinishReason, Request, RequestOutput, RoundDrafts


def cut_short(
    request: Request, reason: FinishReason, error: str | None, outputs: Sequence[RequestOutput]
) -> RequestOutput:
    """End a request after its delivered tokens; return its last output, the same if called again.

    outputs: the outputs that were not taken yet, of all requests, oldest first.
    """
    own = (one for one in reversed(outputs) if (one.request_id, one.index) == request.key)
    last = next(own, None)
    text, entries = request.cut_short(reason, last)
    has_prompt_logprobs = last is not None and last.prompt_logprobs is not None
    return RequestOutput(
        request.request_id,
        [],
        text,
        request.metrics,
        reason,
        error,
        entries,
        request.index,
        None if has_prompt_logprobs else request.take_prompt_logprobs(),
        request.list_drafts(),
        "engine" if reason == "error" else None,
    )


def last_output(
    request: Request,
    reason: FinishReason,
    error: str | None,
    token_ids: Sequence[int],
    text: str,
    drafts: list[RoundDrafts] | None,
    error_kind: ErrorKind,
) -> RequestOutput:
    """End the request; return its last output, with its last tokens and their text."""
    text += request.finish(reason)
    entries = request.take_logprobs()
    return RequestOutput(
        request.request_id,
        list(token_ids),
        text,
        request.metrics,
        reason,
        error,
        entries,
        request.index,
        request.take_prompt_logprobs(),
        request.list_drafts() if drafts is None else drafts,
        error_kind if reason == "error" else None,
    )


def describe_logits(request: Request) -> str:
    """Return the error of a request whose next row of logits is not finite."""
    return (
        "logits must be finite, got NaN or infinity for position "
        f"{request.prompt_len + len(request.output_token_ids)}; look for such numbers in the "
        "checkpoint's weights, and for a dtype or kv_dtype that is too narrow for it"
    )


def describe_masks(request: Request) -> str:
    """Return the error of a request whose parameters mask every id of its next token."""
    params = request.params
    asked = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
        "the grammar": request.guide is not None,
    }
    names = ", ".join(name for name, is_asked in asked.items() if is_asked)
    return (
        f"{names} must leave a token to draw, got none for position "
        f"{request.prompt_len + len(request.output_token_ids)}; allow more"
    )
