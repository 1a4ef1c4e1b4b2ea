"""Reads the tensors of the original checkpoint from a GGUF file, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from compiled_mtp.errors import check
from compiled_mtp.files.reader import FileReader
from compiled_mtp.gguf.blocks import decode
from compiled_mtp.gguf.container import Container, Tensor
from compiled_mtp.gguf.names import Source, checkpoint_sources
from compiled_mtp.gguf.units import UNITS
from compiled_mtp.ops.blocks import UNIT


def stored_tensors(container: Container) -> dict[str, StoredTensor]:
    """Every tensor by its name in the checkpoint without the trunk's prefix; see `checkpoint_sources`."""
    files = FileReader()
    return {name: StoredTensor(name, source, files) for name, source in checkpoint_sources(container).items()}


class _Part(NamedTuple):
    """Rows [begin, end) of a weight, stored as the rows of `tensor` from row `first` on."""

    tensor: Tensor
    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint that a GGUF file stores; `name` is without the trunk's prefix."""

    name: str
    source: Source
    files: FileReader = field(default_factory=FileReader, compare=False, repr=False)

    @property
    def file(self) -> Path:
        """The file of its first rows."""
        return self.source.runs[0].tensor.file

    @property
    def dtype(self) -> str:
        """The names of its block types."""
        return " and ".join(dict.fromkeys(run.tensor.type.name for run in self.source.runs))

    @property
    def is_quantised(self) -> bool:
        """Whether its blocks hold several values."""
        return any(run.tensor.type.block > 1 for run in self.source.runs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return self.source.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks in the file."""
        return sum(run.tensor.type.bytes_of(run.count * self._width) for run in self.source.runs)

    def rows(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Rows [start, stop) in float32 on `device`, with the order and values of the checkpoint.

        Raises ValueError for a file that has become shorter since its header was read.
        """
        out = torch.empty(stop - start, self._width, device=device)
        for parts in self._alike(start, stop):
            form, begin, end = parts[0].tensor.type, parts[0].begin - start, parts[-1].end - start
            decode(form, self._bytes(parts, device), out[begin:end])
        if self.source.tiles is not None:
            out = out.view(len(out), *self.source.tiles, -1).transpose(1, 2).reshape(out.shape)
        if self.source.scale is not None:
            out *= self._factor().to(device)
        return self._restored(out).view(stop - start, *self.shape[1:])

    def read(self, region: tuple[slice, ...], device: torch.device | None = None) -> torch.Tensor:
        """The float32 values in `region`, a range per dimension, on `device` or on the CPU."""
        return self.rows(region[0].start, region[0].stop, device)[(slice(None), *region[1:])]

    @property
    def kind(self) -> str | None:
        """The kind of scaled codes (ops.blocks) in which products can read it; None if they cannot."""
        source, columns = self.source, self._width
        types = {run.tensor.type.name for run in source.runs}
        # A code of four bits is one of five.
        name = "Q5_K" if types == {"Q4_K", "Q5_K"} else next(iter(types)) if len(types) == 1 else ""
        is_fine = name in UNITS and len(self.shape) == 2 and columns % UNIT == 0 and source.change == "none"
        is_fine = is_fine and (source.scale is None or name == "NVFP4")
        if source.tiles is not None:
            is_fine = is_fine and columns // math.prod(source.tiles) % UNIT == 0
        return name if is_fine else None

    def units(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes [n, k], fields [n, k / 128, S] and factors [n] or None of whole units of a tensor with a
        `kind`.

        Raises ValueError for a file that has become shorter since its header was read.
        """
        codes, fields = [], []
        for parts in self._alike(rows.start, rows.stop):
            form, width = parts[0].tensor.type, self._width // parts[0].tensor.type.block
            found = UNITS[form.name](self._bytes(parts, device).view(-1, width, form.block_bytes))
            codes.append(found[0])
            fields.append(found[1])
        # [n, units, ...]
        whole = [torch.cat(codes).unflatten(1, (-1, UNIT)), torch.cat(fields)]
        if self.source.tiles is not None:
            tiled = [part.unflatten(1, (*self.source.tiles, -1)).transpose(1, 2) for part in whole]
            whole = [part.flatten(1, 3) for part in tiled]
        own = [part[:, columns.start // UNIT : columns.stop // UNIT] for part in whole]
        factor = None
        if self.kind == "NVFP4":
            factor = torch.ones(1) if self.source.scale is None else self._factor()
            factor = factor.to(device).expand(len(own[0]))
        return own[0].flatten(1), own[1], factor

    @property
    def _width(self) -> int:
        return math.prod(self.shape[1:])

    def _parts(self, start: int, stop: int) -> Iterator[_Part]:
        """The parts of the rows [start, stop), each in one run."""
        at = 0
        for run in self.source.runs:
            begin, end = max(start, at), min(stop, at + run.count)
            if begin < end:
                yield _Part(run.tensor, run.start + begin - at, begin, end)
            at += run.count

    def _alike(self, start: int, stop: int) -> Iterator[Sequence[_Part]]:
        """Neighbouring parts of the rows [start, stop) of one file and type, together."""
        for _, parts in groupby(
            self._parts(start, stop), lambda part: (part.tensor.file, part.tensor.type.name)
        ):
            yield list(parts)

    def _bytes(self, parts: Sequence[_Part], device: torch.device | None) -> torch.Tensor:
        """The blocks of parts of one file and type. Raises ValueError for rows that are not whole blocks."""
        tensor, width = parts[0].tensor, self._width
        form = tensor.type
        for part in parts:
            is_whole = part.first * width % form.block == 0 == (part.end - part.begin) * width % form.block
            rule, got = f"hold whole blocks of {form.block} values", f"{width} of {form.name}"
            check(is_whole, part.tensor.name, rule, got, "convert the model again")
        runs = [
            (part.tensor.offset + form.bytes_of(part.first * width), form.bytes_of(count * width))
            for part in parts
            for count in (part.end - part.begin,)
        ]
        return self.files.read(tensor.file, runs, device)

    def _factor(self) -> torch.Tensor:
        """The float32 factor [1] of all values."""
        assert self.source.scale is not None
        tensor, index = self.source.scale
        run = tensor.offset + tensor.type.bytes_of(index), tensor.type.bytes_of(1)
        return self.files.read(tensor.file, [run]).view(torch.float32)

    def _restored(self, values: torch.Tensor) -> torch.Tensor:
        if self.source.change == "minus 1":
            return values - 1
        if self.source.change == "log of minus":
            return _log_of_minus(values, self.source.runs[0].tensor)
        return values


def _log_of_minus(values: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """A_log from the stored -exp(A_log), in float32.

    Where a bfloat16 number gives the stored value up to float32's rounding, it is the result: checkpoints
    hold A_log in bfloat16.
    """
    others = values[~(values < 0)].tolist()
    check(not others, tensor.name, "be negative", others[:1], f"convert {tensor.file} again")
    logs = torch.log(-values.double())
    short = logs.bfloat16().double()
    is_short = (short.exp() + values).abs() <= values.abs() * 2.0**-22
    return torch.where(is_short, short, logs).float()
