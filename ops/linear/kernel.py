"""x @ weight.T for few rows: the weight is read once, at the speed of memory.

A row's bits depend on the weight's K split and on the order in which the parts are summed, and both are fixed
by the weight's shape (config.py).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear.config import LinearConfig, block_rows, linear_config
from compiled_mtp.ops.variants import KernelVariant

OPTIONS = {"enable_fp_fusion": True}
MAX_TILES = 1 << 16
# Up to this many rows prefill takes our kernel too: the product is bound by reading the weight.
SKINNY_ROWS = 64


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "scale_stride", "prefetch_bytes"])
def linear_kernel(
    x,
    weight,
    weight_scale,
    out,
    partials,
    counters,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    scale_stride,
    split_length,
    prefetch_bytes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
):
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * BM + tl.arange(0, BM)
    first_column = (tile // row_tiles) * BN
    column = first_column + tl.arange(0, BN)
    part = tl.program_id(1)
    first_k = part * split_length
    last_k = tl.minimum(first_k + split_length, k)
    in_k = tl.arange(0, BK)
    # Weight rows beyond N are read as the last one and never stored.
    weight_rows = weight + tl.minimum(column, n - 1).to(tl.int64) * weight_stride + first_k
    if PDL:
        # The next kernel may come as soon as all our programs run. The weight does not depend on the kernel
        # before, so its first columns travel to L2 while that one finishes.
        gdc_launch_dependents()
        if PREFETCH_PARTS > 0:
            address = weight_rows.to(tl.uint64, bitcast=True)[:, None]
            address += tl.arange(0, PREFETCH_PARTS)[None, :].to(tl.uint64) * prefetch_bytes
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [address, tl.zeros((BN, PREFETCH_PARTS), tl.int32) + prefetch_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()

    row_inside = (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + (first_k + in_k)[None, :]
    weight_at = weight_rows[:, None] + in_k[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    if FP8:
        # One scale a step of 128 columns, loaded a step ahead; further ahead, Triton gives up pipelining.
        scale_row = weight_scale + (first_column // 128) * scale_stride
        block = first_k // 128
        last_block = (k - 1) // 128
        scale = tl.load(scale_row + block)
    for at in range(first_k, last_k, BK):
        if EVEN_K:
            x_tile = tl.load(x_at, mask=row_inside, other=0.0)
            weight_tile = tl.load(weight_at)
        else:
            k_inside = (at + in_k < last_k)[None, :]
            x_tile = tl.load(x_at, mask=row_inside & k_inside, other=0.0)
            weight_tile = tl.load(weight_at, mask=k_inside, other=0.0)
        if FP8:
            block = tl.minimum(block + 1, last_block)
            next_scale = tl.load(scale_row + block)
            total += tl.dot(x_tile, weight_tile.to(x_tile.dtype).T, input_precision="ieee") * scale
            scale = next_scale
        else:
            total = tl.dot(x_tile, weight_tile.T, total, input_precision="ieee")
        x_at += BK
        weight_at += BK

    out_at = out + row.to(tl.int64)[:, None] * n + column[None, :]
    inside = row_inside & (column < n)[None, :]
    if not SPLIT:
        tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
    else:
        in_tile = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        part_stride = tl.num_programs(0).to(tl.int64) * (BM * BN)
        first_part = partials + tile.to(tl.int64) * (BM * BN) + in_tile
        tl.store(first_part + part * part_stride, total, mask=row_inside)
        # All threads' parts must be written before one of them announces it.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        parts = tl.num_programs(1)
        if arrived == parts - 1:
            total = tl.load(first_part, mask=row_inside, other=0.0, cache_modifier=".cg")
            for other in range(1, parts):
                total += tl.load(
                    first_part + other * part_stride, mask=row_inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
            # Zero for the next launch, which may be a replay of the same graph.
            tl.store(counters + tile, 0)


@functools.cache
def persistent_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def tile_counters(device: torch.device) -> torch.Tensor:
    """Arrival counters, zero between launches. Launches that share them must be on one stream.

    While a graph is being captured the zeroing of new memory is only recorded, so what is first made there is
    used there alone.
    """
    made = persistent_counters.cache_info().currsize > 0
    if not made and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    return persistent_counters(device)


def prefetch_parts(config: LinearConfig) -> int:
    """Pieces of a weight row sent to L2, one a thread."""
    return max(1, config.num_warps * 32 // config.block_n)


def prefetch_piece(config: LinearConfig, k: int, weight: torch.Tensor) -> int:
    """Bytes of a piece: a multiple of 16, and all pieces within the shortest part of K."""
    item = weight.element_size()
    if weight.stride(0) * item % 16:
        return 0
    length = config.split_length(k)
    shortest = k - (k - 1) // length * length
    return min(config.prefetch_bytes, shortest * item) // (prefetch_parts(config) * 16) * 16


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    prefill: bool,
) -> torch.Tensor:
    rows, k = x.shape
    if prefill and rows > SKINNY_ROWS and weight_scale is None:
        if out_float32 and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.nn.functional.linear(x, weight)
    device = device_of(x.device.index)
    config = linear_config(
        device.arch, device.shared_bytes, weight.shape[0], k, x.dtype, weight.dtype, block_rows(rows)
    )
    return launch_config(config, x, weight, weight_scale, out_float32)


def launch_config(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
) -> torch.Tensor:
    """`launch` with a configuration given, as the tuner does."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((rows, n), dtype=torch.float32 if out_float32 else x.dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    split_length = config.split_length(k)
    split = triton.cdiv(k, split_length)
    partials = counters = None
    if split > 1:
        assert tiles <= MAX_TILES, "a weight this wide must not be split"
        tile_size = config.block_m * config.block_n
        partials = torch.empty(split * tiles * tile_size, dtype=torch.float32, device=x.device)
        counters = tile_counters(x.device)
    has_pdl = device_of(x.device.index).has_dependent_launch
    piece = prefetch_piece(config, k, weight)
    linear_kernel[(tiles, split)](
        x,
        weight,
        weight_scale,
        out,
        partials,
        counters,
        rows,
        n,
        k,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        0 if weight_scale is None else weight_scale.stride(0),
        split_length,
        piece,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        EVEN_K=k % config.block_k == 0,
        FP8=weight_scale is not None,
        SPLIT=split > 1,
        PDL=has_pdl,
        PREFETCH_PARTS=prefetch_parts(config) if piece else 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out


def variants() -> list[KernelVariant]:
    shapes = (
        (34816, 5120, torch.bfloat16),
        (5120, 6144, torch.bfloat16),
        (1024, 3584, torch.bfloat16),
        (34816, 5120, torch.float8_e4m3fn),
        (2560, 9216, torch.float8_e4m3fn),
        (1024, 2048, torch.float32),
    )
    result = {}
    for n, k, weight_dtype in shapes:
        x_dtype = torch.float32 if weight_dtype == torch.float32 else torch.bfloat16
        for block_m in (16, 32, 64, 128):
            for shared_bytes, pdl in ((227 * 1024, True), (163 * 1024, False)):
                config = linear_config("sm_90", shared_bytes, n, k, x_dtype, weight_dtype, block_m)
                variant = describe(config, k, x_dtype, weight_dtype, pdl)
                result[variant.name] = variant
    return list(result.values())


def describe(
    config: LinearConfig, k: int, x_dtype: torch.dtype, weight_dtype: torch.dtype, pdl: bool
) -> KernelVariant:
    """The variant that `launch_config` compiles for a weight of K columns."""
    names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float32: "fp32"}
    fp8 = weight_dtype == torch.float8_e4m3fn
    split = k > config.split_length(k)
    parts = prefetch_parts(config) if pdl and config.prefetch_bytes else 0
    pointers = {"x": f"*{names[x_dtype]}", "weight": f"*{names[weight_dtype]}", "out": f"*{names[x_dtype]}"}
    pointers |= {"weight_scale": "*fp32"} if fp8 else {}
    pointers |= {"partials": "*fp32", "counters": "*i32"} if split else {}
    strides = ("n", "k", "x_stride", "weight_stride", "split_length")
    absent = dict.fromkeys({"weight_scale", "partials", "counters"} - set(pointers))
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}-w{config.num_warps}-s{config.num_stages}"
    return KernelVariant(
        name=f"{names[weight_dtype]}-{tile}" + "-split" * split + "-pdl" * pdl,
        function=linear_kernel,
        signature={**pointers, **dict.fromkeys((*strides, "rows", "scale_stride", "prefetch_bytes"), "i32")},
        constexprs={
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "EVEN_K": k % config.block_k == 0,
            "FP8": fp8,
            "SPLIT": split,
            "PDL": pdl,
            "PREFETCH_PARTS": parts,
            **absent,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, *strides),
        options={**OPTIONS, "launch_pdl": pdl},
        min_capability=90 if pdl else 89 if fp8 else 80,
    )
