"""The specification of `rms_norm`, `add_rms_norm` and `pair_norm`, and what runs on the CPU."""

from __future__ import annotations

import torch

from compiled_mtp.ops.shares import add_tree


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x_f32 = x.float()
    mean_square = (x_f32 * x_f32).sum(-1, keepdim=True) / x.shape[-1]
    y = x_f32 * torch.rsqrt(mean_square + eps) * (1.0 + weight.float())
    return y.to(x.dtype).contiguous()


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if kept_rows is not None:
        x, residual = x.index_select(-2, kept_rows), residual[kept_rows]
    if x.dim() == 3:
        x = add_tree(x).to(residual.dtype)
    new_residual = (x.float() + residual.float()).to(x.dtype).contiguous()
    return rms_norm_reference(new_residual, weight, eps), new_residual


def pair_norm_reference(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    embedding = rms_norm_reference(table[token_ids], embedding_weight, eps)
    return torch.cat((embedding, rms_norm_reference(hidden, hidden_weight, eps)), dim=1)
