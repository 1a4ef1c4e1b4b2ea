"""What a rank computes of its heads and experts, held against the same of the whole: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compiled_mtp.model_config import rank_range
from tests.ops.attention_cases import call

Operator = Callable[..., Any]
BLOCK_SIZE = 64


def heads_of(x: torch.Tensor, rank: int, world: int, dim: int = 1) -> torch.Tensor:
    """The heads of `rank`; ranks that outnumber them share one."""
    begin, end = rank_range(x.shape[dim], rank, world)
    return x.narrow(dim, begin, end - begin).contiguous()


def check_attention_heads(
    attend: Operator, heads: tuple[int, int, int], dtype: torch.dtype, device: str, *, window: int, world: int
) -> None:
    """Rows of 3 requests, `window` each; above 16 they are a prompt's. heads: query heads, KV heads, size."""
    hq, hkv, size = heads
    rng = torch.Generator().manual_seed(window)
    lengths = torch.tensor([70, 9, 150])
    table = torch.arange(1, 10, dtype=torch.int32).view(3, 3).to(device)
    kv = torch.randn(10, 2, hkv, BLOCK_SIZE, size, generator=rng).to(device, dtype)
    q, gate = torch.randn(2, 3 * window, hq, size, generator=rng).to(device, dtype)
    positions = (lengths[:, None] + torch.arange(window)).flatten().to(device)

    def run(q: torch.Tensor, gate: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        args = call([q, gate, kv, None, table, positions, size**-0.5, 1])
        return attend(*args).view(len(q), -1, size)

    whole = run(q, gate, kv)
    for rank in range(world):
        own = run(heads_of(q, rank, world), heads_of(gate, rank, world), heads_of(kv, rank, world, 2))
        assert torch.equal(own, heads_of(whole, rank, world)), rank


def check_gdn_prefill_heads(
    prefill: Operator, heads: tuple[int, int, int], dtype: torch.dtype, device: str, *, rows: int, world: int
) -> None:
    """A prompt's state and outputs; heads: key heads and value heads, and the size of either."""
    hk, hv, size = heads
    rng = torch.Generator().manual_seed(rows)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, hk, size, generator=rng), dim=-1).to(device)
    v = torch.randn(rows, hv, size, generator=rng).to(device)
    g = (-torch.rand(rows, hv, generator=rng)).to(device)
    beta = torch.rand(rows, hv, generator=rng).to(device)
    z = torch.randn(rows, hv * size, generator=rng).to(device, dtype)
    norm_weight = (torch.rand(size, generator=rng) + 0.5).to(device)
    before = torch.randn(2, hv, size, size, generator=rng).to(device)
    place = (torch.tensor([1], dtype=torch.int32, device=device),)
    place += tuple(torch.tensor([n], device=device) for n in (64, rows, 0))

    def run(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = heads_of(before, rank, world).clone()
        parts = [heads_of(x, rank, world) for x in (q, k, v, g, beta)]
        own_z = heads_of(z.view(rows, hv, size), rank, world).view(rows, -1)
        y = prefill(*parts, own_z, norm_weight, state, *place, 1e-6, "silu", None)
        return y.view(rows, -1, size), state

    whole, state = run(0, 1)
    for rank in range(world):
        own, own_state = run(rank, world)
        assert torch.equal(own, heads_of(whole, rank, world)), rank
        assert torch.equal(own_state, heads_of(state, rank, world)), rank
