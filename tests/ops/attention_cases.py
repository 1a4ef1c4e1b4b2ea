"""Arguments of `paged_attention` for tests, and its formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compiled_mtp.ops.paged_attention.reference import MAX_VERIFY_WINDOW

Args = list[Any]


def make(
    lengths: Sequence[int],
    window: int,
    num_q_heads: int,
    num_kv_heads: int,
    hd: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 64,
    fp8: bool = False,
    device: str = "cpu",
    max_blocks: int = 0,
    seed: int = 0,
) -> Args:
    """Return one call's arguments: request b has lengths[b] keys, of which its `window` query rows are the
    last.

    Pages are in random order; parts of used and unused pages that no row may read hold NaN.
    """
    g = torch.Generator(device).manual_seed(seed)
    needed = [-(-n // block_size) for n in lengths]
    num_blocks = sum(needed) + 3
    kv = torch.randn(num_blocks, 2, num_kv_heads, block_size, hd, generator=g, device=device)
    order = torch.randperm(num_blocks - 1, generator=g, device=device) + 1
    kv[0] = torch.nan
    kv[order[sum(needed) :]] = torch.nan
    table = torch.full((len(lengths), max(max_blocks, max(needed) + 1)), -1, dtype=torch.int32, device=device)
    for b, (length, blocks) in enumerate(zip(lengths, order[: sum(needed)].split(needed), strict=True)):
        table[b, : len(blocks)] = blocks
        if length % block_size:
            kv[blocks[-1], :, :, length % block_size :] = torch.nan
    positions = torch.cat([torch.arange(n - window, n, device=device) for n in lengths])
    scale = None
    if fp8:
        scale = kv.abs().amax(-1) / 448  # NaN where kv is
        kv = (kv / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    else:
        kv = kv.to(dtype)
    rows = len(positions)
    heads = torch.randn(rows, num_q_heads, 2, hd, generator=g, device=device).to(dtype)
    q, gate = heads[:, :, 0].contiguous(), heads[:, :, 1]
    return [q, gate, kv, scale, table, positions, hd**-0.5, 0]


def call(args: Args) -> Args:
    """Return the arguments, with those of prompt chunks if the requests have more rows than a window."""
    rows, requests = len(args[5]), len(args[4])
    query_len = rows // requests
    if query_len <= MAX_VERIFY_WINDOW:
        return args
    first_row = torch.arange(0, rows, query_len, device=args[5].device)
    return [*args, first_row, torch.full_like(first_row, query_len)]


def exact(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    """The formula in float64, one row and kv head at a time."""
    rows, num_q_heads, hd = q.shape
    window, block_size = rows // table.shape[0], kv.shape[3]
    group = num_q_heads // kv.shape[2]
    out = torch.zeros(rows, num_q_heads, hd, dtype=torch.float64, device=q.device)
    for m, position in enumerate(positions.tolist()):
        keys = torch.arange(first_key, max(first_key, position + 1), device=q.device)
        keys = keys[keys // block_size < table.shape[1]]
        blocks = table[m // window][keys // block_size].long()
        keys, blocks = keys[blocks >= 0], blocks[blocks >= 0]
        if len(keys) == 0:
            continue
        for h in range(kv.shape[2]):
            pair = [kv[blocks, i, h, keys % block_size].double() for i in (0, 1)]
            if kv_scale is not None:
                pair = [t * kv_scale[blocks, i, h, keys % block_size, None] for i, t in enumerate(pair)]
            heads = slice(h * group, (h + 1) * group)
            weights = torch.softmax(softmax_scale * (q[m, heads].double() @ pair[0].T), -1)
            out[m, heads] = weights @ pair[1]
    return (out * torch.sigmoid(gate.double())).flatten(1)
