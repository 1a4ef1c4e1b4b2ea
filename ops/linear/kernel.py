"""x @ weight.T for few rows: the weight is read once, at the speed of memory.

A row's bits depend on the parts that K is cut into and on the order in which they are added, and both are
fixed by the whole weight's shape (config.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from compiled_mtp.ops.device import SHARED_BYTES, device_of
from compiled_mtp.ops.linear.config import (
    NAMED_DTYPES,
    LinearConfig,
    choose,
    linear_config,
    read_table,
    shared_split,
)
from compiled_mtp.ops.linear.product_kernel import linear_kernel
from compiled_mtp.ops.variants import KernelVariant

OPTIONS = {"enable_fp_fusion": True}
MAX_TILES = 1 << 16
# Up to this many rows prefill takes our kernel too: the product is bound by reading the weight.
SKINNY_ROWS = 64


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
    """Bytes of a piece: a multiple of 16, and all pieces within the shortest program's columns."""
    item = weight.element_size()
    if weight.stride(0) * item % 16:
        return 0
    length = config.part_length(k) * config.chains
    shortest = max(0, k - (config.split - 1) * length)
    return min(config.prefetch_bytes, shortest * item) // (prefetch_parts(config) * 16) * 16


def launch(args: Any) -> torch.Tensor:
    x, weight = args.x, args.weight
    rows = x.shape[0]
    is_long = args.prefill and rows > SKINNY_ROWS
    if is_long and args.weight_scale is None:
        if args.out_float32 and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.nn.functional.linear(x, weight)
    config = choose(x, weight, (args.whole_n, args.whole_k), is_long)
    return launch_config(config, x, weight, args.weight_scale, args.out_float32)


def launch_linear_silu_mul(args: Any) -> torch.Tensor:
    config = choose(args.x, args.weight, (args.whole_n, args.whole_k), False)
    return launch_config(config, args.x, args.weight, args.weight_scale, False, gated=True)


def launch_linear_parts(args: Any) -> torch.Tensor:
    config = choose(args.x, args.weight, (args.whole_n, args.whole_k), False, args.count)
    return launch_config(config, args.x, args.weight, args.weight_scale, False, keep_parts=True)


def launch_config(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    gated: bool = False,
    keep_parts: bool = False,
) -> torch.Tensor:
    """`launch`, `launch_gated` or `launch_parts` with a configuration given, as the tuner does."""
    (rows, k), n = x.shape, weight.shape[0]
    shape = (rows, n // 2 if gated else n)
    if keep_parts:
        shape = (config.split, *shape)
        out_float32 = shape[0] > 1
    out = torch.empty(shape, dtype=torch.float32 if out_float32 else x.dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    part_length = config.part_length(k)
    split = config.split
    partials = counters = None
    if split > 1 and not keep_parts:
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
        part_length,
        piece,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        CHAINS=config.chains,
        SEQUENTIAL=config.sequential,
        EVEN_K=config.is_even(k),
        FP8=weight_scale is not None,
        SPLIT=1 if keep_parts else split,
        PDL=has_pdl,
        PREFETCH_PARTS=prefetch_parts(config) if piece and not config.is_one_step(k) else 0,
        GATED=gated,
        KEEP_PARTS=keep_parts,
        ONE_STEP=config.is_one_step(k),
        ON_DEVICE=x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out


def variants() -> list[KernelVariant]:
    result: dict[str, KernelVariant] = {}

    def add(
        arch: str,
        n: int,
        k: int,
        weight_dtype: torch.dtype,
        block_m: int,
        prefill: bool,
        **kind: bool,
    ) -> None:
        x_dtype = torch.float32 if weight_dtype == torch.float32 else torch.bfloat16
        split = shared_split(arch, n, k, weight_dtype) if kind.get("keep_parts") else 0
        config = linear_config(
            arch, SHARED_BYTES[int(arch[3:-1]), 0], n, k, x_dtype, weight_dtype, block_m, prefill, split
        )
        variant = describe(config, k, x_dtype, weight_dtype, pdl=arch != "sm_80", **kind)
        result[variant.name] = variant

    for arch in ("sm_90", "sm_80"):
        for n, k, weight_dtype in (
            (34816, 5120, torch.bfloat16),
            (5120, 6144, torch.bfloat16),
            (1024, 3584, torch.bfloat16),
            (34816, 5120, torch.float8_e4m3fn),
            (2560, 9216, torch.float8_e4m3fn),
            (1024, 2048, torch.float32),
        ):
            for block_m, prefill in ((16, False), (32, False), (64, False), (128, False), (128, True)):
                add(arch, n, k, weight_dtype, block_m, prefill)
                if n == 34816 and not prefill:
                    add(arch, n, k, weight_dtype, block_m, prefill, gated=True)
                if k > n and not prefill:
                    add(arch, n, k, weight_dtype, block_m, prefill, keep_parts=True)
    for arch, entries in read_table().items():
        for entry in entries:
            shape, name = entry.split()
            add(arch, *map(int, shape.split("x")), NAMED_DTYPES[name], 16, False)
    return list(result.values())


def describe(
    config: LinearConfig,
    k: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    pdl: bool,
    gated: bool = False,
    keep_parts: bool = False,
) -> KernelVariant:
    """The variant that `launch_config` compiles for a weight of K columns."""
    names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float32: "fp32"}
    fp8 = weight_dtype == torch.float8_e4m3fn
    parts = prefetch_parts(config) if pdl and config.prefetch_bytes and not config.is_one_step(k) else 0
    pointers = {"x": f"*{names[x_dtype]}", "weight": f"*{names[weight_dtype]}", "out": f"*{names[x_dtype]}"}
    pointers |= {"weight_scale": "*fp32"} if fp8 else {}
    if keep_parts and config.split > 1:
        pointers["out"] = "*fp32"
    elif config.split > 1:
        pointers |= {"partials": "*fp32", "counters": "*i32"}
    strides = ("n", "k", "x_stride", "weight_stride", "part_length")
    absent = dict.fromkeys({"weight_scale", "partials", "counters"} - set(pointers))
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}-w{config.num_warps}-s{config.num_stages}"
    chains = f"-chains{config.chains}" + "-sequential" * config.sequential
    chains += "-one-step" * config.is_one_step(k)
    return KernelVariant(
        name=f"{names[weight_dtype]}-{tile}{chains}"
        + f"-split{config.split}" * (config.split > 1)
        + "-pdl" * pdl
        + "-gated" * gated
        + "-parts" * keep_parts,
        function=linear_kernel,
        signature={**pointers, **dict.fromkeys((*strides, "rows", "scale_stride", "prefetch_bytes"), "i32")},
        constexprs={
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "CHAINS": config.chains,
            "SEQUENTIAL": config.sequential,
            "EVEN_K": config.is_even(k),
            "FP8": fp8,
            "SPLIT": 1 if keep_parts else config.split,
            "PDL": pdl,
            "PREFETCH_PARTS": parts,
            "GATED": gated,
            "KEEP_PARTS": keep_parts,
            "ONE_STEP": config.is_one_step(k),
            "ON_DEVICE": True,
            **absent,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, *strides),
        options={**OPTIONS, "launch_pdl": pdl},
        min_capability=90 if pdl else 89 if fp8 else 80,
    )
