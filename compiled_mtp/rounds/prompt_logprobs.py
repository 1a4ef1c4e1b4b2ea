"""Log probabilities of a prompt's own tokens: each row of a chunk scores the token after it.

Runs uncompiled after the chunk's program, only for requests that ask for it: other chunks' launches do not
change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.ops.row_logprobs import RowLogprobs, row_logprobs

SLICE_ROWS = 64
"""Rows whose logits exist at one time; the memory plan reserves room for them."""


@torch.no_grad()
def score_rows(
    target: TargetModel, hidden: torch.Tensor, next_ids: torch.Tensor, num_valid_ids: int
) -> RowLogprobs:
    """Return the log probabilities of next_ids [N] int64, each of which follows the row of its index.

    N is a multiple of SLICE_ROWS. hidden [n, H] are a chunk's hidden states after the final norm: ids from n
    on are scored on rows of zeros, and rows from N on are not read. Every product has SLICE_ROWS rows, which
    begin at a multiple of SLICE_ROWS in the chunk: the bits depend on the prompt alone.
    """
    slices = []
    for first in range(0, next_ids.shape[0], SLICE_ROWS):
        rows = hidden[first : first + SLICE_ROWS]
        rows = F.pad(rows, (0, 0, 0, SLICE_ROWS - rows.shape[0]))
        logits = target.logits(rows)
        chosen = next_ids[first : first + SLICE_ROWS]
        slices.append(row_logprobs(logits, chosen, min(num_valid_ids, logits.shape[1])))
    return RowLogprobs(*(torch.cat(parts) for parts in zip(*slices, strict=True)))
