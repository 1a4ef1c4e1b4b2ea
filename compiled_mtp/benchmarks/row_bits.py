"""Checks that a row's bits do not depend on the number of rows, in the buckets that are timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from compiled_mtp.models.linear import Linear
from compiled_mtp.models.moe import MoE
from compiled_mtp.models.rows import Rows
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.linear_w4a16 import linear_w4a16
from compiled_mtp.runner.runner import Runner


def project(module: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in float32 for the weight of `module` as it is stored."""
    if module.parts is not None:
        return module.parts.product(x, *module.codes, False)
    if module.weight.dtype == torch.int16:
        assert module.weight_scale is not None
        return linear_w4a16(x, module.weight, module.weight_scale, True)
    return linear(x, module.weight, module.weight_scale, True, False)


def count_columns(module: Linear) -> int:
    """Return the columns of a module's weight; a word of int16 holds four codes."""
    if module.parts is not None:
        return module.parts.columns
    return module.weight.shape[1] * (4 if module.weight.dtype == torch.int16 else 1)


@torch.no_grad()
def check_rows(runner: Runner, batches: list[int]) -> None:
    """Raise AssertionError unless the rows of every projection, and of a mixture's experts, are bit-equal in
    every bucket that is timed."""
    target, spec = runner.step.target, runner.spec
    width = runner.step.mtp_step + 1

    def compare(name: str, columns: int, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch.randn(max(batches) * width, columns, device=spec.device).to(spec.dtype)
        whole = multiply(x)
        for batch in batches:
            part = multiply(x[: batch * width])
            assert torch.equal(part, whole[: batch * width]), f"rows of {name} depend on M"

    linears = [module for module in target.modules() if isinstance(module, Linear)]
    # One of each shape and kind.
    for module in {(m.parts is None, m.weight.shape): m for m in linears}.values():
        compare(f"{tuple(module.weight.shape)}", count_columns(module), partial(project, module))
    if not target.is_head_packed:
        head = target.head_weight
        compare("the head", head.shape[1], lambda x: linear(x, head, None, True, False))
    mixture = next((module for module in target.modules() if isinstance(module, MoE)), None)
    if mixture is not None and mixture.communicator is None and not mixture.quantizes_rows:
        decode_rows = cast(Rows, None)
        compare("experts", spec.model.hidden_size, lambda x: mixture(x, decode_rows))
