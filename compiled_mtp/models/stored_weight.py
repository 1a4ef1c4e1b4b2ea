"""What the loader asks of a weight that is stored, whatever container and format hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeAlias

import torch

Region: TypeAlias = tuple[slice, ...]
"""A range of each dimension of a weight, both ends given."""


class StoredWeight(Protocol):
    """A weight as a checkpoint's files hold it: a plain tensor (`headers.Header`), or a quantised linear
    (`formats.weight.PackedWeight`), or one of a GGUF file (`gguf.tensors.StoredTensor`).

    name: of the tensor that messages name, with its prefix. dtype: how its numbers are stored, as safetensors
    calls it or in words. shape: of its values. num_bytes: of all its tensors. `read(region, device)` gives
    the values in a region: in float32, or for a plain tensor in its own dtype; on the device or on the CPU.
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
