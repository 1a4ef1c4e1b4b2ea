"""How many programs split a product of scaled codes before a norm. No count changes a bit."""

from __future__ import annotations

import torch

from compiled_mtp.ops.blocks import KINDS
from compiled_mtp.ops.k_splits import part_counts


def count_partials(weight: torch.Tensor, rows: int, kind: str, whole_k: int = 0) -> int:
    """In how many parts `linear_blocks_partials` fills the processors with this weight; 1 on a CPU. No count
    changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    k = KINDS[kind].columns(weight.shape[1])
    return part_counts(k, whole_k or k)[-1]
