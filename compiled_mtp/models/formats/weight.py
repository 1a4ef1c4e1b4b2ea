"""A quantised linear: the stored tensors that hold it, and how the values of a region follow from them.

Every format is a subclass of `PackedWeight` in its own module, listed in `catalogue.FORMATS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.finite import find_not_finite
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.headers import Header, ReadTensors
from compiled_mtp.models.stored_weight import Region

FLOATS = ("BF16", "F16", "F32")
AGAIN = "download the checkpoint again, or use another release of the model"


class PackedWeight(ABC):
    """The weight [N, K] of a linear whose values follow from several stored tensors.

    required, optional: the last parts of these tensors' names, each with the dtypes that it may have; the
    first tensor marks the linear as quantised. marked: the tensors that show the format, each with its
    dtypes, () for any; empty for `required`. unread: last parts of names of tensors that change no value.
    Raises ValueError, from names, shapes and dtypes alone, for tensors that do not belong together.
    """

    required: ClassVar[Mapping[str, tuple[str, ...]]]
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unread: ClassVar[Collection[str]] = ()

    def __init__(self, parts: Mapping[str, Header], claims: Claims) -> None:
        self.parts = parts
        first = next(iter(self.required))
        self.name, self.file = parts[first].name, parts[first].file
        self.module = self.name.removesuffix(f".{first}")
        for suffix, dtypes in (*self.required.items(), *self.optional.items()):
            part = parts.get(suffix)
            is_there = part is not None or suffix in self.optional
            check(is_there, f"{self.module}.{suffix}", f"be stored beside {self.name}", "none", AGAIN)
            if part is not None:
                rule = f"be of dtype {' or '.join(dtypes)}"
                check(part.dtype in dtypes, part.name, rule, part.dtype, AGAIN)
        self.num_bytes = sum(part.num_bytes for part in parts.values())
        self.shape = self.measure(claims)

    @classmethod
    def marks(cls, parts: Mapping[str, Header]) -> bool:
        """Whether a linear with these stored tensors, by the last parts of their names, has this format."""
        wanted = (cls.marked or cls.required).items()
        return all(s in parts and (not dtypes or parts[s].dtype in dtypes) for s, dtypes in wanted)

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The format in words."""

    @abstractmethod
    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K from the stored shapes. Raises ValueError for shapes that do not fit each other."""

    @abstractmethod
    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""

    @abstractmethod
    def check_values(self) -> None:
        """Raise ValueError for stored numbers that the format does not allow."""

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor:
        """The float32 values of a region; reads only the regions of the tensors that it needs."""
        rows, columns = region
        return self.decode(rows, columns, device or torch.device("cpu"))

    def part(self, suffix: str, *region: slice, device: torch.device | None = None) -> torch.Tensor:
        """A region of one of the tensors."""
        return self.parts[suffix].read(region, device).to(device)

    def whole(self, suffix: str) -> torch.Tensor:
        """All of one of the tensors."""
        return self.parts[suffix].read_whole()

    def held(self, device: torch.device) -> Self:
        """The same weight with its tensors read and on `device`."""
        read = {part.name: part.read_whole(device) for part in self._read_parts()}
        files, weight = ReadTensors(read), copy(self)
        weight.parts = {suffix: replace(part, files=files) for suffix, part in self.parts.items()}
        return weight

    def _read_parts(self) -> Iterator[Header]:
        for suffix, part in self.parts.items():
            if suffix not in self.unread:
                yield part

    def check_shape(self, suffix: str, *shape: int) -> None:
        """Raise ValueError unless the tensor has that shape."""
        part = self.parts[suffix]
        check(part.shape == shape, part.name, f"have the shape {list(shape)}", list(part.shape), AGAIN)

    def check_matrix(self, suffix: str) -> tuple[int, int]:
        """The shape of a tensor, which must have two dimensions and no size of 0; else raises ValueError."""
        part = self.parts[suffix]
        is_matrix = len(part.shape) == 2 and 0 not in part.shape
        check(is_matrix, part.name, "have two dimensions", list(part.shape), AGAIN)
        return part.shape[0], part.shape[1]

    def check_finite(self, suffix: str, *, is_positive: bool = False) -> None:
        """Raise ValueError for a scale that is NaN or infinite, or with is_positive not above zero."""
        stored = self.whole(suffix)
        name = self.parts[suffix].name
        check(not find_not_finite({name: stored}), name, "be finite", "NaN or infinity", AGAIN)
        if is_positive:
            least = float(stored.float().min())
            check(least > 0, name, "be positive", least, AGAIN)

    def find_group(self, suffix: str, columns: int, groups: int, claims: Claims) -> int:
        """The number of columns that share a scale; the tensor `suffix` has `groups` groups of `columns`
        columns.

        The size is config.json's if given, else follows from the stored shape. Raises ValueError if the two
        disagree.
        """
        sizes = {columns // groups} if columns % groups == 0 else set()
        rule = f"hold the groups of {columns} columns"
        if claims.group_sizes:
            said = {columns if size < 0 else size for size in claims.group_sizes}
            sizes = {min(size, columns) for size in said if -(-columns // size) == groups}
            rule = f"hold as many groups of {columns} columns as a group_size of {sorted(said)} gives"
        check(len(sizes) == 1, self.parts[suffix].name, rule, groups, AGAIN)
        return sizes.pop()
