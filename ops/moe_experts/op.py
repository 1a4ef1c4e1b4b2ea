"""Registration of `moe_experts` and the checks on its arguments."""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.fp8 import scale_shape
from compiled_mtp.ops.moe_experts import reference
from compiled_mtp.ops.registry import register


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    from compiled_mtp.ops.moe_experts.kernel import launch

    return launch(x, weights, ids, gate_up, down, gate_up_scale, down_scale)


def _check_moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> None:
    check_shape("x", x, (None, None), "pass one row for each token")
    check_dtype("x", x, (torch.float32, torch.bfloat16), "cast it to the model's dtype")
    check_last_contiguous("x", x)
    rows, width = x.shape
    check_shape("ids", ids, (rows, None), "pass the ids of moe_router for the same rows")
    check_dtype("ids", ids, (torch.int32,), "pass the ids of moe_router")
    check_shape("weights", weights, tuple(ids.shape), "pass the weights of moe_router for the same rows")
    check_dtype("weights", weights, (torch.float32,), "pass the weights of moe_router")
    for name, table in (("ids", ids), ("weights", weights)):
        if not table.is_contiguous():
            raise fail(name, "be contiguous", list(table.stride()), "pass it as moe_router returned it")
    check_shape("down", down, (None, width, None), "stack the experts and put the shared expert last")
    experts, inner = down.shape[0], down.shape[2]
    if (gate_up_scale is None) != (down_scale is None):
        raise fail("down_scale", "be given with gate_up_scale", down_scale, "pass both or neither")
    _check_weight("gate_up", gate_up, gate_up_scale, (experts, 2 * inner, width), x)
    _check_weight("down", down, down_scale, (experts, width, inner), x)


_moe_experts = register("moe_experts", reference.moe_experts, _fake, launch=_launch, check=_check_moe_experts)


def _check_weight(
    name: str, weight: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, int, int], x: torch.Tensor
) -> None:
    check_shape(name, weight, shape, "stack the experts and put the shared expert last")
    if not weight.is_contiguous():
        raise fail(name, "be contiguous", list(weight.stride()), "call .contiguous() once at load")
    if scale is None:
        check_dtype(name, weight, (x.dtype,), "cast it to the dtype of x, or pass float8_e4m3fn with a scale")
        return
    check_dtype(name, weight, (torch.float8_e4m3fn,), "a scale goes with a float8_e4m3fn weight only")
    check_shape(f"{name}_scale", scale, scale_shape(shape), "pass one scale for each 128 x 128 block")
    check_dtype(f"{name}_scale", scale, (torch.float32,), "cast it to float32")
    if not scale.is_contiguous():
        raise fail(f"{name}_scale", "be contiguous", list(scale.stride()), "call .contiguous() once at load")


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a row's slots, in slot order, of weight * down_e(silu(gate_e x) * up_e x).

    `x` [M, H] float32 or bfloat16 (row stride free); `weights` [M, k+1] f32 and `ids` [M, k+1] i32 as
    `moe_router` gives them: ids are distinct within a row, the last is E, the shared expert; `gate_up`
    [E+1, 2*MI, H] (gate rows first) and `down` [E+1, H, MI] in x's dtype, or in float8_e4m3fn with one f32
    scale for each 128 x 128 block: `gate_up_scale` [E+1, ceil(2*MI/128), ceil(H/128)], `down_scale`
    [E+1, ceil(H/128), ceil(MI/128)]. Returns [M, H] in x's dtype, summed in float32 with one rounding; the
    hidden activation is rounded to x's dtype. Mutates nothing; raises ValueError on shapes and dtypes.
    """
    return _moe_experts(x, weights, ids, gate_up, down, gate_up_scale, down_scale)
