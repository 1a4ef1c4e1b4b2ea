"""Cases of `qk_norm_rope_kv_write`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from op_cases import (
    BF16,
    BLOCK_SIZE,
    EPS,
    FP8,
    FP32,
    ROWS,
    SHAPES,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
)


def make_inputs(
    device: Any, seed: int | None, shape: ModelShape, rows: int, cache: torch.dtype, *, has_axes: bool = False
) -> tuple[Any, ...]:
    normal = functools.partial(Source(device, seed).normal, dtype=FP32 if cache == FP32 else BF16)
    hq, hkv, hd = shape.query_heads, shape.kv_heads, shape.head_dim
    blocks = 1 + -(-rows // BLOCK_SIZE)

    pairs = torch.arange(hd // 8, device=device) / (hd // 8)
    angle = torch.arange(8192, device=device).unsqueeze(1) * 1e7**-pairs
    kv = torch.zeros(blocks, 2, hkv, BLOCK_SIZE, hd, dtype=cache, device=device)
    scale = torch.zeros(kv.shape[:-1], device=device) if cache == FP8 else None
    positions = torch.arange(4096, 4096 + rows, device=device) % 8192
    return (
        normal(rows, (2 * hq + 2 * hkv) * hd),
        normal(hd),
        normal(hd),
        torch.cat((angle.cos(), angle.sin()), 1),
        torch.stack([positions] * 3) if has_axes else positions,
        torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows, device=device),
        kv,
        scale,
        hq,
        hkv,
        EPS,
        33,
        30,
    )


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return cases with all heads of `rows` rows."""
    hq, hkv, hd = shape.query_heads, shape.kv_heads, shape.head_dim
    read = 2 * rows * (hq + 2 * hkv) * hd + 4 * rows * 64

    def case(fp8: bool) -> OpCase:
        return OpCase(
            "fp8" if fp8 else "bf16",
            functools.partial(make_inputs, shape=shape, rows=rows, cache=FP8 if fp8 else BF16),
            qk_norm_rope_kv_write,
            read + 2 * rows * hq * hd + 2 * rows * hkv * (hd + 4 if fp8 else 2 * hd),
            functools.partial(check_reference, qk_norm_rope_kv_write, most=5e-3),
        )

    return [case(False), case(True)]


def launches(capability: int) -> Iterator[LaunchCase]:
    for heads in ((24, 4, 256), (8, 2, 256), (8, 2, 64)):
        shape = dataclasses.replace(SHAPES["27b"], query_heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
        for dtype in (BF16, FP8, FP32):
            make = functools.partial(make_inputs, shape=shape, rows=ROWS, cache=dtype)
            label = f"{'-'.join(map(str, heads))}-{dtype_label(dtype)}"
            yield launch(label, qk_norm_rope_kv_write, make, dtype)
    for dtype in (BF16, FP8, FP32):
        make = functools.partial(make_inputs, shape=SHAPES["27b"], rows=ROWS, cache=dtype, has_axes=True)
        yield launch(f"27b-three-axes-{dtype_label(dtype)}", qk_norm_rope_kv_write, make, dtype)
    # Programs of two and of four heads.
    for rows in (32, 256):
        for dtype in (BF16, FP8):
            make = functools.partial(make_inputs, shape=SHAPES["27b"], rows=rows, cache=dtype)
            yield launch(f"27b-{rows}-{dtype_label(dtype)}", qk_norm_rope_kv_write, make, dtype)
