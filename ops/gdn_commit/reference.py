"""What gdn_commit computes."""

from __future__ import annotations

import torch

from compiled_mtp.ops.gdn_math import fold_records


def gdn_commit(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    slots = state_index.long()
    current = state[slots]
    fold_records(current, ring_k, ring_u, ring_g, state_index, base, target)
    folded = (target > base).nonzero()[:, 0]
    state[slots[folded]] = current[folded]
