"""Log probabilities of a prompt's own tokens: what each row of a chunk gives to the token behind it.

Runs beside the chunk's program, uncompiled, and only for a chunk of which somebody asks: chunks of others
launch what they always did.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.ops.row_logprobs import RowLogprobs, row_logprobs

SLICE_ROWS = 64
"""Rows whose logits are made at once; the memory plan leaves room for so many."""


@torch.no_grad()
def score_rows(
    target: TargetModel, hidden: torch.Tensor, next_ids: torch.Tensor, num_valid_ids: int
) -> RowLogprobs:
    """Return the log probabilities of next_ids [N] int64, a multiple of SLICE_ROWS, each behind its row.

    hidden [n, H] are a chunk's, after the final norm; rows of next_ids from n on score zeros, and rows of
    hidden from N on are left alone. Every product has SLICE_ROWS rows, which begin at a multiple of it in the
    chunk: the bits depend on the prompt alone.
    """
    slices = []
    for first in range(0, next_ids.shape[0], SLICE_ROWS):
        rows = hidden[first : first + SLICE_ROWS]
        rows = F.pad(rows, (0, 0, 0, SLICE_ROWS - rows.shape[0]))
        logits = target.logits(rows)
        chosen = next_ids[first : first + SLICE_ROWS]
        slices.append(row_logprobs(logits, chosen, min(num_valid_ids, logits.shape[1])))
    return RowLogprobs(*(torch.cat(parts) for parts in zip(*slices, strict=True)))
