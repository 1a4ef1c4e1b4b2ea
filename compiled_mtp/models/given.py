"""Weights that a caller gives one at a time, in the place of a checkpoint's files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from compiled_mtp.errors import check, quote
from compiled_mtp.models.headers import Header, is_skipped, without_prefix
from compiled_mtp.models.stored_weight import Region, StoredWeight

Manifest: TypeAlias = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of every tensor by its full name, in the order in which the tensors come."""

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}
_SOURCE = Path("the given weights")


@dataclass(eq=False)
class TensorStream:
    """Reads tensors from an iterator of (name, tensor) as they are wanted, and keeps those that come early.

    A tensor may lie on any device. `read` raises ValueError for one that the manifest does not name, that has
    another shape or dtype, that comes twice, or that does not come.
    """

    manifest: Manifest
    tensors: Iterator[tuple[str, torch.Tensor]]
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def read(self, header: Header, region: Region, device: torch.device | None) -> torch.Tensor:
        """Return a region of a tensor: one range per dimension."""
        return self._find(header.name)[region]

    def release(self, name: str) -> None:
        """Forget a tensor that is copied."""
        self._held.pop(name, None)

    def _find(self, wanted: str) -> torch.Tensor:
        while wanted not in self._held:
            name, tensor = next(self.tensors, (None, None))
            if name is None or tensor is None:
                raise ValueError(
                    f"weights must hold every tensor of their manifest, got no {quote(wanted)}; give it once"
                )
            if is_skipped(name):
                continue
            got = (tuple(tensor.shape), tensor.dtype)
            shape, dtype = self.manifest.get(name, ((), None))
            is_new = name not in self._seen
            check(is_new, "weights", "hold each tensor once", quote(name), "leave the second out")
            rule = f"be the manifest's: {name} has shape {tuple(shape)} and {dtype}"
            check(got == (tuple(shape), dtype), "weights", rule, got, "send what the manifest says")
            self._seen.add(name)
            self._held[name] = tensor
        return self._held[wanted]


def given_weights(
    manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[dict[str, StoredWeight], TensorStream]:
    """Return the manifest's tensors as stored weights, by name without the trunk's prefix, and their stream.

    Tensors of the vision tower are left out. Raises ValueError for a dtype that no checkpoint has.
    """
    stream = TensorStream(manifest, iter(tensors))
    found: dict[str, StoredWeight] = {}
    for name, (shape, dtype) in manifest.items():
        if is_skipped(name):
            continue
        known = sorted(str(one).removeprefix("torch.") for one in _DTYPES)
        check(dtype in _DTYPES, f"manifest[{quote(name)}]", f"have a dtype of {known}", dtype, "convert it")
        size = math.prod(shape) * dtype.itemsize
        header = Header(_SOURCE, name, _DTYPES[dtype], tuple(shape), size, files=stream)
        found[without_prefix(name)] = header
    return found, stream
