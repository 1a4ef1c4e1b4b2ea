"""The gated delta rule over a window: one program holds a tile of one head's state for all its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.gdn_triton import (
    BLOCK_V,
    LANES,
    NUM_WARPS,
    OPTIONS,
    apply_record,
    check_head_dims,
    fold_records,
    gated_norm_variants,
    launch_gated_norm,
    tile_indices,
)
from compiled_mtp.ops.variants import KernelVariant


@triton.jit
def sum_over_keys(tile, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(tile, 0), (BLOCK_V, LANES)), 1)


# One binary for every window length: Triton would specialise on 1 and on multiples of 16.
@triton.jit(do_not_specialize=["query_len"])
def gdn_verify_kernel(
    q,
    k,
    v,
    exp_g,
    beta,
    out,
    state,
    ring_k,
    ring_u,
    ring_g,
    state_index,
    base,
    pos,
    query_len,
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
    key_head = head // (NV // NK)
    slot = tl.load(state_index + request).to(tl.int64)
    folded = tl.load(base + request)
    position = tl.load(pos + request)
    count = (position - folded).to(tl.int32)
    key, value = tile_indices(block, DK, BLOCK_V, LANES)

    state_at = state + (slot * NV + head) * DV * DK + value[None, :] * DK + key
    tile = fold_records(
        tl.load(state_at), ring_k, ring_u, ring_g, slot, head, folded, count, key, value, NK, NV, DK, DV, RING
    )
    if count > 0:
        tl.store(state_at, tile)

    lane = block * BLOCK_V + tl.arange(0, BLOCK_V)
    key_lane = tl.arange(0, DK)
    first_row = request.to(tl.int64) * query_len
    for token in range(query_len):
        row = first_row + token
        k_row = tl.load(k + (row * NK + key_head) * DK + key)
        q_row = tl.load(q + (row * NK + key_head) * DK + key)
        v_row = tl.load(v + (row * NV + head) * DV + lane)
        decay = tl.load(exp_g + row * NV + head)
        rate = tl.load(beta + row * NV + head)

        read = sum_over_keys(tile * decay * k_row, BLOCK_V, LANES)
        update = rate * (v_row - read)
        wide = tl.reshape(tl.broadcast_to(update[:, None], (BLOCK_V, LANES)), (BLOCK_V * LANES,))
        tile = apply_record(tile, k_row, wide, decay)
        tl.store(out + (row * NV + head) * DV + lane, sum_over_keys(tile * q_row, BLOCK_V, LANES))

        # The ring is at least two windows long: no program of this launch folds the rows written here.
        ring_row = (position + token) % RING
        tl.store(ring_u + ((slot * NV + head) * RING + ring_row) * DV + lane, update)
        if block == 0:
            tl.store(ring_g + (slot * NV + head) * RING + ring_row, decay)
            if head % (NV // NK) == 0:
                record = tl.load(k + (row * NK + key_head) * DK + key_lane)
                tl.store(ring_k + ((slot * NK + key_head) * RING + ring_row) * DK + key_lane, record)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    eps: float,
    gate_activation: str,
) -> torch.Tensor:
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    check_head_dims(head_k_dim, head_v_dim)
    batch = state_index.shape[0]
    out = torch.empty((rows, num_v_heads, head_v_dim), dtype=torch.float32, device=v.device)
    gdn_verify_kernel[(head_v_dim // BLOCK_V, num_v_heads, batch)](
        q, k, v, exp_g, beta, out, state, ring_k, ring_u, ring_g, state_index, base, pos, rows // batch,
        NK=num_k_heads, NV=num_v_heads, DK=head_k_dim, DV=head_v_dim, RING=ring_k.shape[2],
        BLOCK_V=BLOCK_V, LANES=LANES, num_warps=NUM_WARPS, **OPTIONS,
    )  # fmt: skip
    return launch_gated_norm(out, z, norm_weight, eps, gate_activation)


def variants() -> list[KernelVariant]:
    tensors = ("q", "k", "v", "exp_g", "beta", "out", "state", "ring_k", "ring_u", "ring_g")
    cursors = {"state_index": "*i32", "base": "*i64", "pos": "*i64"}
    return [
        KernelVariant(
            name=f"{num_v_heads // 16}x-ring{ring}",
            function=gdn_verify_kernel,
            signature={**dict.fromkeys(tensors, "*fp32"), **cursors, "query_len": "i32"},
            constexprs={
                "NK": 16, "NV": num_v_heads, "DK": 128, "DV": 128, "RING": ring,
                "BLOCK_V": BLOCK_V, "LANES": LANES,
            },
            num_warps=NUM_WARPS,
            aligned=(*tensors, *cursors),
            options=OPTIONS,
        )
        for num_v_heads, ring in ((48, 8), (48, 16), (32, 8), (16, 8))
    ] + gated_norm_variants()  # fmt: skip
