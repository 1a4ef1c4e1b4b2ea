"""On one GPU: the results of each of several ranks have the bits of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from compiled_mtp.ops.fp8 import quantize_weight
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.linear import linear, linear_partials
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.moe_experts import moe_experts, moe_experts_w8a8
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.quantize_rows import quantize_rows
from tests.ops.rank_cases import check_attention_heads, check_gdn_prefill_heads
from tests.ops.test_moe_experts import routing
from tests.ops.test_moe_products import two_products, two_w8a8_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = torch.bfloat16


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def stack_of(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 experts and their scales."""
    pairs = [quantize_weight(random(rows, columns, scale=columns**-0.5)) for _ in range(experts)]
    return torch.stack([value for value, _ in pairs]), torch.stack([scale for _, scale in pairs])


# KV heads replicated on (2, 2) ranks, and 35B-A3B's.
@pytest.mark.parametrize("heads", [(4, 1, 256), (16, 2, 256), (24, 4, 256)])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_attention_of_some_heads(heads: tuple[int, int, int], window: int) -> None:
    for world in (2, 4):
        check_attention_heads(paged_attention, heads, BF16, "cuda", window=window, world=world)


# The last: one GPU has blocks of 32 value columns, a rank has blocks of 16.
@pytest.mark.parametrize("heads", [(1, 4, 128), (16, 48, 128), (16, 32, 128)])
def test_gdn_prefill_of_some_heads(heads: tuple[int, int, int]) -> None:
    for world in (2, 4):
        check_gdn_prefill_heads(gdn_prefill, heads, BF16, "cuda", rows=200, world=world)


@pytest.mark.parametrize("rows", [1, 4, 40, 128])
@pytest.mark.parametrize(("n", "k"), [(256, 1024), (256, 512), (5120, 17408), (2048, 4096)])
@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
def test_products_of_some_columns(kind: str, n: int, k: int, rows: int) -> None:
    """Split-K partials of a round, and a prompt's rows of the weight."""
    x, weight = random(rows, k), random(n, k, scale=k**-0.5)
    values, scale = (weight, None) if kind == "bf16" else quantize_weight(weight)
    quantised = quantize_rows(x)

    def part(rank: int, world: int) -> torch.Tensor:
        columns = slice(rank * k // world, (rank + 1) * k // world)
        blocks = slice(columns.start // 128, columns.stop // 128)
        own = values[:, columns].contiguous()
        own_scale = None if scale is None else scale[:, blocks].contiguous()
        whole_k = k if world > 1 else 0
        if kind != "w8a8":
            return linear_partials(x[:, columns].contiguous(), own, own_scale, 1, 0, whole_k)[0]
        rows_of_x = quantised[0][:, columns].contiguous(), quantised[1][:, blocks].contiguous()
        return linear_w8a8_partials(*rows_of_x, own, own_scale, 1, whole_k)[0]

    whole = part(0, 1)
    for world in (2, 4):
        parts = [part(rank, world) for rank in range(world)]
        assert torch.equal(add_tree(parts).to(BF16), whole), world
    some = n // 2
    own_scale = None if scale is None else scale[: some // 128].contiguous()
    if kind == "w8a8":
        prompt = linear_w8a8(*quantised, values, scale)
        own = linear_w8a8(*quantised, values[:some].contiguous(), own_scale)
    else:
        prompt = linear_partials(x, values, scale, 1, 0, 0, True)[0]
        own = linear_partials(x, values[:some].contiguous(), own_scale, 1, n, 0, True)[0]
    assert torch.equal(own, prompt[:, :some])
    # The gates of an FP8 release: a product of a few rows of the weight.
    few = random(8, k, scale=k**-0.5)
    for prefill in (False, True):
        whole = linear(x, few, None, False, prefill)
        assert torch.equal(linear(x, few[:4].contiguous(), None, False, prefill, 8), whole[:, :4]), prefill


@pytest.mark.parametrize("rows", [1, 4, 300])
@pytest.mark.parametrize(("width", "inner"), [(256, 512), (2048, 512)])
def test_shards_of_experts(width: int, inner: int, rows: int) -> None:
    weights, ids = (tensor.cuda() for tensor in routing(rows, 8, 4))
    x = random(rows, width)
    stacks: tuple[Any, ...] = (random(9, 2 * inner, width, scale=width**-0.5),)
    stacks += (random(9, width, inner, scale=inner**-0.5),)
    case = (x, weights, ids, *stacks)
    for world, prefill in itertools.product((2, 4), (False, True)):
        whole = moe_experts(*case, prefill=prefill)
        assert torch.equal(two_products(case, world, "__call__", prefill), whole), (world, prefill)
    (gate_up, gate_up_scale), (down, down_scale) = stack_of(9, 2 * inner, width), stack_of(9, width, inner)
    quantised = (*quantize_rows(x), weights, ids, gate_up, down, gate_up_scale, down_scale, False)
    assert torch.equal(two_w8a8_products(quantised, 2, "__call__"), moe_experts_w8a8(*quantised))
