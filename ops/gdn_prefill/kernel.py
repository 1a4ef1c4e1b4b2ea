"""The gated delta rule over prompt chunks, in two launches over chunks of 64 rows.

Let G be the log decay summed from a 64-row chunk's start, D_ij = e^{G_i - G_j} for j <= i, and S the state
before that chunk:
    x = (I + strict_lower(beta K K^T * D))^-1 beta (V - e^G K S)
    O = e^G Q S + (Q K^T * D) x,    S <- e^{G_end} S + (e^{G_end - G} K)^T x
The inverse does not depend on S: the first launch computes it for all chunks in parallel, the second walks
each prompt chunk in order. Buffers between the launches are indexed by 64-row chunk; prompt chunk p begins at
index first_row[p] // CHUNK + p (ops/prompt_chunks_triton.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.gdn_prefill.cpu import CHUNK
from compiled_mtp.ops.gdn_triton import OPTIONS, check_head_dims, launch_gated_norm
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS
from compiled_mtp.ops.prompt_chunks_triton import piece_of_tile

# With one stage the chunk kernel, as Triton 3.6 compiles it for sm_90, gave wrong results on an H200.
CHUNK_STAGES = 2
# Key columns that the solve kernel loads at a time.
SOLVE_BLOCK_K = 32
NUM_WARPS = 4


@triton.jit
def split(x):
    """Return x as high + low in bfloat16: low is the rounding error of high."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(a, a_low, b, PRECISE: tl.constexpr):
    """Return a @ b for a split into (a, a_low) and b f32, to about 2^-16 if PRECISE, else to bfloat16."""
    b_high, b_low = split(b)
    result = tl.dot(a, b_high)
    if PRECISE:
        result = tl.dot(a, b_low, result)
        result = tl.dot(a_low, b_high, result)
    return result


@triton.jit
def store_split(high, low, at, x, mask, PRECISE: tl.constexpr):
    x_high, x_low = split(x)
    tl.store(high + at, x_high, mask=mask)
    if PRECISE:
        tl.store(low + at, x_low, mask=mask)


@triton.jit(do_not_specialize=["num_pieces"])
def gdn_prefill_solve_kernel(
    q,
    k,
    g,
    beta,
    length,
    first_row,
    num_pieces,
    q_high,
    q_low,
    k_high,
    k_low,
    log_decay,
    inverse_high,
    inverse_low,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISE: tl.constexpr,
    MOST: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    piece = piece_of_tile(chunk, first_row, num_pieces, CHUNK, MOST)
    used = tl.load(length + piece).to(tl.int32)
    first = tl.load(first_row + piece).to(tl.int32)
    # Rows of the prompt chunk before this chunk of 64.
    done = (chunk - first // CHUNK - piece) * CHUNK
    if done < used:
        step = tl.arange(0, CHUNK)
        row = first + done + step
        inside = done + step < used
        decay = tl.cumsum(tl.load(g + row * NV + head, mask=inside, other=0.0), 0)
        rate = tl.load(beta + row * NV + head, mask=inside, other=0.0)
        chunk_at = (chunk * NV + head) * CHUNK
        tl.store(log_decay + chunk_at + step, decay)

        key_row = (row.to(tl.int64) * NK + head // (NV // NK))[:, None] * DK
        system = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, DK, BLOCK_K):
            at = key_row + first + tl.arange(0, BLOCK_K)[None, :]
            keys = tl.load(k + at, mask=inside[:, None], other=0.0)
            high, low = split(keys)
            system += product(high, low, tl.trans(keys), True)
            if head % (NV // NK) == 0:
                # Once per key head: from bfloat16 in memory the second launch feeds the tensor cores without
                # passing through registers.
                store_split(k_high, k_low, at, keys, inside[:, None], PRECISE)
                queries = tl.load(q + at, mask=inside[:, None], other=0.0)
                store_split(q_high, q_low, at, queries, inside[:, None], PRECISE)
        # Above the diagonal the difference is positive and may overflow: mask it before exp.
        difference = tl.where(step[:, None] > step[None, :], decay[:, None] - decay[None, :], float("-inf"))
        system = system * tl.exp(difference) * rate[:, None]

        # (I + L)^-1 by blocks of 1, 2, 4, ... rows: the inverses T11, T22 of two neighbouring blocks give
        # that of the block which joins them, whose lower left part is -T22 L21 T11. All pairs run at once.
        # As stable as substitution, unlike powers of L.
        identity = tl.where(step[:, None] == step[None, :], 1.0, 0.0)
        solved = identity - tl.where((step[:, None] // 2) == (step[None, :] // 2), system, 0.0)
        size = 2
        while size < CHUNK:
            is_pair = (step[:, None] // (2 * size)) == (step[None, :] // (2 * size))
            is_half = (step[:, None] // size) == (step[None, :] // size)
            between = tl.where(is_pair & ~is_half, system, 0.0)
            high, low = split(solved)
            left_high, left_low = split(product(high, low, between, True))
            solved -= product(left_high, left_low, solved, True)
            size *= 2
        at = (chunk_at + step)[:, None] * CHUNK + step[None, :]
        store_split(inverse_high, inverse_low, at, solved * rate[None, :], None, PRECISE)


@triton.jit(do_not_specialize=["last_slot"])
def gdn_prefill_chunk_kernel(
    q,
    q_low,
    k,
    k_low,
    v,
    log_decay,
    inverse,
    inverse_low,
    out,
    state,
    state_index,
    start,
    length,
    first_row,
    mark,
    last_slot,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISE: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    piece = tl.program_id(2)
    used = tl.load(length + piece).to(tl.int32)
    if used == 0:
        return
    first = tl.load(first_row + piece).to(tl.int32)
    first_chunk = first // CHUNK + piece
    step = tl.arange(0, CHUNK)
    key_lane = tl.arange(0, DK)
    value_lane = block * BLOCK_V + tl.arange(0, BLOCK_V)
    tile_at = head * DV * DK + value_lane[None, :] * DK + key_lane[:, None]
    state_at = state + tl.load(state_index + piece).to(tl.int64) * (NV * DV * DK) + tile_at
    if mark is not None:
        marked = tl.load(mark + piece).to(tl.int32)
        marked_at = state + last_slot.to(tl.int64) * (NV * DV * DK) + tile_at
    is_continued = tl.full((DK, BLOCK_V), tl.load(start + piece), tl.int64) > 0
    current = tl.load(state_at, mask=is_continued, other=0.0)  # [DK, BLOCK_V]
    causal = step[:, None] >= step[None, :]
    for chunk in range(tl.cdiv(used, CHUNK)):
        row = first + chunk * CHUNK + step
        inside = (chunk * CHUNK + step < used)[:, None]
        key_at = (row.to(tl.int64) * NK + head // (NV // NK))[:, None] * DK + key_lane[None, :]
        value_at = (row.to(tl.int64) * NV + head)[:, None] * DV + value_lane[None, :]
        chunk_at = ((first_chunk + chunk) * NV + head) * CHUNK
        solve_at = (chunk_at + step)[:, None] * CHUNK + step[None, :]
        keys = tl.load(k + key_at, mask=inside, other=0.0)
        queries = tl.load(q + key_at, mask=inside, other=0.0)
        solve = tl.load(inverse + solve_at)
        if PRECISE:
            keys_low = tl.load(k_low + key_at, mask=inside, other=0.0)
            queries_low = tl.load(q_low + key_at, mask=inside, other=0.0)
            solve_low = tl.load(inverse_low + solve_at)
        else:
            keys_low = keys
            queries_low = queries
            solve_low = solve
        decay = tl.load(log_decay + chunk_at + step)
        total = tl.load(log_decay + chunk_at + CHUNK - 1)
        values = tl.load(v + value_at, mask=inside, other=0.0)

        from_start = tl.exp(decay)[:, None]
        rest = values - from_start * product(keys, keys_low, current, PRECISE)
        x = product(solve, solve_low, rest, PRECISE)
        scores = tl.dot(queries, tl.trans(keys))
        if PRECISE:
            scores = tl.dot(queries, tl.trans(keys_low), scores)
            scores = tl.dot(queries_low, tl.trans(keys), scores)
        difference = tl.where(causal, decay[:, None] - decay[None, :], float("-inf"))
        high, low = split(scores * tl.exp(difference))
        o = from_start * product(queries, queries_low, current, PRECISE) + product(high, low, x, PRECISE)
        tl.store(out + value_at, o, mask=inside)
        to_end = x * tl.exp(total - decay)[:, None]
        current = current * tl.exp(total)
        current += product(tl.trans(keys), tl.trans(keys_low), to_end, PRECISE)
        if mark is not None:
            # A mask: a branch would keep the compiler from loading the next chunk early.
            is_marked = tl.full((DK, BLOCK_V), (chunk + 1) * CHUNK, tl.int32) == marked
            tl.store(marked_at, current, mask=is_marked)
    tl.store(state_at, current)


def chunk_block_v(num_v_heads: int, head_v_dim: int, precise: bool) -> int:
    """Return the value columns per program: 32, or 16 if 32 leaves processors idle or spills (float32)."""
    return min(head_v_dim, 16 if precise or num_v_heads * head_v_dim // 32 < 96 else 32)


def launch(args: Any) -> torch.Tensor:
    k, v, length, first_row = args.k, args.v, args.length, args.first_row
    num_pieces = length.shape[0]
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    check_head_dims(head_k_dim, head_v_dim)
    chunks = rows // CHUNK + num_pieces
    precise = args.z.dtype == torch.float32
    parts = 2 if precise else 1
    device = v.device
    split_q = torch.empty((parts, *args.q.shape), dtype=torch.bfloat16, device=device)
    split_k = torch.empty((parts, *k.shape), dtype=torch.bfloat16, device=device)
    inverse = torch.empty((parts, chunks, num_v_heads, CHUNK, CHUNK), dtype=torch.bfloat16, device=device)
    log_decay = torch.empty((chunks, num_v_heads, CHUNK), dtype=torch.float32, device=device)
    out = torch.empty((rows, num_v_heads, head_v_dim), dtype=torch.float32, device=device)
    gdn_prefill_solve_kernel[(num_v_heads, chunks)](
        args.q, k, args.g, args.beta, length, first_row, num_pieces,
        split_q[0], split_q[-1], split_k[0], split_k[-1], log_decay, inverse[0], inverse[-1],
        NK=num_k_heads, NV=num_v_heads, DK=head_k_dim, CHUNK=CHUNK, BLOCK_K=min(SOLVE_BLOCK_K, head_k_dim),
        PRECISE=precise, MOST=MAX_PROMPT_CHUNKS, num_warps=NUM_WARPS, **OPTIONS,
    )  # fmt: skip
    block_v = chunk_block_v(num_v_heads, head_v_dim, precise)
    gdn_prefill_chunk_kernel[(head_v_dim // block_v, num_v_heads, num_pieces)](
        split_q[0], split_q[-1], split_k[0], split_k[-1], v, log_decay, inverse[0], inverse[-1],
        out, args.state, args.state_index, args.start, length, first_row, args.mark, args.state.shape[0] - 1,
        NK=num_k_heads, NV=num_v_heads, DK=head_k_dim, DV=head_v_dim, CHUNK=CHUNK,
        BLOCK_V=block_v, PRECISE=precise, num_warps=NUM_WARPS, num_stages=CHUNK_STAGES, **OPTIONS,
    )  # fmt: skip
    return launch_gated_norm(out, args.z, args.norm_weight, args.eps, args.gate_activation, length, first_row)
