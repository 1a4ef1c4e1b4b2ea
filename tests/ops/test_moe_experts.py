"""moe_experts: against a float64 loop, row invariance, FP8 weights and registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.moe_experts import moe_experts, moe_experts_w8a8
from compiled_mtp.ops.moe_experts.kernel import configuration
from compiled_mtp.ops.quantize_rows import quantize_rows
from tests.ops.harness import check_compiles, check_equal, check_registration, poisoned_allocations


def routing(rows: int, experts: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights and distinct ids as moe_router gives them, the shared expert last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).argsort(-1)[:, :top_k]
    ids = torch.cat([ids, torch.full((rows, 1), experts)], 1).to(torch.int32)
    return torch.rand(rows, top_k + 1, generator=generator), ids


def experts_case(
    rows: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows + 1)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    gate_up = (torch.randn(experts + 1, 2 * inner, width, generator=generator) * width**-0.5).to(dtype)
    down = (torch.randn(experts + 1, width, inner, generator=generator) * inner**-0.5).to(dtype)
    return (x, *routing(rows, experts, top_k), gate_up, down)


def loop_float64(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    x, weights, gate_up, down = x.double(), weights.double(), gate_up.double(), down.double()
    inner = down.shape[2]
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate = gate_up[expert, :inner] @ x[row]
            up = gate_up[expert, inner:] @ x[row]
            out[row] += weight * (down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_matches_a_float64_loop(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    case = experts_case(rows, 8, 3, 96, 40, dtype)
    assert relative_error(moe_experts(*case), loop_float64(*case)) < tolerance


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_rows_do_not_depend_on_their_company(threads: int) -> None:
    x, weights, ids, gate_up, down = experts_case(21, 6, 2, 192, 72)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = moe_experts(x, weights, ids, gate_up, down)
        for rows in (1, 3, 7):
            parts = zip(x.split(rows), weights.split(rows), ids.split(rows), strict=True)
            alone = torch.cat([moe_experts(*part, gate_up, down) for part in parts])
            assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_cpu_computes_the_specification(dtype: torch.dtype, tolerance: float) -> None:
    x, weights, ids, gate_up, down = experts_case(9, 6, 3, 32, 16)
    plain = (x.to(dtype), weights, ids, gate_up.to(dtype), down.to(dtype), None, None)
    scales = torch.rand(len(down), 1, 1) * 0.1, torch.rand(len(down), 1, 1) * 0.1
    fp8 = (x.to(dtype), weights, ids, gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn), *scales)
    for args in (plain, fp8):
        check_equal(moe_experts, moe_experts.reference, args, rtol=tolerance, atol=tolerance)


def test_errors() -> None:
    x, weights, ids, gate_up, down = experts_case(3, 4, 2, 32, 16)
    scale = torch.ones(5, 1, 1)
    odd = torch.zeros(gate_up.shape[0], gate_up.shape[1] + 1, gate_up.shape[2])
    cases = [
        ((x[0], weights, ids, gate_up, down), "x must have shape"),
        ((x.double(), weights, ids, gate_up, down), "x must have dtype"),
        ((x, weights, ids.long(), gate_up, down), "ids must have dtype"),
        ((x, weights, ids[:2], gate_up, down), "ids must have shape"),
        ((x, weights[:2], ids, gate_up, down), "weights must have shape"),
        ((x, weights, ids, gate_up[:4], down), r"gate_up must have shape \[5, 32, 32\], got \[4, 32, 32\]"),
        ((x, weights, ids, odd, down), r"gate_up must have shape \[5, 32, 32\], got \[5, 33, 32\]"),
        (
            (x, weights, ids, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down),
            "gate_up must be contiguous",
        ),
        ((x, weights, ids, gate_up, down.bfloat16()), "down must have dtype"),
        ((x, weights, ids, gate_up, down, scale, None), "down_scale must be given with gate_up_scale"),
        ((x, weights, ids, gate_up, down, scale, scale), "gate_up must have dtype"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            moe_experts(*arguments)


def fp8_case(
    rows: int, experts: int, top_k: int, width: int, inner: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments with FP8 weights, and the same with the dequantised weights in float32."""
    x, weights, ids, gate_up, down = experts_case(rows, experts, top_k, width, inner)

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        small = (weight * 100).to(torch.float8_e4m3fn)
        blocks = (weight.shape[0], -(-weight.shape[1] // 128), -(-weight.shape[2] // 128))
        scale = torch.rand(blocks, generator=torch.Generator().manual_seed(3)) * 0.02
        full = scale.repeat_interleave(128, 1)[:, : weight.shape[1]]
        full = full.repeat_interleave(128, 2)[:, :, : weight.shape[2]]
        return small, scale, small.float() * full

    small_gate_up, gate_up_scale, gate_up = quantize(gate_up)
    small_down, down_scale, down = quantize(down)
    fp8 = (x, weights, ids, small_gate_up, small_down, gate_up_scale, down_scale)
    return fp8, (x, weights, ids, gate_up, down)


def test_fp8_weights_are_dequantised_by_blocks() -> None:
    fp8, plain = fp8_case(5, 4, 2, 160, 136)
    assert relative_error(moe_experts(*fp8), loop_float64(*plain)) < 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_kernel_in_interpreter(interpreter: None, rows: int, dtype: torch.dtype, tolerance: float) -> None:
    x, *rest = experts_case(rows, 6, 3, 96, 40, dtype)
    strided = torch.full((rows, 120), float("nan"), dtype=dtype)
    strided[:, :96] = x
    with poisoned_allocations():
        got = moe_experts.launch(strided[:, :96], *rest, None, None)
    assert relative_error(got, loop_float64(x, *rest)) < tolerance


def test_fp8_kernel_in_interpreter(interpreter: None) -> None:
    fp8, plain = fp8_case(5, 4, 2, 160, 136)
    with poisoned_allocations():
        assert relative_error(moe_experts.launch(*fp8), loop_float64(*plain)) < 1e-6


def shards_of(
    gate_up: torch.Tensor, down: torch.Tensor, shards: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return shards: each has some rows of gate, the same rows of up, and the matching columns of down."""
    gates, ups = (half.chunk(shards, 1) for half in gate_up.chunk(2, 1))
    return [
        (torch.cat((gate, up), 1), columns.contiguous())
        for gate, up, columns in zip(gates, ups, down.chunk(shards, 2), strict=True)
    ]


def test_taller_tiles_stay_within_one_class_of_instruction() -> None:
    """Blackwell multiplies tiles of 64 pairs by other instructions than those of 16."""
    few, many = (configuration(torch.bfloat16, False, False, is_tall) for is_tall in (False, True))
    assert (few.tile_rows, many.tile_rows) == (16, 64)
    assert configuration(torch.bfloat16, False, False, True, "sm_100").tile_rows == 32
    for is_tall in (False, True):
        assert configuration(torch.bfloat16, False, True, is_tall, "sm_100") == many
        assert configuration(torch.bfloat16, True, False, is_tall).tile_rows == 16


def test_registration_and_compile() -> None:
    case = (*experts_case(3, 4, 2, 32, 16), None, None, False)
    check_registration(torch.ops.compiled_mtp.moe_experts.default, case)
    check_compiles(moe_experts, [case, (*experts_case(5, 4, 2, 32, 16), None, None)])


def w8a8_case(rows: int, experts: int, top_k: int, width: int, inner: int) -> tuple[Any, ...]:
    """Return arguments of moe_experts_w8a8, with scales that give hidden values of size one."""
    (x, weights, ids, gate_up, down, gate_up_scale, down_scale), _ = fp8_case(
        rows, experts, top_k, width, inner
    )
    scales = (gate_up_scale * 3, down_scale * 3)
    return *quantize_rows(x.bfloat16()), weights, ids, gate_up, down, *scales


def test_the_cpu_computes_the_specification_of_w8a8() -> None:
    for is_float32 in (True, False):
        args = (*w8a8_case(9, 6, 3, 256, 128), is_float32)
        # Sums in another order sometimes move a hidden value to the next e4m3 value.
        wanted, got = moe_experts_w8a8.reference(*args), moe_experts_w8a8(*args)
        assert got.dtype == wanted.dtype == (torch.float32 if is_float32 else torch.bfloat16)
        assert relative_error(got, wanted) < 0.01
        values = (
            *args[:4],
            *(
                torch.stack([dequantize(*one) for one in zip(*pair, strict=True)])
                for pair in ((args[4], args[6]), (args[5], args[7]))
            ),
            None,
            None,
            is_float32,
        )
        assert torch.equal(moe_experts_w8a8(*values), got)
        for rows in (1, 4, 5):
            part = (*(a[:rows] for a in args[:4]), *args[4:])
            assert torch.equal(moe_experts_w8a8(*part), got[:rows])


@pytest.mark.parametrize("rows, experts, top_k", [(3, 3, 2), (20, 1, 1)])
def test_w8a8_kernel_in_interpreter(interpreter: None, rows: int, experts: int, top_k: int) -> None:
    """Tiles of 16 pairs and, with 20 rows for one expert, of 64; padded rows of any stride."""
    x, x_scale, *rest = w8a8_case(rows, experts, top_k, 256, 128)
    wide = torch.full((rows, 264), float("nan")).to(x.dtype)
    wide[:, :256] = x
    for is_float32 in (True, False):
        args = (wide[:, :256], x_scale, *rest, is_float32)
        with poisoned_allocations():
            got = moe_experts_w8a8.launch(*args)
        assert got.dtype == (torch.float32 if is_float32 else torch.bfloat16)
        assert relative_error(got, moe_experts_w8a8(*args)) < 0.01
    few = (*(a[:2] for a in args[:4]), *args[4:])
    assert torch.equal(moe_experts_w8a8.launch(*few), got[:2])


def test_w8a8_is_registered_and_refuses() -> None:
    args = (*w8a8_case(3, 4, 2, 128, 128), False)
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(moe_experts_w8a8.overload, args, test_utils=kinds)
    check_compiles(moe_experts_w8a8, [args])
    x, x_scale, weights, ids, gate_up, down, gate_up_scale, down_scale, _ = args
    narrow = [gate_up[:, :128], down[..., :64], gate_up_scale[:, :1], down_scale[..., :0]]
    narrow = [tensor.contiguous() for tensor in narrow]
    cases = [
        ((x, x_scale, weights, ids, gate_up, down, None, down_scale), "gate_up_scale must be given for"),
        (
            (x, x_scale, weights, ids, gate_up, down.bfloat16(), gate_up_scale, down_scale),
            "down_scale must be None unless the weights are FP8",
        ),
        (
            (x, x_scale, weights, ids, *narrow),
            "down must have a multiple of 128 columns, got 64; use moe_experts",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            moe_experts_w8a8(*arguments)
