"""Descriptors, through which a GPU's copy engine moves tiles of a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor


def is_describable(matrix: torch.Tensor) -> bool:
    """Return whether the copy engine can move tiles of `matrix`: rows begin at multiples of 16 bytes."""
    size = matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0 and matrix.stride(1) == 1


def describe(matrix: torch.Tensor, *tile: int) -> TensorDescriptor:
    """Return a descriptor of tiles of `matrix`; they hold zeros outside its rows and columns."""
    # Imported here: `is_describable` is also called where Triton is not installed.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))
