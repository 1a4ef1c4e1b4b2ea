"""Log probabilities of drawn tokens, taken from raw logits or, if a request asks so, from processed ones."""

from __future__ import annotations

import torch

from compiled_mtp.cache.slot_sampling import PROCESSED_LOGPROBS
from compiled_mtp.ops.row_logprobs import row_logprobs
from compiled_mtp.ops.sample import filter_logits
from compiled_mtp.step import Step
from compiled_mtp.step_output import pack_logprobs


def filtered_logits(
    step: Step,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits [M, V] to which `Step.draw` adds noise for the same arguments; mutates nothing.

    Call it before the round commits: penalties and bad words read the slots' histories.
    """
    return filter_logits(
        logits,
        drafts=drafts,
        positions=positions,
        state_index=state_index,
        tables=step.sampling_tables(),
        num_valid_ids=step.num_valid_ids,
        column_ids=None,
        masks=masks,
    )


def add_logprobs(
    step: Step,
    packed: torch.Tensor,
    state_index: torch.Tensor,
    raw: torch.Tensor,
    filtered: torch.Tensor | None,
) -> torch.Tensor:
    """Append the log probabilities of a packed round's tokens, as `pack_logprobs` does.

    raw [B * W, V]: the logits of the round. filtered: their `filtered_logits`, used for requests with
    processed log probabilities; None if no request asks for these.
    """
    rows, num_tokens = raw, raw.shape[0] // state_index.shape[0]
    if filtered is not None:
        features = step.slots.features[state_index.to(torch.int64)]
        is_processed = (features & PROCESSED_LOGPROBS) != 0
        rows = torch.where(is_processed.repeat_interleave(num_tokens)[:, None], filtered, raw)
    chosen = packed[:, 2 : 2 + num_tokens].reshape(-1).contiguous()
    return pack_logprobs(packed, row_logprobs(rows, chosen, step.num_valid_ids))
