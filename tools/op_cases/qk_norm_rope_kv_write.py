"""Cases of `qk_norm_rope_kv_write`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from op_cases import ModelShape, OpCase

BLOCK_SIZE = 64
EPS = 1e-6


def make_inputs(shape: ModelShape, rows: int, fp8: bool, device: str, seed: int) -> tuple[Any, ...]:
    g = torch.Generator(device).manual_seed(seed)
    hq, hkv, hd = shape.query_heads, shape.kv_heads, shape.head_dim
    blocks = 1 + -(-rows // BLOCK_SIZE)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=g)

    angle = torch.arange(8192, device=device).unsqueeze(1) * 1e7 ** (-torch.arange(32, device=device) / 32)
    kv = torch.zeros(blocks, 2, hkv, BLOCK_SIZE, hd, dtype=torch.bfloat16, device=device)
    scale = torch.zeros(kv.shape[:-1], device=device) if fp8 else None
    return (
        normal(rows, (2 * hq + 2 * hkv) * hd),
        normal(hd),
        normal(hd),
        torch.cat((angle.cos(), angle.sin()), 1),
        torch.arange(4096, 4096 + rows, device=device) % 8192,
        torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows, device=device),
        kv.to(torch.float8_e4m3fn) if fp8 else kv,
        scale,
        hq,
        hkv,
        EPS,
    )


def check(args: tuple[Any, ...]) -> None:
    caches = [args[6].clone(), args[6].clone()]
    scales = [args[7], args[7]] if args[7] is None else [args[7].clone(), args[7].clone()]
    calls = [[*args[:6], kv, scale, *args[8:]] for kv, scale in zip(caches, scales, strict=True)]
    got, want = qk_norm_rope_kv_write(*calls[0]), qk_norm_rope_kv_write.reference(*calls[1])
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    tolerance = 2**-7 if args[7] is None else 2**-3
    torch.testing.assert_close(caches[0].float(), caches[1].float(), rtol=tolerance, atol=2e-3)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """All heads of `rows` rows."""
    hq, hkv, hd = shape.query_heads, shape.kv_heads, shape.head_dim
    read = 2 * rows * (hq + 2 * hkv) * hd + 4 * rows * 64

    def case(fp8: bool) -> OpCase:
        return OpCase(
            "fp8" if fp8 else "bf16",
            lambda device, seed: make_inputs(shape, rows, fp8, device, seed),
            qk_norm_rope_kv_write,
            read + 2 * rows * hq * hd + 2 * rows * hkv * (hd + 4 if fp8 else 2 * hd),
            check,
        )

    return [case(False), case(True)]
