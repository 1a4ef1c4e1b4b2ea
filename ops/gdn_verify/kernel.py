"""The gated delta rule over verify windows: a program holds one tile of a head's state for all tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.gdn_triton import (
    BLOCK_V,
    NUM_WARPS,
    OPTIONS,
    apply_record,
    fold_records,
    launch_gated_norm,
    load_key,
    state_offsets,
    tile_constants,
    widen_key,
)
from compiled_mtp.ops.gdn_verify.many_kernel import launch_many
from compiled_mtp.ops.k_splits import NARROW_ROWS

# From this number of requests on `gdn_many_kernel` is faster; its bits were compared for keys of this width.
LEAST_MANY = 32
MANY_KEY_DIM = 128


@triton.jit
def sum_over_keys(tile, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(tile, 0), (BLOCK_V, LANES)), 1)


@triton.jit
def load_token(
    q, k, v, exp_g, beta, key_at, head_at, value, DK: tl.constexpr, DV: tl.constexpr, LANES: tl.constexpr
):
    """Load key, query, the values `value`, exp_g and beta of a token and head."""
    key = load_key(k + key_at, DK, LANES)
    query = load_key(q + key_at, DK, LANES)
    return key, query, tl.load(v + head_at * DV + value), tl.load(exp_g + head_at), tl.load(beta + head_at)


# One binary for every window length: Triton would specialise on 1 and on multiples of 16.
@triton.jit(do_not_specialize=["query_len", "max_unfolded"])
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
    max_unfolded,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    key_head = head // (NV // NK)
    slot = tl.load(state_index + request).to(tl.int64)
    folded = tl.load(base + request)
    position = tl.load(pos + request)
    count = (position - folded).to(tl.int32)
    first_row = (position % RING).to(tl.int32)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    # 32 bits suffice for offsets into the window's rows, but not into the slots.
    key_at = (request * query_len * NK + key_head) * DK
    head_at = request * query_len * NV + head
    k_rows = (slot * NK + key_head) * RING
    v_rows = (slot * NV + head) * RING

    state_at = state + (slot * NV + head) * DV * DK + state_offsets(block, DK, BLOCK_V, LANES)
    tile = tl.load(state_at)
    if count > 0:
        tile = fold_records(
            tile, ring_k, ring_u, ring_g, k_rows, v_rows, folded, count, value,
            DK, DV, RING, BLOCK_V, LANES,
        )  # fmt: skip
        if count + query_len > max_unfolded:
            tl.store(state_at, tile)

    # Earlier kernels may still be writing the window's inputs, but not states, rings or cursors (reference.py
    # says why).
    if PDL:
        gdc_wait()
    key, query, value_row, decay, own_beta = load_token(
        q, k, v, exp_g, beta, key_at, head_at, value, DK, DV, LANES
    )
    for token in range(query_len):
        # Load the next token while this one is computed; the last token is loaded twice.
        is_more = (token + 1 < query_len).to(tl.int32)
        next_key_at = key_at + is_more * (NK * DK)
        next_head_at = head_at + is_more * NV
        next_key, next_query, next_value_row, next_decay, next_beta = load_token(
            q, k, v, exp_g, beta, next_key_at, next_head_at, value, DK, DV, LANES
        )

        # With S the state before the token: u = beta (v - exp(g) S k) and o = exp(g) S q + u (k . q), that
        # is the new state times q. Both products read S, so neither waits for the other.
        wide_key = widen_key(key, BLOCK_V)
        read = sum_over_keys(tile * wide_key, BLOCK_V, LANES)
        answer = sum_over_keys(tile * widen_key(query, BLOCK_V), BLOCK_V, LANES)
        dot = tl.sum(key * query)
        update = own_beta * (value_row - decay * read)
        tl.store(out + head_at * DV + value, tl.fma(update, dot, decay * answer))
        if token + 1 < query_len:
            # No later token needs the last state: the next round folds what it accepts.
            tile = apply_record(tile, wide_key, update, decay, BLOCK_V, LANES)

        # A window and the entries before it fit into the ring: no program of this launch folds the rows
        # written here.
        ring_row = ((first_row + token) % RING).to(tl.int64)
        tl.store(ring_u + (v_rows + ring_row) * DV + value, update)
        if block == 0:
            tl.store(ring_g + v_rows + ring_row, decay)
            if head % (NV // NK) == 0:
                record_at = ring_k + (k_rows + ring_row) * DK
                row = tl.arange(0, DK // LANES)
                tl.store(record_at + row[:, None] * LANES + tl.arange(0, LANES)[None, :], key)
        key = next_key
        query = next_query
        value_row = next_value_row
        decay = next_decay
        own_beta = next_beta
        key_at = next_key_at
        head_at = next_head_at


def launch(args: Any) -> torch.Tensor:
    v = args.v
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = args.k.shape[1:]
    batch = args.state_index.shape[0]
    out = torch.empty((rows, num_v_heads, head_v_dim), dtype=torch.float32, device=v.device)
    device = device_of(v.device.index)
    if batch >= LEAST_MANY and head_k_dim == MANY_KEY_DIM and device.has_copy_engine:
        launch_many(args, out)
    else:
        gdn_verify_kernel[(head_v_dim // BLOCK_V, num_v_heads, batch)](
            args.q, args.k, v, args.exp_g, args.beta, out, args.state, args.ring_k, args.ring_u, args.ring_g,
            args.state_index, args.base, args.pos, rows // batch, args.max_unfolded,
            **tile_constants(num_k_heads, num_v_heads, head_k_dim, head_v_dim, args.ring_k.shape[2]),
            PDL=device.has_dependent_launch, num_warps=NUM_WARPS, launch_pdl=device.has_dependent_launch,
            **OPTIONS,
        )  # fmt: skip
    # Weights are resident for at most NARROW_ROWS rows.
    resident = args.resident and rows <= NARROW_ROWS
    return launch_gated_norm(out, args.z, args.norm_weight, args.eps, args.gate_activation, resident=resident)
