"""Paged attention in Triton: a verify route for W <= 8 rows a request, a prefill route above.

Verify: the W * G query rows of a kv head (G query heads share it) lie in one tile of BM rows, whatever W is,
so keys and values are read once for all of them. Keys are cut into splits at absolute positions; a fixed
number of programs shares out the (request, split, kv head) items that the positions on the device give, and a
second kernel sums the parts of a row in split order. A row meets the same tiles in the same order at every W
and batch; a tile it does not see multiplies its sums by 1 and adds 0. So its bits are its own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.paged_attention.attend_kernel import attend_range
from compiled_mtp.ops.variants import KernelVariant

MAX_VERIFY_WINDOW = 8
WIDE_PROGRAMS = 64
# A row may go through the masked loop in one window and through the unmasked one in another: no products and
# sums may be contracted in one of them only.
FUSION = {"enable_fp_fusion": False}
COMBINE_SPLITS = 64
# Sizes that differ from call to call: one binary serves them all, W = 1 included.
PREFILL_UNSPECIALIZED = ("window", "max_blocks", "first_key", "table_stride")
UNSPECIALIZED = (*PREFILL_UNSPECIALIZED, "num_requests", "num_splits", "num_keys")


@triton.jit
def split_of(key):
    """The split that holds a key: 128 keys each below 2048, then 256, from 32768 1024."""
    far = tl.where(key < 32768, 16 + (key - 2048) // 256, 136 + (key - 32768) // 1024)
    return tl.where(key < 2048, key // 128, far)


@triton.jit
def split_begin(split):
    """The first key of a split."""
    far = tl.where(split < 136, 2048 + (split - 16) * 256, 32768 + (split - 136) * 1024)
    return tl.where(split < 16, split * 128, far)


def count_splits(num_keys: int) -> int:
    """Splits that `num_keys` keys from position 0 reach into."""
    steps = ((0, 2048, 128), (2048, 32768, 256), (32768, max(num_keys, 32768), 1024))
    return sum(-(-(min(num_keys, end) - begin) // size) for begin, end, size in steps if num_keys > begin)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def verify_kernel(
    q,
    kv,
    kv_scale,
    block_table,
    positions,
    part_sum,
    part_largest,
    part_total,
    q_row_stride,
    q_head_stride,
    block_stride,
    half_stride,
    head_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    table_stride,
    num_requests,
    window,
    max_blocks,
    block_size,
    num_splits,
    first_key,
    scale_log2,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    IN_ONE_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    requests = tl.arange(0, MAX_REQUESTS)
    step = tl.arange(0, MAX_WINDOW)
    is_step = (requests < num_requests)[:, None] & (step < window)[None, :]
    places = (requests * window)[:, None] + step[None, :]
    last = tl.max(tl.load(positions + places, mask=is_step, other=-1).to(tl.int32), 1)
    last = tl.minimum(last, max_blocks * block_size - 1)
    first_split = split_of(first_key)
    counts = tl.where(last >= first_key, split_of(last) + 1 - first_split, 0)
    ends = tl.cumsum(counts, 0)
    num_units = tl.sum(counts, 0)
    row_tiles = tl.cdiv(window * GROUP, BM)
    num_items = num_units * row_tiles * HKV
    # Late splits are the long ones: hand them out first, and turn the order round every time.
    turns = num_items // num_programs
    last_place = tl.where(turns % 2 == 0, program, num_programs - 1 - program)
    turns += (last_place < num_items % num_programs).to(tl.int32)
    for turn in tl.range(0, turns, num_stages=1, disable_licm=True):
        item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
        unit = num_units - 1 - item // (row_tiles * HKV)
        kv_head = item // row_tiles % HKV
        request = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.sum(tl.where(requests < request, counts, 0), 0) + first_split
        row = item % row_tiles * BM + tl.arange(0, BM)
        token = row // GROUP
        is_row = token < window
        token = request.to(tl.int64) * window + token
        row_position = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32)
        head = kv_head * GROUP + row % GROUP
        dim = tl.arange(0, HD)
        at = token * q_row_stride + head * q_head_stride
        queries = tl.load(q + at[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
        end = tl.minimum(tl.max(row_position, 0) + 1, max_blocks * block_size)
        acc, largest, total = attend_range(
            queries,
            kv + kv_head.to(tl.int64) * head_stride,
            kv_scale + kv_head.to(tl.int64) * scale_head_stride,
            block_table + request.to(tl.int64) * table_stride,
            split_begin(split),
            tl.minimum(end, split_begin(split + 1)),
            is_row,
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
            TAIL_STAGES,
        )
        # Rows of an item lie one after another: one address and constant offsets.
        part = (
            ((request.to(tl.int64) * num_splits + split) * HKV + kv_head) * window * GROUP
        ) + item % row_tiles * BM
        row = tl.arange(0, BM)
        is_row = row < window * GROUP - item % row_tiles * BM
        tl.store(part_sum + part * HD + row[:, None] * HD + dim[None, :], acc, mask=is_row[:, None])
        tl.store(part_largest + part + row, largest, mask=is_row)
        tl.store(part_total + part + row, total, mask=is_row)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    part_sum,
    part_largest,
    part_total,
    gate,
    positions,
    out,
    gate_row_stride,
    gate_head_stride,
    window,
    num_splits,
    num_keys,
    first_key,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One head of one row: BD of its dims, summed over its splits in order, times the gate."""
    item = tl.program_id(0).to(tl.int64)
    row = item // (HKV * GROUP)
    head = item % (HKV * GROUP)
    dim = tl.program_id(1) * BD + tl.arange(0, BD)
    last = tl.minimum(tl.load(positions + row), num_keys - 1).to(tl.int32)
    begin = split_of(first_key)
    end = tl.where(last >= first_key, split_of(last) + 1, begin)
    # The part of split 0; the next one lies `step` further.
    step = HKV * window * GROUP
    part = row // window * num_splits * step
    part += head // GROUP * window * GROUP + row % window * GROUP + head % GROUP
    lane = tl.arange(0, SPLITS)
    largest = -float("inf")
    acc = tl.zeros((BD,), tl.float32)
    denominator = 0.0
    for start in range(begin // SPLITS * SPLITS, end, SPLITS):
        split = start + lane
        is_split = (split >= begin) & (split < end)
        at = part + split * step
        split_largest = tl.load(part_largest + at, mask=is_split, other=-float("inf"))
        split_total = tl.load(part_total + at, mask=is_split, other=0.0)
        sums = tl.load(part_sum + at[:, None] * HD + dim[None, :], mask=is_split[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(split_largest, 0))
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weight = tl.exp2(split_largest - base)
        factor = tl.exp2(largest - base)
        acc = acc * factor + tl.sum(sums * weight[:, None], 0)
        denominator = denominator * factor + tl.sum(split_total * weight, 0)
        largest = new_largest
    value = acc / tl.where(denominator == 0.0, 1.0, denominator)
    g = tl.load(gate + row * gate_row_stride + head * gate_head_stride + dim).to(tl.float32)
    value = value * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + item * HD + dim, value.to(out.dtype.element_ty))


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
    window,
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
):
    head = tl.program_id(0)
    # The last rows see the most keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    row = tl.arange(0, BM)
    is_row = row < window - tile * BM
    first_row = request * window + tile * BM
    row_position = tl.load(positions + first_row + row, mask=is_row, other=-1).to(tl.int32)
    dim = tl.arange(0, HD)
    queries = tl.load(
        q + first_row * q_row_stride + head * q_head_stride + (row[:, None] * q_row_stride + dim[None, :]),
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
        is_row,
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
    )
    value = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out += (first_row * (HKV * GROUP) + head) * HD
    gate += first_row * gate_row_stride + head * gate_head_stride
    # In halves: the gate of a whole tile would not fit beside its sums.
    left, right = tl.split(tl.permute(tl.reshape(value, (BM, 2, HD // 2)), (0, 2, 1)))
    gate_and_store(left, gate, out, row, is_row, gate_row_stride, HKV * GROUP * HD, HD // 2)
    gate_and_store(
        right, gate + HD // 2, out + HD // 2, row, is_row, gate_row_stride, HKV * GROUP * HD, HD // 2
    )


class Configuration(NamedTuple):
    """Tile heights and pipeline of one route; never a function of the number of rows or of mtp_step."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    tail_stages: int = 1


def verify_configuration(dtype: torch.dtype, has_scale: bool, hd: int) -> Configuration:
    if dtype == torch.float32:
        return Configuration(16, 16, 4, 1, 4)
    tail_stages = 1 if has_scale else 2
    if hd == 256:
        return Configuration(64, 32, 4, 2, 2, tail_stages)
    return Configuration(64, 64, 4, 2, 4, tail_stages)


def prefill_configuration(dtype: torch.dtype, is_wide: bool) -> Configuration:
    """is_wide: tiles of 128 rows are enough programs to keep a GPU busy."""
    if dtype == torch.float32:
        return Configuration(16, 16, 4, 1)
    return Configuration(128, 64, 8, 2) if is_wide else Configuration(64, 32, 4, 2)


@lru_cache
def num_processors(device: int, has_scale: bool) -> int:
    properties = torch.cuda.get_device_properties(device)
    if has_scale and (properties.major, properties.minor) < (8, 9):
        raise ValueError(
            f"kv must not be float8_e4m3fn on compute capability {properties.major}.{properties.minor}, "
            "which has no such type; keep the cache in bfloat16"
        )
    return properties.multi_processor_count


def launch(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    rows, hq, hd = q.shape
    num_requests, max_blocks = block_table.shape
    out = torch.empty((rows, hq * hd), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    # The interpreter runs programs one after another: a few show all there is to show.
    processors = num_processors(q.device.index, kv_scale is not None) if q.is_cuda else 3
    window = rows // num_requests
    hkv, block_size = kv.shape[2], kv.shape[3]
    scales, scale_strides = (kv, (0, 0, 0)) if kv_scale is None else (kv_scale, kv_scale.stride()[:3])
    is_verify = window <= MAX_VERIFY_WINDOW
    if is_verify:
        config = verify_configuration(q.dtype, kv_scale is not None, hd)
    else:
        config = prefill_configuration(q.dtype, hq * triton.cdiv(window, 128) >= WIDE_PROGRAMS)
    strides = (*kv.stride()[:4], *scale_strides, block_table.stride(0))
    scale_log2 = softmax_scale * math.log2(math.e)
    tiles = {
        "HKV": hkv,
        "GROUP": hq // hkv,
        "HD": hd,
        "BM": config.BM,
        "BN": config.BN,
        "IN_ONE_BLOCK": block_size % config.BN == 0,
        "HAS_SCALE": kv_scale is not None,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if not is_verify:
        prefill_kernel[(hq, triton.cdiv(window, config.BM), num_requests)](
            q,
            gate,
            kv,
            scales,
            block_table,
            positions,
            out,
            *q.stride()[:2],
            *gate.stride()[:2],
            *strides,
            window,
            max_blocks,
            block_size,
            first_key,
            scale_log2,
            **tiles,
            **FUSION,
        )
        return out
    num_splits = count_splits(max_blocks * block_size)
    row_tiles = triton.cdiv(window * (hq // hkv), config.BM)
    programs = min(processors * config.programs_per_sm, num_requests * num_splits * row_tiles * hkv)
    # [request, split, kv head, row of the kv head]
    parts = num_splits * rows * hq
    part_sum = torch.empty((parts, hd), dtype=torch.float32, device=q.device)
    part_largest, part_total = torch.empty((2, parts), dtype=torch.float32, device=q.device).unbind()
    verify_kernel[(programs,)](
        q,
        kv,
        scales,
        block_table,
        positions,
        part_sum,
        part_largest,
        part_total,
        *q.stride()[:2],
        *strides,
        num_requests,
        window,
        max_blocks,
        block_size,
        num_splits,
        first_key,
        scale_log2,
        MAX_REQUESTS=max(32, triton.next_power_of_2(num_requests)),
        MAX_WINDOW=MAX_VERIFY_WINDOW,
        TAIL_STAGES=config.tail_stages,
        **tiles,
        **FUSION,
    )
    width = min(hd, 64)
    combine_kernel[(rows * hq, hd // width)](
        part_sum,
        part_largest,
        part_total,
        gate,
        positions,
        out,
        *gate.stride()[:2],
        window,
        num_splits,
        max_blocks * block_size,
        first_key,
        HKV=hkv,
        GROUP=hq // hkv,
        HD=hd,
        BD=width,
        SPLITS=COMBINE_SPLITS,
        num_warps=4,
        **FUSION,
    )
    return out


def variants() -> list[KernelVariant]:
    result = []
    names = {"bf16": torch.bfloat16, "fp32": torch.float32}
    shapes = ((4, 6, 256), (2, 8, 256), (2, 4, 256), (2, 4, 128), (2, 2, 64))
    for hkv, group, hd in shapes:
        for dtype, cache in (("bf16", "bf16"), ("bf16", "fp8e4nv"), ("fp32", "fp32")):
            has_scale = cache == "fp8e4nv"
            if dtype == "fp32" and (group, hd) not in ((4, 256), (2, 64)):
                continue
            tensors = {
                "q": f"*{dtype}",
                "gate": f"*{dtype}",
                "out": f"*{dtype}",
                "kv": f"*{cache}",
                "kv_scale": "*fp32" if has_scale else f"*{cache}",
                "block_table": "*i32",
                "positions": "*i64",
                "part_sum": "*fp32",
                "part_largest": "*fp32",
                "part_total": "*fp32",
                "scale_log2": "fp32",
            }
            shared = {"HKV": hkv, "GROUP": group, "HD": hd}
            routes = (
                ("verify", verify_kernel, verify_configuration(names[dtype], has_scale, hd)),
                ("combine", combine_kernel, None),
                ("prefill", prefill_kernel, prefill_configuration(names[dtype], True)),
                ("short-prefill", prefill_kernel, prefill_configuration(names[dtype], False)),
            )
            for route, function, config in routes:
                if config is None:
                    if has_scale:
                        continue
                    constants = {**shared, "BD": min(hd, 64), "SPLITS": COMBINE_SPLITS}
                    pipeline = {"num_warps": 4}
                elif route == "short-prefill" and dtype == "fp32":
                    continue
                else:
                    constants = {**shared, "BM": config.BM, "BN": config.BN}
                    constants |= {"IN_ONE_BLOCK": True, "HAS_SCALE": has_scale}
                    if route == "verify":
                        constants |= {"MAX_REQUESTS": 32, "MAX_WINDOW": MAX_VERIFY_WINDOW}
                        constants["TAIL_STAGES"] = config.tail_stages
                    pipeline = {"num_warps": config.num_warps, "num_stages": config.num_stages}
                arguments = [n for n in function.arg_names if n not in constants]
                aligned = [n for n in arguments if n in tensors and n != "scale_log2"]
                aligned += [n for n in arguments if n.endswith("_stride") or n == "block_size"]
                aligned = [n for n in aligned if n not in UNSPECIALIZED]
                result.append(
                    KernelVariant(
                        name=f"{route}-{cache}-{hkv * group}-{hkv}-{hd}",
                        function=function,
                        signature={n: tensors.get(n, "i32") for n in arguments},
                        constexprs=constants,
                        aligned=aligned,
                        options=FUSION,
                        min_capability=89 if has_scale else 80,
                        **pipeline,
                    )
                )
    return result
