"""Cases of `paged_attention`: verify windows and prefill chunks, beside SDPA on gathered keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.paged_attention import paged_attention
from op_cases import ModelShape, OpCase

BLOCK_SIZE = 64
TOLERANCE = 4e-3


def make_inputs(
    shape: ModelShape, requests: int, query_len: int, keys: int, fp8: bool, device: str, seed: int
) -> tuple[Any, ...]:
    """Arguments of the operator, then the same keys and values [B, hkv, keys, hd] for SDPA."""
    g = torch.Generator(device).manual_seed(seed)
    hd, blocks = shape.head_dim, -(-keys // BLOCK_SIZE)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=g)

    rows = requests * query_len
    q, gate = normal(rows, shape.query_heads, 2, hd).unbind(2)
    kv = normal(requests * blocks, 2, shape.kv_heads, BLOCK_SIZE, hd)
    table = torch.randperm(requests * blocks, device=device, generator=g).to(torch.int32)
    table = table.view(requests, blocks)
    pages = kv[table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :keys].contiguous()
    positions = torch.arange(keys - query_len, keys, device=device).repeat(requests)
    scale = None
    if fp8:
        scale = kv.float().abs().amax(-1) / 448
        kv = (kv.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return q.contiguous(), gate, kv, scale, table, positions, hd**-0.5, 0, *pages


def check(args: tuple[Any, ...]) -> None:
    got, want = paged_attention(*args[:8]).float(), paged_attention.reference(*args[:8]).float()
    error = float((got - want).norm() / want.norm())
    assert error < TOLERANCE, f"rel-L2 {error:.2e} against the reference, allowed {TOLERANCE:.0e}"


def sdpa(*args: Any) -> torch.Tensor:
    q, gate, *_, k, v = args
    q = q.view(k.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    # A window of drafts is timed without its mask, which would keep SDPA from its fast kernels.
    is_causal = q.shape[2] == k.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1) * torch.sigmoid(gate)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """rows / query_len requests of `keys` keys each; query_len above 8 is a prefill chunk."""
    query_len = settings.get("query_len", min(rows, 4))
    keys = settings.get("keys", 4096)
    requests = max(1, rows // query_len)
    cache = 2 * requests * keys * shape.kv_heads * shape.head_dim
    activations = 3 * 2 * requests * query_len * shape.query_heads * shape.head_dim

    def case(fp8: bool) -> OpCase:
        return OpCase(
            f"{'fp8' if fp8 else 'bf16'} B {requests} W {query_len} keys {keys}",
            lambda device, seed: make_inputs(shape, requests, query_len, keys, fp8, device, seed),
            lambda *args: paged_attention(*args[:8]),
            cache * (1 if fp8 else 2) + (cache // shape.head_dim * 4 if fp8 else 0) + activations,
            check,
            sdpa,
            "SDPA bf16",
        )

    return [case(False), case(True)]
