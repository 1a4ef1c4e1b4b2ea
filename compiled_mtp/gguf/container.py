"""Reads a GGUF file's header: its metadata, and each tensor's type, shape and offset.

Every length is checked against the size of the file before anything of that length is allocated. Source: the
GGUF specification, versions 2 and 3 (version 3 only adds big-endian files).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, fail, shown
from compiled_mtp.gguf.block_types import BLOCK_TYPES, REFUSED_TYPES, BlockType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Limits far above existing files: a model of 64 layers has 1,000 tensors, and a tokenizer takes 12 MiB.
_MOST_HEADER_BYTES = 256 << 20
_MOST_TENSORS = _MOST_ENTRIES = 1 << 16
_MOST_VALUES = 1 << 24
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20
_LEAST_STRING = 8
_STRING, _ARRAY = 8, 9
# The struct code of a scalar value's type, by the type's number in the file.
_SCALARS = {number: code for number, code in enumerate("BbHhIif?  Qqd") if code != " "}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "download the file again"
_SETTLED_NS = 1_000_000_000


@dataclass(frozen=True)
class Tensor:
    """A tensor as its file describes it.

    shape: [..., N, K], K contiguous. offset: where its first byte is in `file`.
    """

    name: str
    file: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of K values."""
        return self.type.bytes_of(self.shape[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Container:
    """A model's GGUF file, or all its parts: metadata by key, tensors by name in the files' order."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def part_names(name: str) -> list[str]:
    """Return the file names of a model's parts, in order, from the name of any part; else `name` alone."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    stem, number, count = found.groups()
    if not 1 <= int(number) <= int(count):
        return [name]
    return [f"{stem}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]


def list_models(folder: Path) -> list[str]:
    """Return the names of the GGUF files in a folder, of a model in parts the first one; [] for no folder."""
    names = sorted(file.name for file in folder.glob("*.gguf"))
    return [name for name in names if part_names(name)[0] == name]


def part_files(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of. Raises ValueError for absent parts."""
    files = [path.with_name(name) for name in part_names(path.name)]
    if len(files) == 1:
        return files
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        got = f"no {absent[0]}" + (f" and {len(absent) - 1} more" if len(absent) > 1 else "")
        raise fail(str(path), f"be in one folder with all {len(files)} parts", got, "download them too")
    return files


def read_container(path: Path) -> Container:
    """Read the header of the GGUF file `path` and, if it is split, of all its parts.

    A file that has not changed since the last call is not read again: a start asks several times, and the
    texts of a tokenizer take half a second. Raises ValueError, naming the file, for one that is cut short,
    damaged, or of another version, and for a tensor of a type that is not decoded.
    """
    files = part_files(path)
    stamps = tuple(_stamp(file) for file in files)
    # A file that changes twice within the resolution of its time would look unchanged.
    is_settled = all(time.time_ns() - stamp[0] > _SETTLED_NS for stamp in stamps)
    return (_read_once if is_settled else _read_parts)(path, tuple(files), stamps)


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with the file, the time of the last change first."""
    try:
        found = file.stat()
    except OSError as error:
        beside = list_models(file.parent)
        remedy = f"its folder has {shown(', '.join(beside))}" if beside else "check the path"
        raise fail(str(file), "be a readable file", error.strerror, remedy) from None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read_parts(path: Path, files: Sequence[Path], stamps: object) -> Container:
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        part, own_tensors = _read_file(file)
        # llama.cpp writes 0 into a file that it merges from parts.
        count = part.get("split.count") or 1
        remedy = "name the parts as they were published, as x-00001-of-0000N.gguf"
        rule = f"be one of {len(files)} parts" if len(files) > 1 else "be a whole model"
        check(count == len(files), str(file), rule, f"one of {shown(count)} parts", remedy)
        if count > 1:
            got = part.get("split.no")
            check(got == number, str(file), f"be part number {number}", f"number {got}", remedy)
        if number == 0:
            metadata = part
        for tensor in own_tensors:
            once = tensor.name not in tensors
            check(once, str(file), "hold each tensor once", f"{shown(tensor.name)} twice", _AGAIN)
            tensors[tensor.name] = tensor
    wanted = metadata.get("split.tensors.count", len(tensors))
    whole = len(files) == 1 or wanted == len(tensors)
    check(whole, str(path), f"have {wanted} tensors in all its parts", len(tensors), "download all parts")
    return Container(path, metadata, tensors)


_read_once = lru_cache(maxsize=1)(_read_parts)


def _read_file(file: Path) -> tuple[dict[str, Any], list[Tensor]]:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            check(size >= 24, str(file), "be a GGUF file", f"{size} bytes", _AGAIN)
            # Map only the header: the process's address space may be limited.
            with mmap.mmap(stream.fileno(), min(size, _MOST_HEADER_BYTES), access=mmap.ACCESS_READ) as head:
                return _Reader(file, head, size).read()
    except OSError as error:
        raise fail(str(file), "be a readable file", error, "check the path") from None


class _Reader:
    """Reads the header of one file from `head`, its first bytes; `size` is the file's length in bytes."""

    def __init__(self, file: Path, head: mmap.mmap, size: int) -> None:
        self.file, self.head, self.size = file, head, size
        self.at = 0

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        self._check_version()
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self._check_count("tensors", num_tensors, _MOST_TENSORS)
        self._check_count("metadata entries", num_entries, _MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a key")
            self._check(key not in metadata, "hold each key once", f"{shown(key)} twice")
            metadata[key] = self._value(key, self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        is_fine = is_power and alignment <= _MOST_ALIGNMENT
        self._check(is_fine, "have a power of two as general.alignment", alignment)
        described = [self._describe() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return metadata, list(self._locate(described, start, alignment))

    def _check_version(self) -> None:
        magic = bytes(self._take(4, "its magic number"))
        remedy = "pass a GGUF model, or the directory of a checkpoint of Hugging Face"
        check(magic == MAGIC, str(self.file), "begin with GGUF", repr(magic), remedy)
        version = self._number("I")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        remedy = "convert it on a little-endian machine"
        check(swapped not in _VERSIONS, str(self.file), "be little-endian", "a big-endian file", remedy)
        rule, remedy = "be of GGUF version 2 or 3", "convert it with a newer llama.cpp"
        check(version in _VERSIONS, str(self.file), rule, version, remedy)

    def _describe(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """The name, type, shape and offset of the next tensor."""
        name = self._string("a tensor's name")
        count = self._number("I")
        rule = f"have tensors of 1 to {_MOST_DIMENSIONS} dimensions"
        self._check(1 <= count <= _MOST_DIMENSIONS, rule, f"{count} for {shown(name)}")
        sizes = struct.unpack(f"<{count}Q", self._take(8 * count, name))
        # Python's integers do not overflow.
        fits = all(sizes) and math.prod(sizes) <= 8 * self.size
        self._check(fits, "hold all values of its tensors", f"{list(sizes)} for {shown(name)}")
        number = self._number("I")
        if number not in BLOCK_TYPES:
            got = f"{REFUSED_TYPES.get(number, f'type number {number}')} for {shown(name)}"
            known = ", ".join(form.name for form in BLOCK_TYPES.values())
            remedy = "use a file with another quantisation, such as Q4_K_M"
            raise fail(str(self.file), f"have tensors of the types {known}", got, remedy)
        form = BLOCK_TYPES[number]
        rule = f"have rows of whole blocks of {form.block} values"
        self._check(sizes[0] % form.block == 0, rule, f"{sizes[0]} for {shown(name)} ({form.name})")
        return name, form, sizes[::-1], self._number("Q")

    def _locate(
        self, described: list[tuple[str, BlockType, tuple[int, ...], int]], start: int, alignment: int
    ) -> Iterator[Tensor]:
        for name, form, shape, offset in described:
            is_aligned = offset % alignment == 0
            self._check(is_aligned, f"align tensors to {alignment} bytes", f"{offset} for {shown(name)}")
            tensor = Tensor(name, self.file, form, shape, start + offset)
            end = tensor.offset + tensor.num_bytes
            rule = "hold its tensors whole"
            got = f"{self.size} bytes, of which {shown(name)} needs {end}"
            self._check(end <= self.size, rule, got)
            yield tensor

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._scalar(key, kind), key)

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I", key), self._number("Q", key)
        rule = "hold no arrays of arrays"
        self._check(kind != _ARRAY, rule, f"one for {shown(key)}")
        each = _LEAST_STRING if kind == _STRING else struct.calcsize("<" + self._scalar(key, kind))
        self._check_count(f"values of {shown(key)}", count, _MOST_VALUES)
        is_there = count * each <= len(self.head) - self.at
        self._check(is_there, "hold its arrays whole", f"{count} values for {shown(key)}")
        if kind == _STRING:
            return [self._string(key) for _ in range(count)]
        return list(struct.unpack(f"<{count}{self._scalar(key, kind)}", self._take(count * each, key)))

    def _scalar(self, key: str, kind: int) -> str:
        self._check(kind in _SCALARS, "have values of the types 0 to 12", f"{kind} for {shown(key)}")
        return _SCALARS[kind]

    def _number(self, code: str, what: str = "its counts") -> Any:
        form = "<" + code
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _string(self, what: str) -> str:
        text = self._take(self._number("Q", what), what)
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise fail(
                str(self.file), "hold UTF-8 texts", f"{text[:40]!r} for {shown(what)}", _AGAIN
            ) from None

    def _take(self, count: int, what: str) -> bytes:
        """The next `count` bytes; `what` names them in an error."""
        if count > len(self.head) - self.at:
            rule = f"have at most {_MOST_HEADER_BYTES >> 20} MiB before its tensors"
            if len(self.head) == self.size:
                rule = "hold all that it describes"
            got = f"{self.size} bytes, which end in {shown(what)}"
            raise fail(str(self.file), rule, got, _AGAIN)
        begin, self.at = self.at, self.at + count
        return self.head[begin : self.at]

    def _check_count(self, what: str, count: int, most: int) -> None:
        self._check(count <= most, f"have at most {most} {what}", count)

    def _check(self, ok: bool, rule: str, got: object) -> None:
        check(ok, str(self.file), rule, got, _AGAIN)
