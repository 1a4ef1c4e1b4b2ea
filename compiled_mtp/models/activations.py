"""What a product is given: rows as they are, or quantised by the kernel that made them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from compiled_mtp.ops.quantize_rows import quantize_rows


class QuantizedRows(NamedTuple):
    """Rows in e4m3 with a factor for each 128 columns, and, for who takes them as they are, the rows."""

    values: torch.Tensor
    factors: torch.Tensor
    rows: torch.Tensor | None = None


Activations: TypeAlias = torch.Tensor | QuantizedRows


def as_they_are(x: Activations) -> torch.Tensor:
    """The rows [M, H] in the activations' dtype."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.rows is not None, "what makes quantised rows alone has readers of those alone"
    return x.rows


def quantized(x: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [M, H] in e4m3, and their factors [M, H / 128]."""
    return quantize_rows(x) if isinstance(x, torch.Tensor) else x[:2]
