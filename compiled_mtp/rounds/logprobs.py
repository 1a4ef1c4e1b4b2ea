"""Log probabilities of a round's tokens, from raw logits and, if a request asks so, from processed ones."""

from __future__ import annotations

import torch

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
    raw: torch.Tensor,
    filtered: torch.Tensor | None,
) -> torch.Tensor:
    """Append the log probabilities of a packed round's tokens, as `pack_logprobs` does.

    raw [B * W, V]: the logits of the round. filtered: their `filtered_logits`, whose log probabilities follow
    those of the raw logits; None if no request asks for these.
    """
    num_tokens = raw.shape[0] // packed.shape[0]
    chosen = packed[:, 2 : 2 + num_tokens].reshape(-1).contiguous()
    for logits in (raw,) if filtered is None else (raw, filtered):
        packed = pack_logprobs(packed, row_logprobs(logits, chosen, step.num_valid_ids))
    return packed
