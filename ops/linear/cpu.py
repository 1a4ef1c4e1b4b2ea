"""`linear` on a CPU: bfloat16 rows with a bfloat16 result are multiplied in bfloat16, all else in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.cpu_product import bfloat16_product, product, product_in_k_splits
from compiled_mtp.ops.k_splits import count_cpu_k_splits
from compiled_mtp.ops.numerics import silu


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    out_float32: bool,
    prefill: bool,
    whole_n: int = 0,
    whole_k: int = 0,
    resident: bool = False,
) -> Tensor:
    if x.dtype == torch.bfloat16 and weight_scale is None and not out_float32:
        return bfloat16_product(x, weight)
    y = product(x, weight, weight_scale)
    return y if out_float32 or x.dtype == torch.float32 else y.to(x.dtype)


def linear_side(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, None, False, False)


def linear_silu_mul(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, whole_n: int, whole_k: int, resident: bool
) -> Tensor:
    gate, up = linear(x, weight, weight_scale, False, False).float().chunk(2, dim=-1)
    return silu(gate).mul_(up).to(x.dtype)


def linear_partials(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    count: int,
    whole_n: int,
    whole_k: int,
    prefill: bool,
    stacked: bool,
    resident: bool,
) -> Tensor:
    assert count == 1, "count_partials is 1 on a CPU"
    k, whole = x.shape[1], whole_k or x.shape[1]
    y = product_in_k_splits(x, weight, weight_scale, count_cpu_k_splits(whole) * k // whole)
    return y if stacked else y[None].to(x.dtype if k == whole else torch.float32)
