"""The sampling parameters that a request's slot gets on the device."""

from __future__ import annotations

from compiled_mtp.plan import SlotSampling
from compiled_mtp.request import Request
from compiled_mtp.sampling.parameter_checks import allowed_token_ids

# The largest int32; as a top_k it keeps every token, like any number above the vocabulary's size.
_MOST_TOP_K = 2**31 - 1


def slot_sampling(request: Request) -> SlotSampling:
    """Return a request's sampling parameters in the form that its slot takes."""
    params = request.params
    has_repetition, has_min_tokens = params.repetition_penalty != 1, params.min_tokens > 0
    return SlotSampling(
        seed=request.history.seed,
        temperature=params.temperature,
        top_k=min(max(params.top_k, 0), _MOST_TOP_K),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=tuple((params.logit_bias or {}).items()),
        allowed_ids=allowed_token_ids(params.allowed_token_ids),
        # The first output token is at position prompt_len.
        min_position=request.prompt_len + params.min_tokens if has_min_tokens else 0,
        stop_ids=tuple(sorted(request.stop_ids)) if has_min_tokens else (),
        bad_words=request.bad_word_ids,
        prompt_ids=tuple(request.prompt_token_ids) if has_repetition else (),
        forced_ids=request.forced_ids,
        # The first output token is at position prompt_len.
        forced_position=request.prompt_len if request.forced_ids else 0,
    )
