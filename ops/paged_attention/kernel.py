"""Paged attention in Triton: a verify route for W <= 16 rows per request, a prefill route for prompt chunks.

Verify: the W * G query rows of a kv head (G query heads share it) fill tiles of BM rows. Most depths need one
tile, which reads keys and values once for all rows. Keys are cut into splits at absolute positions. A fixed
number of programs shares the (request, split, kv head) items that follow from the positions on the device,
and a second kernel sums the partials of a row in split order. A row meets the same key tiles in the same
order at every W and batch size; a tile that it does not see multiplies its sums by 1 and adds 0. The bits of
a row therefore depend on that row alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.paged_attention.attend_kernel import attend_range
from compiled_mtp.ops.paged_attention.reference import MAX_VERIFY_WINDOW
from compiled_mtp.ops.paged_attention.splits import (
    PREFIX_PROGRAMS,
    PREFIXED_ITEMS,
    count_partials,
    count_splits,
)
from compiled_mtp.ops.paged_attention.verify_kernel import (
    PREFIX_LOADS,
    SPLIT_LOADS,
    combine_kernel,
    verify_kernel,
)
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS
from compiled_mtp.ops.prompt_chunks_triton import piece_of_tile

WIDE_PROGRAMS = 64
# Shared memory that prefill tiles of 128 rows and 256 dims need at most (Triton 3.6); 64 rows need 104 KiB.
WIDE_SHARED_BYTES = 144 * 1024
# A row may pass through the masked loop in one window and the unmasked loop in another: the compiler must not
# fuse multiply and add in only one of them.
FUSION = {"enable_fp_fusion": False}
# Dims of a warp that combines partials, and programs per processor that combine those after prefixes.
COMBINE_DIMS, COMBINE_PROGRAMS = 64, 8
# Sizes that differ from call to call: one binary serves them all.
PREFILL_UNSPECIALIZED = ("num_pieces", "max_blocks", "first_key", "table_stride")


@triton.jit
def gate_and_store(value, gate, out, row, is_row, gate_row_stride, out_row_stride, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)
    g = tl.load(gate + (row[:, None] * gate_row_stride + dim[None, :]), mask=is_row[:, None], other=0.0)
    value = value * (1.0 / (1.0 + tl.exp(-g.to(tl.float32))))
    at = out + (row[:, None] * out_row_stride + dim[None, :])
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=PREFILL_UNSPECIALIZED)
def prefill_kernel(
    q,
    gate,
    kv,
    kv_scale,
    block_table,
    positions,
    first_row,
    length,
    out,
    q_row_stride,
    q_head_stride,
    gate_row_stride,
    gate_head_stride,
    block_stride,
    half_stride,
    head_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    table_stride,
    num_pieces,
    max_blocks,
    block_size,
    first_key,
    scale_log2,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    IN_ONE_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    MOST: tl.constexpr,
):
    head = tl.program_id(0)
    # The last rows of a prompt chunk see the most keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    piece = piece_of_tile(tile, first_row, num_pieces, BM, MOST)
    first_of_piece = tl.load(first_row + piece).to(tl.int32)
    # Rows of the prompt chunk before this tile.
    done = (tile - first_of_piece // BM - piece) * BM
    num_left = tl.load(length + piece).to(tl.int32) - done
    if num_left <= 0:
        return
    request = piece.to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    row = tl.arange(0, BM)
    is_row = row < num_left
    first = (first_of_piece + done).to(tl.int64)
    row_position = tl.load(positions + first + row, mask=is_row, other=-1).to(tl.int32)
    dim = tl.arange(0, HD)
    queries = tl.load(
        q + first * q_row_stride + head * q_head_stride + (row[:, None] * q_row_stride + dim[None, :]),
        mask=is_row[:, None],
        other=0.0,
    )
    acc, _, total = attend_range(
        queries,
        kv + kv_head * head_stride,
        kv_scale + kv_head * scale_head_stride,
        block_table + request * table_stride,
        first_key // BN * BN,
        tl.minimum(tl.max(row_position, 0) + 1, max_blocks * block_size),
        tl.min(tl.where(is_row, row_position, 2147483646), 0) + 1,
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
        BM,
        HD,
        BN,
        IN_ONE_BLOCK,
        HAS_SCALE,
        1,
        False,
    )
    value = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out += (first * (HKV * GROUP) + head) * HD
    gate += first * gate_row_stride + head * gate_head_stride
    # Gate and store half of the dims at a time: the gate of all dims would not fit next to the sums.
    left, right = tl.split(tl.permute(tl.reshape(value, (BM, 2, HD // 2)), (0, 2, 1)))
    gate_and_store(left, gate, out, row, is_row, gate_row_stride, HKV * GROUP * HD, HD // 2)
    gate_and_store(
        right, gate + HD // 2, out + HD // 2, row, is_row, gate_row_stride, HKV * GROUP * HD, HD // 2
    )


class Configuration(NamedTuple):
    """Tile sizes and pipeline of one route.

    BN, which orders the sums of a row, never depends on the number of rows or on mtp_step.
    """

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    tail_stages: int = 1


def verify_configuration(
    dtype: torch.dtype, has_scale: bool, hd: int, group_rows: int, pairs: int, processors: int
) -> Configuration:
    """Return the verify configuration.

    group_rows, the rows of a kv head, and pairs, the (request, kv head) pairs, decide BM and change no bit.
    """
    if dtype == torch.float32:
        return Configuration(16, 16, 4, 1, 4)
    tail_stages = 1 if has_scale else 2
    if hd == 256:
        # A tile of 16 rows takes two thirds of the time of one of 32, so two of them are faster where all
        # programs run at once. With an FP8 cache both would widen the same keys.
        tiles = triton.cdiv(group_rows, 16) * pairs
        is_narrow = pairs >= PREFIXED_ITEMS and processors < tiles <= 2 * processors and not has_scale
        # A tile of 64 rows would leave no room for a copy that is on its way while another is computed.
        return Configuration(16 if group_rows <= 16 or is_narrow else 32, 32, 4, 3, 2, tail_stages)
    return Configuration(64, 64, 4, 2, 4, tail_stages)


def prefill_configuration(dtype: torch.dtype, is_wide: bool, hd: int, shared_bytes: int) -> Configuration:
    """Return the prefill configuration; is_wide: tiles of 128 rows give enough programs to fill a GPU.

    is_wide does not change the key tiles: a row's bits do not depend on the number of rows.
    """
    if dtype == torch.float32:
        return Configuration(16, 16, 4, 1)
    if hd == 256 and shared_bytes < WIDE_SHARED_BYTES:
        return Configuration(64, 32, 8, 2)
    return Configuration(128, 64, 8, 2) if is_wide else Configuration(64, 64, 4, 2)


@lru_cache
def num_processors(device: int, has_scale: bool) -> int:
    properties = torch.cuda.get_device_properties(device)
    if has_scale and (properties.major, properties.minor) < (8, 9):
        raise ValueError(
            f"kv must not be float8_e4m3fn on compute capability {properties.major}.{properties.minor}, "
            "which has no such type; keep the cache in bfloat16"
        )
    return properties.multi_processor_count


def launch(args: Any) -> torch.Tensor:
    q, gate, kv, kv_scale = args.q, args.gate, args.kv, args.kv_scale
    block_table, positions, first_key = args.block_table, args.positions, args.first_key
    rows, hq, hd = q.shape
    num_requests, max_blocks = block_table.shape
    first_row, length = args.first_row, args.length
    # Rows outside all prompt chunks must be 0.
    make = torch.empty if first_row is None else torch.zeros
    out = make((rows, hq * hd), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    # The interpreter runs programs one after another: three processors are enough to share items.
    processors = num_processors(q.device.index, kv_scale is not None) if q.is_cuda else 3
    device = device_of(q.device.index)
    query_len, is_verify = rows // num_requests, first_row is None
    assert not is_verify or query_len <= MAX_VERIFY_WINDOW, f"a window of {query_len} rows"
    hkv, block_size = kv.shape[2], kv.shape[3]
    scales, scale_strides = (kv, (0, 0, 0)) if kv_scale is None else (kv_scale, kv_scale.stride()[:3])
    if is_verify:
        pairs = num_requests * hkv
        config = verify_configuration(
            q.dtype, kv_scale is not None, hd, query_len * hq // hkv, pairs, processors
        )
    else:
        is_wide = hq * triton.cdiv(rows, 128) >= WIDE_PROGRAMS
        config = prefill_configuration(q.dtype, is_wide, hd, device.shared_bytes)
    strides = (*kv.stride()[:4], *scale_strides, block_table.stride(0))
    scale_log2 = args.softmax_scale * math.log2(math.e)
    tiles = {
        "HKV": hkv, "GROUP": hq // hkv, "HD": hd, "BM": config.BM, "BN": config.BN,
        "HAS_SCALE": kv_scale is not None, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    if not is_verify:
        prefill_kernel[(hq, rows // config.BM + num_requests)](
            q, gate, kv, scales, block_table, positions, first_row, length, out, *q.stride()[:2],
            *gate.stride()[:2], *strides, num_requests, max_blocks, block_size, first_key, scale_log2,
            IN_ONE_BLOCK=block_size % config.BN == 0, MOST=max(MAX_PROMPT_CHUNKS,
            triton.next_power_of_2(num_requests)), **tiles, **FUSION,
        )  # fmt: skip
        return out
    has_pdl = device.has_dependent_launch
    num_splits = count_splits(max_blocks * block_size)
    row_tiles = triton.cdiv(query_len * (hq // hkv), config.BM)
    programs = processors * config.programs_per_sm
    has_prefix = pairs >= PREFIXED_ITEMS
    most = PREFIX_PROGRAMS if has_prefix else num_requests * num_splits * row_tiles * hkv
    programs = min(programs, most)
    # [partial, kv head, row of the kv head]: with prefixes the partials of each request's prefix, then the
    # others one request after another; else num_splits partials a request.
    partials = count_partials(num_requests, max_blocks * block_size, hkv) * query_len * hq
    places = block_table.new_empty((num_requests + 1,))
    max_requests = max(32, triton.next_power_of_2(num_requests))
    part_sum = torch.empty((partials, hd), dtype=torch.float32, device=q.device)
    part_largest, part_total = torch.empty((2, partials), dtype=torch.float32, device=q.device).unbind()
    verify_kernel[(programs,)](
        q, gate, kv, scales, block_table, positions, out, part_sum, part_largest, part_total, places,
        zero_counters(q.device), *q.stride()[:2], *gate.stride()[:2],
        *strides, num_requests, query_len, max_blocks, num_splits, first_key, scale_log2,
        MAX_REQUESTS=max_requests, MAX_WINDOW=MAX_VERIFY_WINDOW,
        HAS_PREFIX=has_prefix, BLOCK_SIZE=block_size, TAIL_STAGES=config.tail_stages,
        PDL=has_pdl, launch_pdl=has_pdl, **tiles, **FUSION,
    )  # fmt: skip
    # With prefixes one row's partials may be all that is left: several warps take them.
    width = hd if has_prefix else min(hd, COMBINE_DIMS)
    items = rows * hq
    combine_kernel[(min(items, COMBINE_PROGRAMS * processors) if has_prefix else items, hd // width)](
        part_sum, part_largest, part_total, places, gate, positions, out, *gate.stride()[:2], num_requests,
        query_len, num_splits, max_blocks * block_size, first_key, HKV=hkv, GROUP=hq // hkv, HD=hd, BD=width,
        MAX_REQUESTS=max_requests, HAS_PREFIX=has_prefix, LOADS=PREFIX_LOADS if has_prefix else SPLIT_LOADS,
        PDL=has_pdl, launch_pdl=has_pdl, num_warps=max(1, width // COMBINE_DIMS), **FUSION,
    )  # fmt: skip
    return out
