"""x @ weight.T for few rows: the weight is read once, at the speed of memory.

A row's bits depend on the K splits and on the order in which they are added; the whole weight's shape fixes
both (config.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from compiled_mtp.ops.counters import MAX_COUNTERS, zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import is_sum
from compiled_mtp.ops.linear.config import LinearConfig, choose
from compiled_mtp.ops.linear.large_m_config import find_large_m
from compiled_mtp.ops.linear.large_m_kernel import launch_large_m
from compiled_mtp.ops.linear.product_kernel import linear_kernel
from compiled_mtp.ops.linear.resident_config import find_resident
from compiled_mtp.ops.linear.resident_kernel import launch_resident
from compiled_mtp.ops.linear.side_kernel import launch_side
from compiled_mtp.ops.persistent_config import find_persistent
from compiled_mtp.ops.persistent_product import launch_persistent
from compiled_mtp.ops.prefill_triton import launch_prefill

OPTIONS = {"enable_fp_fusion": True}


def prefetch_partials(config: LinearConfig) -> int:
    """Return into how many parts, one per thread, the prefetched bytes of a weight row are divided."""
    return max(1, config.num_warps * 32 // config.block_n)


def prefetch_part_bytes(config: LinearConfig, k: int, weight: torch.Tensor) -> int:
    """Return the bytes of a prefetched part: a multiple of 16; all parts lie in every program's columns."""
    item = weight.element_size()
    if weight.stride(0) * item % 16:
        return 0
    length = config.part_length(k) * config.chains
    shortest = max(0, k - (config.split - 1) * length)
    return min(config.prefetch_bytes, shortest * item) // (prefetch_partials(config) * 16) * 16


def launch(args: Any) -> torch.Tensor:
    whole = (args.whole_n, args.whole_k)
    if args.prefill:
        return prompt_product(args.x, args.weight, args.weight_scale, args.out_float32, whole)
    config = choose(args.x, args.weight, whole, False)
    return launch_product(
        config, args.x, args.weight, args.weight_scale, args.out_float32, resident=args.resident
    )


def prompt_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    whole: tuple[int, int],
) -> torch.Tensor:
    """Return the product of a prompt's rows, which may add columns in another order than decode."""
    if weight.dtype == torch.bfloat16:
        return launch_prefill(x, weight, torch.float32 if out_float32 else x.dtype)
    # Float32 needs no speed: a prompt uses the products of decode.
    config = choose(x, weight, whole, weight.dtype != torch.float32)
    return launch_config(config, x, weight, weight_scale, out_float32)


def launch_linear_side(args: Any) -> torch.Tensor:
    return launch_side(args.x, args.weight)


def launch_linear_silu_mul(args: Any) -> torch.Tensor:
    config = choose(args.x, args.weight, (args.whole_n, args.whole_k), False)
    return launch_product(config, args.x, args.weight, args.weight_scale, False, True, resident=args.resident)


def launch_linear_partials(args: Any) -> torch.Tensor:
    x, weight, whole = args.x, args.weight, (args.whole_n, args.whole_k)
    if args.prefill:
        whole_sum = prompt_product(x, weight, args.weight_scale, args.stacked, whole)
        return whole_sum if args.stacked else whole_sum[None]
    config = choose(x, weight, whole, False, args.count)
    out_float32 = args.stacked or not is_sum(weight.shape[1], args.count, args.whole_k)
    how = {"keep_partials": True, "resident": args.resident}
    partials = launch_product(config, x, weight, args.weight_scale, out_float32, **how)
    return partials.flatten(0, 1) if args.stacked else partials


def launch_product(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    gated: bool = False,
    keep_partials: bool = False,
    resident: bool = False,
) -> torch.Tensor:
    """Launch the fastest kernel that can compute the product; all give the same bits.

    The choices are `launch_persistent` for many rows of a large weight, `launch_resident` if `resident`,
    `launch_large_m` for other rows beyond 16, else `launch_config`.
    """
    device, dtype = device_of(x.device.index), torch.float32 if out_float32 else x.dtype
    if x.dtype == weight.dtype == torch.bfloat16:
        # A task sums all K splits that no norm adds, however many programs sum them with fewer rows.
        parts, chains = (config.split, config.chains) if keep_partials else (1, config.split * config.chains)
        product = find_persistent(device, x, weight, parts, chains, gated)
        if product is not None:
            out = launch_persistent(product, x, weight, dtype, gated)
            return out if keep_partials else out[0]
    if resident and (own_tile := find_resident(device, x, weight, config, gated, keep_partials)):
        return launch_resident(own_tile, config, x, weight, dtype, gated, keep_partials)
    found = find_large_m(device, x, weight, config, gated, keep_partials)
    if found is None:
        return launch_config(config, x, weight, weight_scale, out_float32, gated, keep_partials)
    return launch_large_m(*found, x, weight, dtype)


def launch_config(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    gated: bool = False,
    keep_partials: bool = False,
) -> torch.Tensor:
    """Launch `linear_kernel` with a given configuration; the tuner calls this directly."""
    (rows, k), n = x.shape, weight.shape[0]
    shape = (rows, n // 2 if gated else n)
    if keep_partials:
        shape = (config.split, *shape)
    out = torch.empty(shape, dtype=torch.float32 if out_float32 else x.dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    part_length = config.part_length(k)
    split = config.split
    partials = counters = None
    if split > 1 and not keep_partials:
        assert tiles <= MAX_COUNTERS, "a weight this wide must not be split"
        tile_size = config.block_m * config.block_n
        partials = torch.empty(split * tiles * tile_size, dtype=torch.float32, device=x.device)
        counters = zero_counters(x.device)
    has_pdl = device_of(x.device.index).has_dependent_launch
    part_bytes = prefetch_part_bytes(config, k, weight)
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
        # A single row may have any stride, and other values would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        0 if weight_scale is None else weight_scale.stride(0),
        part_length,
        part_bytes,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        CHAINS=config.chains,
        SEQUENTIAL=config.sequential,
        EVEN_K=config.is_even(k),
        FP8=weight_scale is not None,
        SPLIT=1 if keep_partials else split,
        PDL=has_pdl,
        PREFETCH_PARTS=prefetch_partials(config) if part_bytes and not config.is_one_step(k) else 0,
        GATED=gated,
        KEEP_PARTS=keep_partials,
        ONE_STEP=config.is_one_step(k),
        ON_DEVICE=x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
