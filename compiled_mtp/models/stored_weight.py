"""The loader's interface to a stored weight, in any container and format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeAlias

import torch

Region: TypeAlias = tuple[slice, ...]
"""One range per dimension of a weight, with both ends given."""


class StoredWeight(Protocol):
    """A weight in a checkpoint's files: a plain tensor (`headers.Header`), a quantised linear
    (`formats.weight.PackedWeight`), or a tensor of a GGUF file (`gguf.tensors.StoredTensor`).

    name: of the tensor that error messages name, with its prefix. dtype: how its numbers are stored, by
    safetensors' name or in words. shape: of its values. num_bytes: of all its tensors. `read(region, device)`
    returns the values in a region: in float32, or for a plain tensor in its own dtype; on `device` or on the
    CPU.
    """

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> Path: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor: ...
