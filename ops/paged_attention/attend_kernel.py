"""The inner loop of attention over a tile and a range of tiles, shared by the verify and prefill routes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    acc,
    largest,
    total,
    queries,
    cache,
    scales,
    table,
    start,
    row_position,
    end,
    first_key,
    max_blocks,
    block_size,
    block_stride,
    half_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_log2,
    HD: tl.constexpr,
    BN: tl.constexpr,
    IN_ONE_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_TAIL: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
):
    """One step of the online softmax over keys start .. start + BN - 1.

    IS_TAIL: rows see different keys of the tile, and it may hold keys that were never written. LOAD_FIRST:
    load everything before the first product, which waits for the keys. In a loop without a pipeline this
    hides latency, at the cost of registers.
    """
    key = start + tl.arange(0, BN)
    dim = tl.arange(0, HD)
    if IN_ONE_BLOCK:
        block = tl.load(table + start // block_size)
        offset = start % block_size + tl.arange(0, BN)
    else:
        block = tl.load(table + tl.minimum(key // block_size, max_blocks - 1))
        offset = key % block_size
    is_key = (key >= first_key) & (tl.zeros_like(key) + block >= 0)
    if IS_TAIL:
        is_key = is_key & (key < end)
    # A scalar base and 32-bit offsets take half the registers of 64-bit addresses.
    keys = cache + block.to(tl.int64) * block_stride
    scales += block.to(tl.int64) * scale_block_stride
    if IN_ONE_BLOCK:
        at = keys + (offset[:, None] * token_stride + dim[None, :])
    else:
        at = keys[:, None] + (offset[:, None] * token_stride + dim[None, :])
    k = tl.load(at, mask=is_key[:, None], other=0.0)
    if LOAD_FIRST:
        if HAS_SCALE:
            k_scale = tl.load(scales + offset, mask=is_key, other=0.0)
            v_scale = tl.load(scales + scale_half_stride + offset, mask=is_key, other=1.0)
        v = tl.load(at + half_stride, mask=is_key[:, None], other=0.0)
    scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee") * scale_log2
    if HAS_SCALE:
        if not LOAD_FIRST:
            k_scale = tl.load(scales + offset, mask=is_key, other=0.0)
            v_scale = tl.load(scales + scale_half_stride + offset, mask=is_key, other=1.0)
        scores = scores * k_scale[None, :]
        if IS_TAIL:
            v_scale = tl.where(v_scale < float("inf"), v_scale, 1.0)
        # Add a value's scale to the exponent of its weight: the weights of stored values then lie in 0 .. 1
        # for all scales. `total` divides the scale out again. A zero vector may take any scale, 1e-20 too.
        v_scale = tl.maximum(v_scale, 1e-20)
        scores = scores + tl.log2(v_scale)[None, :]
    is_seen = is_key[None, :]
    if IS_TAIL:
        is_seen = is_seen & (key[None, :] <= row_position[:, None])
    scores = tl.where(is_seen, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(largest - base)
    if HAS_SCALE:
        total = total * factor + tl.sum(weights * (1.0 / v_scale)[None, :], 1)
    else:
        total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None]
    if not LOAD_FIRST:
        v = tl.load(at + half_stride, mask=is_key[:, None], other=0.0)
    v = v.to(queries.dtype)
    if IS_TAIL:
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
    acc = tl.dot(weights.to(queries.dtype), v, acc, input_precision="ieee")
    return acc, new_largest, total


@triton.jit
def attend_range(
    queries,
    cache,
    scales,
    table,
    begin,
    end,
    seen_by_all,
    row_position,
    first_key,
    max_blocks,
    block_size,
    block_stride,
    half_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_log2,
    BM: tl.constexpr,
    HD: tl.constexpr,
    BN: tl.constexpr,
    IN_ONE_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
):
    """Return sums, maxima and totals of the online softmax of BM rows over keys begin .. end - 1.

    seen_by_all: every row sees the keys below it.
    """
    if HAS_SCALE and queries.dtype == tl.bfloat16:
        # float16 holds every e4m3 value. It converts two of them in one instruction, bfloat16 in four.
        queries = queries.to(tl.float16)
    acc = tl.zeros((BM, HD), tl.float32)
    largest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    # Count loops from 0 and make `begin` a visible multiple of BN: otherwise the compiler does not see that
    # offsets are aligned, and neither widens nor pipelines the loads.
    begin = begin // BN * BN
    # Tiles that every row sees whole need no mask per row.
    num_whole = tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // BN
    for i in tl.range(0, num_whole, disable_licm=True):
        acc, largest, total = attend_tile(
            acc, largest, total, queries, cache, scales, table, begin + i * BN, row_position, end, first_key,
            max_blocks, block_size, block_stride, half_stride, token_stride, scale_block_stride,
            scale_half_stride, scale_log2, HD, BN, IN_ONE_BLOCK, HAS_SCALE, False, False,
        )  # fmt: skip
    begin += num_whole * BN
    for i in tl.range(0, tl.cdiv(tl.maximum(end - begin, 0), BN), num_stages=TAIL_STAGES, disable_licm=True):
        acc, largest, total = attend_tile(
            acc, largest, total, queries, cache, scales, table, begin + i * BN, row_position, end, first_key,
            max_blocks, block_size, block_stride, half_stride, token_stride, scale_block_stride,
            scale_half_stride, scale_log2, HD, BN, IN_ONE_BLOCK, HAS_SCALE, True, LOAD_FIRST,
        )  # fmt: skip
    return acc, largest, total
