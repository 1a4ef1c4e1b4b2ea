"""What the copy engine needs to know of a matrix to move tiles of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor


def is_describable(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read or write tiles of it: rows at multiples of 16 bytes."""
    size = matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0 and matrix.stride(1) == 1


def describe(matrix: torch.Tensor, *tile: int) -> TensorDescriptor:
    """A descriptor of its tiles of that shape; beyond its rows and columns they hold zeros."""
    # Whether there can be one is asked where there is no Triton, too.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))
