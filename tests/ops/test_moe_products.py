"""The experts' two products apart: weight shards of either give the bits of the whole, as on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.moe_experts import (
    moe_experts,
    moe_experts_w8a8,
    moe_hidden,
    moe_hidden_w8a8,
    moe_sums,
    moe_sums_w8a8,
)
from tests.ops.harness import check_compiles, check_equal, poisoned_allocations
from tests.ops.test_moe_experts import experts_case, shards_of, w8a8_case


def two_products(case: tuple[Any, ...], shards: int, entry: str, prefill: bool = False) -> torch.Tensor:
    """Return the result of `shards` ranks for moe_experts' arguments; `entry`: "__call__" or "launch"."""
    x, weights, ids, gate_up, down = case
    stacks = [stack for stack, _ in shards_of(gate_up, down, shards)]
    hidden = torch.cat([getattr(moe_hidden, entry)(x, ids, stack, None, prefill) for stack in stacks], 1)
    rows = [rows.contiguous() for rows in down.chunk(shards, 1)]
    return torch.cat([getattr(moe_sums, entry)(hidden, weights, ids, own, None, prefill) for own in rows], 1)


def two_w8a8_products(case: tuple[Any, ...], shards: int, entry: str) -> torch.Tensor:
    x, x_scale, weights, ids, gate_up, down, gate_up_scale, down_scale, is_float32 = case
    hidden, factors = [], []
    for rank in range(shards):
        own, scale = (
            torch.cat([half.chunk(shards, 1)[rank] for half in both.chunk(2, 1)], 1).contiguous()
            for both in (gate_up, gate_up_scale)
        )
        made = getattr(moe_hidden_w8a8, entry)(x, x_scale, ids, own, scale, is_float32)
        hidden.append(made[0].view(torch.uint8))
        factors.append(made[1])
    whole = (torch.cat(hidden, 1).view(x.dtype), torch.cat(factors, 1))
    stacks = [
        [part.chunk(shards, 1)[rank].contiguous() for part in (down, down_scale)] for rank in range(shards)
    ]
    return torch.cat(
        [getattr(moe_sums_w8a8, entry)(*whole, weights, ids, *own, is_float32) for own in stacks], 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_shards_have_the_bits_of_the_whole_on_a_cpu(dtype: torch.dtype, rows: int) -> None:
    case = experts_case(rows, 6, 3, 96, 64, dtype)
    whole = moe_experts(*case)
    for shards in (1, 2, 4):
        assert torch.equal(two_products(case, shards, "__call__"), whole), shards


@pytest.mark.parametrize("is_float32", [True, False])
def test_quantised_shards_have_the_bits_of_the_whole_on_a_cpu(is_float32: bool) -> None:
    case = (*w8a8_case(5, 4, 2, 256, 256), is_float32)
    whole = moe_experts_w8a8(*case)
    for shards in (1, 2):
        assert torch.equal(two_w8a8_products(case, shards, "__call__"), whole), shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_have_the_bits_of_the_whole_in_interpreter(interpreter: None, dtype: torch.dtype) -> None:
    """A shard is as wide as a tile."""
    case = experts_case(5, 3, 2, 256, 128, dtype)
    for prefill in (False, True):
        with poisoned_allocations():
            whole = moe_experts.launch(*case, prefill=prefill)
            assert torch.equal(two_products(case, 2, "launch", prefill), whole)


@pytest.mark.parametrize("rows, experts, top_k", [(3, 3, 2), (20, 1, 1)])
def test_quantised_shards_have_the_bits_of_the_whole_in_interpreter(
    interpreter: None, rows: int, experts: int, top_k: int
) -> None:
    case = (*w8a8_case(rows, experts, top_k, 256, 256), False)
    with poisoned_allocations():
        assert torch.equal(two_w8a8_products(case, 2, "launch"), moe_experts_w8a8.launch(*case))


def test_the_cpu_computes_the_specifications() -> None:
    x, weights, ids, gate_up, down = experts_case(9, 6, 3, 32, 16)
    check_equal(moe_hidden, moe_hidden.reference, (x, ids, gate_up, None), rtol=1e-5, atol=1e-5)
    hidden = moe_hidden(x, ids, gate_up)
    args = (hidden, weights, ids, down, None)
    check_equal(moe_sums, moe_sums.reference, args, rtol=1e-5, atol=1e-5)
    x8, x_scale, weights, ids, gate_up, down, *scales = w8a8_case(9, 6, 3, 256, 128)
    first = (x8, x_scale, ids, gate_up, scales[0], True)
    wanted, got = moe_hidden_w8a8.reference(*first), moe_hidden_w8a8(*first)
    assert wanted[0].shape == got[0].shape == (36, 128)
    # Sums in another order sometimes move a value to the next e4m3 value.
    torch.testing.assert_close(got[0].float() * got[1], wanted[0].float() * wanted[1], rtol=0.13, atol=1e-3)
    second = (*got, weights, ids, down, scales[1], True)
    check_equal(moe_sums_w8a8, moe_sums_w8a8.reference, second, rtol=1e-4, atol=1e-4)


def test_they_are_registered_and_refuse() -> None:
    x, weights, ids, gate_up, down = experts_case(3, 4, 2, 32, 16)
    x8, x_scale, weights8, ids8, gate_up8, down8, *scales = w8a8_case(3, 4, 2, 128, 128)
    hidden, (hidden8, factors) = (
        moe_hidden(x, ids, gate_up),
        moe_hidden_w8a8(x8, x_scale, ids8, gate_up8, scales[0]),
    )
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (moe_hidden, (x, ids, gate_up, None, False)),
        (moe_sums, (hidden, weights, ids, down, None, False)),
        (moe_hidden_w8a8, (x8, x_scale, ids8, gate_up8, scales[0], False)),
        (moe_sums_w8a8, (hidden8, factors, weights8, ids8, down8, scales[1], False)),
    ]
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for made, args in cases:
        torch.library.opcheck(made.overload, args, test_utils=kinds)
        check_compiles(made, [args])
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (moe_hidden, (x, ids, gate_up.bfloat16()), "gate_up must have dtype"),
        (
            moe_hidden,
            (x, ids, gate_up[:, :31].contiguous()),
            "gate_up must have an even number of rows, got 31",
        ),
        (moe_sums, (hidden, weights, ids, down.bfloat16()), "down must have dtype"),
        (moe_hidden_w8a8, (x8, x_scale, ids8, gate_up8, None), "gate_up_scale must be given for FP8 weights"),
        (
            moe_hidden_w8a8,
            (x8, x_scale, ids8, gate_up8[:, :128].contiguous(), scales[0][:, :1].contiguous()),
            "gate_up must have a multiple of 256 rows, got 128; cut experts between groups",
        ),
    ]
    for made, args, message in refused:
        with pytest.raises(ValueError, match=message):
            made(*args)
