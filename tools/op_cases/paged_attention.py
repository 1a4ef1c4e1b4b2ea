"""Cases of `paged_attention`: verify windows and prompt chunks, against SDPA on gathered keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.paged_attention.reference import MAX_VERIFY_WINDOW
from op_cases import (
    BF16,
    BLOCK_SIZE,
    FP8,
    FP32,
    MAX_BLOCKS,
    PREFILL_ROWS,
    SHAPES,
    WINDOW,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
)

TOLERANCE = 4e-3


def make_inputs(
    device: Any,
    seed: int | None,
    shape: ModelShape,
    requests: int,
    query_len: int,
    keys: int,
    cache: torch.dtype,
) -> tuple[Any, ...]:
    """Return the operator's arguments, then the same keys and values [B, hkv, keys, hd] for SDPA."""
    source = Source(device, seed)
    normal = functools.partial(source.normal, dtype=FP32 if cache == FP32 else BF16)
    hd, blocks = shape.head_dim, -(-keys // BLOCK_SIZE)

    rows = requests * query_len
    qkv = normal(rows, 2 * (shape.query_heads + shape.kv_heads) * hd)
    q, gate = qkv[:, : 2 * shape.query_heads * hd].view(rows, shape.query_heads, 2, hd).unbind(2)
    kv = normal(requests * blocks, 2, shape.kv_heads, BLOCK_SIZE, hd)
    table = torch.randperm(requests * blocks, device=device, generator=source.generator).to(torch.int32)
    table = table.view(requests, blocks)
    pages = kv[table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :keys].contiguous()
    positions = torch.arange(keys - query_len, keys, device=device).repeat(requests)
    scale = None
    if cache == FP8:
        scale = kv.float().abs().amax(-1) / 448
        kv = (kv.float() / scale.unsqueeze(-1)).to(FP8)
    first_row = length = None
    if query_len > MAX_VERIFY_WINDOW:
        first_row = torch.arange(0, rows, query_len, device=device)
        length = torch.full_like(first_row, query_len)
    return q.contiguous(), gate, kv, scale, table, positions, hd**-0.5, 0, first_row, length, *pages


def call(*args: Any) -> torch.Tensor:
    return paged_attention(*args[:10])


def sdpa(*args: Any) -> torch.Tensor:
    q, gate, *_, k, v = args
    q = q.view(k.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    # A window of drafts is timed without its mask, which would keep SDPA from its fast kernels.
    is_causal = q.shape[2] == k.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1) * torch.sigmoid(gate)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return cases of rows / query_len requests of `keys` keys each; query_len above 16 is a prompt chunk."""
    query_len = settings.get("query_len", min(rows, 4))
    keys = settings.get("keys", 4096)
    requests = max(1, rows // query_len)
    cache = 2 * requests * keys * shape.kv_heads * shape.head_dim
    activations = 3 * 2 * requests * query_len * shape.query_heads * shape.head_dim

    make = functools.partial(make_inputs, shape=shape, requests=requests, query_len=query_len, keys=keys)

    def case(fp8: bool) -> OpCase:
        return OpCase(
            f"{'fp8' if fp8 else 'bf16'} B {requests} W {query_len} keys {keys}",
            functools.partial(make, cache=FP8 if fp8 else BF16),
            call,
            cache * (1 if fp8 else 2) + (cache // shape.head_dim * 4 if fp8 else 0) + activations,
            lambda args: check_reference(paged_attention, args[:10], TOLERANCE),
            sdpa,
            "SDPA bf16",
        )

    return [case(False), case(True)]


def launches(capability: int) -> Iterator[LaunchCase]:
    for heads in ((24, 4, 256), (16, 2, 256), (8, 2, 256), (8, 2, 128), (4, 2, 64)):
        shape = dataclasses.replace(SHAPES["27b"], query_heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
        for dtype in (BF16, FP8, FP32):
            if dtype == FP32 and heads not in ((8, 2, 256), (4, 2, 64)):
                continue
            for name, window, requests in (
                ("verify", WINDOW, 1),
                # So many requests that a program folds several splits.
                ("prefixed-verify", WINDOW, 32),
                # So many that a tile has 32 rows again.
                ("many-verify", WINDOW, 64),
                ("prefill", PREFILL_ROWS, 1),
                ("short-prefill", 128, 1),
            ):
                if name == "many-verify" and (heads[0], dtype) != (24, BF16):
                    continue
                keys = MAX_BLOCKS * BLOCK_SIZE
                make = functools.partial(
                    make_inputs, shape=shape, requests=requests, query_len=window, keys=keys, cache=dtype
                )
                label = f"{name}-{'-'.join(map(str, heads))}-{dtype_label(dtype)}"
                yield launch(label, call, make, dtype)
