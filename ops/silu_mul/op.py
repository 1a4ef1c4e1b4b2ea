"""Checks and registration of `silu_mul`."""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.silu_mul.reference import silu_mul_reference


def _fake(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _launch(gate_up: torch.Tensor) -> torch.Tensor:
    # Imported on first use: without a GPU nothing needs Triton.
    from compiled_mtp.ops.silu_mul.kernel import launch

    return launch(gate_up)


def _check_silu_mul(gate_up: torch.Tensor) -> None:
    check_shape("gate_up", gate_up, (None, None), "pass rows of gate | up")
    check_dtype("gate_up", gate_up, (torch.float32, torch.bfloat16), "cast the activations")
    check_last_contiguous("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise fail("gate_up", "have an even number of columns", gate_up.shape[1], "pass gate | up")


_silu_mul = register("silu_mul", silu_mul_reference, _fake, launch=_launch, check=_check_silu_mul)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32, rounded once.

    gate_up: [M, 2 I] float32 or bfloat16, the first I columns are the gate; rows at any stride.
    Returns [M, I] of the same dtype. Raises ValueError for a shape, dtype or stride that does not fit.
    """
    return _silu_mul(gate_up)
