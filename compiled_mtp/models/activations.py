"""The activations that a product reads: plain rows, or rows quantised by the kernel that made them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from compiled_mtp.ops.quantize_rows import quantize_rows


class QuantizedRows(NamedTuple):
    """Rows [M, H] in e4m3 with factors [M, H / 128], and for other readers the plain rows, if they exist."""

    values: torch.Tensor
    factors: torch.Tensor
    rows: torch.Tensor | None = None


Activations: TypeAlias = torch.Tensor | QuantizedRows


def plain(x: Activations) -> torch.Tensor:
    """The rows [M, H] in the activations' dtype."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.rows is not None, "a kernel without plain rows must have readers of quantised rows only"
    return x.rows


def quantized(x: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [M, H] in e4m3, and their factors [M, H / 128]."""
    return quantize_rows(x) if isinstance(x, torch.Tensor) else x[:2]
