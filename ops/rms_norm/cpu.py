"""The norms on a CPU: few torch calls, because a call takes longer than the few rows of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.fp8 import quantize
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.kept import kept
from compiled_mtp.ops.numerics import number
from compiled_mtp.ops.rms_norm.reference import as_partials


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., H] float32, times 1 + weight [..., H] or [H]."""
    scale = (x * x).sum(-1, keepdim=True).mul_(number(1.0 / x.shape[-1])).add_(number(eps)).rsqrt_()
    y = x * scale
    return y.addcmul_(y, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype == torch.float32:
        return _normed(x, weight, eps).contiguous()
    return _normed(x.float(), weight.float(), eps).to(x.dtype).contiguous()


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kept_rows: Tensor | None = None,
    resident: bool = False,
) -> tuple[Tensor, Tensor]:
    if x.dim() == 2 and x.shape[0] != residual.shape[0]:
        x = as_partials(x, residual)
    if kept_rows is not None:
        x, residual = x.index_select(-2, kept_rows), residual.index_select(0, kept_rows)
    if x.dim() == 3:
        x = x[0] if x.shape[0] == 1 else add_tree(x)
    if x.dtype is not residual.dtype:
        x = x.to(residual.dtype)
    # ATen adds narrower dtypes in float32 and rounds the sum, as the reference does.
    total = torch.add(x, residual).contiguous()
    return rms_norm(total, weight, eps), total


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, kept_rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    norm, total = add_rms_norm(x, residual, weight, eps, kept_rows)
    return norm, total, *quantize(norm)


def pair_norm(
    table: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    pairs = torch.stack((table.index_select(0, token_ids), hidden), dim=1)
    weights = kept(_stacked, embedding_weight, hidden_weight)
    return _normed(pairs.float(), weights, eps).to(hidden.dtype).flatten(1)


def _stacked(embedding_weight: Tensor, hidden_weight: Tensor) -> Tensor:
    return torch.stack((embedding_weight.detach().float(), hidden_weight.detach().float()))
