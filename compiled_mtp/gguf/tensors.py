"""Reads the tensors of the original checkpoint from a GGUF file, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_mtp.errors import check, fail
from compiled_mtp.gguf.blocks import decode
from compiled_mtp.gguf.container import Container, Tensor
from compiled_mtp.gguf.names import Source, checkpoint_sources


def stored_tensors(container: Container) -> dict[str, StoredTensor]:
    """Every tensor by its name in the checkpoint without the trunk's prefix; see `checkpoint_sources`."""
    return {name: StoredTensor(name, source) for name, source in checkpoint_sources(container).items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint that a GGUF file stores; `name` is without the trunk's prefix."""

    name: str
    source: Source

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

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in float32, with the order and values of the checkpoint.

        Raises ValueError for a file that has become shorter since its header was read.
        """
        out = torch.empty(stop - start, self._width)
        for tensor, first, begin, end in self._parts(start, stop):
            _read_values(tensor, first * self._width, out[begin - start : end - start])
        if self.source.tiles is not None:
            out = out.view(len(out), *self.source.tiles, -1).transpose(1, 2).reshape(out.shape)
        if self.source.scale is not None:
            tensor, index = self.source.scale
            factor = torch.empty(1)
            _read_values(tensor, index, factor)
            out *= factor
        return self._restored(out).view(stop - start, *self.shape[1:])

    def read(self, region: tuple[slice, ...], device: torch.device | None = None) -> torch.Tensor:
        """The float32 values in `region`, a range per dimension; on the CPU, whatever `device` is."""
        return self.rows(region[0].start, region[0].stop)[(slice(None), *region[1:])]

    @property
    def _width(self) -> int:
        return math.prod(self.shape[1:])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """For each run within [start, stop): its tensor, the first row there, and the range of rows here."""
        at = 0
        for run in self.source.runs:
            begin, end = max(start, at), min(stop, at + run.count)
            if begin < end:
                yield run.tensor, run.start + begin - at, begin, end
            at += run.count

    def _restored(self, values: torch.Tensor) -> torch.Tensor:
        if self.source.change == "minus 1":
            return values - 1
        if self.source.change == "log of minus":
            return _log_of_minus(values, self.source.runs[0].tensor)
        return values


def _read_values(tensor: Tensor, first: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous, with the values of `tensor` from index `first` on."""
    form = tensor.type
    rule = f"hold whole blocks of {form.block} values"
    is_whole = first % form.block == 0 and out.numel() % form.block == 0
    check(is_whole, tensor.name, rule, f"{out.numel()} of {form.name}", "convert the model again")
    raw = bytearray(form.bytes_of(out.numel()))
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset + form.bytes_of(first))
        view, done = memoryview(raw), 0
        while done < len(raw):
            # The system reads at most 2 GiB per call.
            count = stream.readinto(view[done:])
            if not count:
                rule, remedy = "stay unchanged while it is loaded", "start again"
                raise fail(str(tensor.file), rule, f"{len(raw) - done} bytes fewer", remedy)
            done += count
    decode(form, torch.frombuffer(raw, dtype=torch.uint8), out)


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
