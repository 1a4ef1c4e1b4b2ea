"""Fold records into stored states, with the tile and the operations of gdn_verify's own fold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.gdn_triton import (
    BLOCK_V,
    NUM_WARPS,
    OPTIONS,
    fold_records,
    state_offsets,
    tile_constants,
)


@triton.jit
def gdn_commit_kernel(
    state,
    ring_k,
    ring_u,
    ring_g,
    state_index,
    base,
    target,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    slot = tl.load(state_index + request).to(tl.int64)
    folded = tl.load(base + request)
    count = (tl.load(target + request) - folded).to(tl.int32)
    if count > 0:
        value = block * BLOCK_V + tl.arange(0, BLOCK_V)
        state_at = state + (slot * NV + head) * DV * DK + state_offsets(block, DK, BLOCK_V, LANES)
        k_rows = (slot * NK + head // (NV // NK)) * RING
        v_rows = (slot * NV + head) * RING
        tile = fold_records(
            tl.load(state_at), ring_k, ring_u, ring_g, k_rows, v_rows, folded, count, value,
            DK, DV, RING, BLOCK_V, LANES,
        )  # fmt: skip
        tl.store(state_at, tile)


def launch(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    _, num_v_heads, head_v_dim, head_k_dim = state.shape
    if state_index.shape[0]:
        gdn_commit_kernel[(head_v_dim // BLOCK_V, num_v_heads, state_index.shape[0])](
            state, ring_k, ring_u, ring_g, state_index, base, target,
            **tile_constants(ring_k.shape[1], num_v_heads, head_k_dim, head_v_dim, ring_k.shape[2]),
            num_warps=NUM_WARPS, **OPTIONS,
        )  # fmt: skip
