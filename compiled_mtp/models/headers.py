"""Reads the headers of a checkpoint's safetensors files: names, dtypes and shapes, but no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from compiled_mtp.errors import check, fail, shown
from compiled_mtp.files.reader import FileReader, runs_of
from compiled_mtp.models.stored_weight import Region, StoredWeight

# The longest first: the second is a prefix of the first.
_TRUNK_PREFIXES = ("model.language_model.", "model.")
# The beginnings of names that have no trunk's prefix.
_UNPREFIXED = ("mtp.", "lm_head.")
_VISUAL_PREFIX = "model.visual."
_AGAIN = "download it again"


# The dtypes of stored tensors by their names in a file.
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Reader(Protocol):
    """What reads a region of a tensor: a checkpoint's files, a stream of given weights, or `ReadTensors`."""

    def read(self, header: Header, region: Region, device: torch.device | None) -> torch.Tensor: ...


class TensorFiles:
    """The files of a checkpoint."""

    def __init__(self) -> None:
        self._files = FileReader()

    def read(self, header: Header, region: Region, device: torch.device | None) -> torch.Tensor:
        """Read a region of a tensor. Raises ValueError for a dtype that torch does not have."""
        known = header.dtype in DTYPES
        check(known, header.name, f"have a dtype of {', '.join(DTYPES)}", header.dtype, _AGAIN)
        dtype = DTYPES[header.dtype]
        runs = runs_of(header.offset, header.shape, region, dtype.itemsize)
        sizes = [part.stop - part.start for part in region]
        return self._files.read(header.file, runs, device).view(dtype).view(sizes)


@dataclass(frozen=True)
class ReadTensors:
    """Tensors that are read already, by name."""

    tensors: Mapping[str, torch.Tensor]

    def read(self, header: Header, region: Region, device: torch.device | None) -> torch.Tensor:
        """Return a region of a tensor: a view of it, if it is on `device`."""
        return self.tensors[header.name][region].to(device)


@dataclass(frozen=True)
class Header:
    """A tensor as the header of its file describes it; `name` is the full name, with the prefix, and `offset`
    says where its first byte is in `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0
    files: Reader = field(default_factory=TensorFiles, compare=False, repr=False)

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor:
        """The values in `region`, a range per dimension, in the stored dtype, on `device` or on the CPU."""
        return self.files.read(self, region, device)

    def read_whole(self, device: torch.device | None = None) -> torch.Tensor:
        """All values, as `read` returns them."""
        return self.read(tuple(slice(0, size) for size in self.shape), device)


def read_headers(root: Path) -> dict[str, Header]:
    """The tensors of the checkpoint folder `root`, by name without the trunk's prefix, in the files' order.

    The vision tower is left out. Raises ValueError for files that are not valid safetensors files, for a
    tensor that is stored twice, and for files that contradict the index.
    """
    found: dict[str, Header] = {}
    for header in _read_files(root):
        if is_skipped(header.name):
            continue
        name = without_prefix(header.name)
        if name in found:
            raise ValueError(
                f"model must store each tensor once, got {shown(header.name)} in {found[name].file} and "
                f"{header.file}; remove one of the files"
            )
        found[name] = header
    return found


def read_visual_headers(root: Path) -> dict[str, Header]:
    """The tensors of the vision tower in the checkpoint folder `root`, by name without their prefix.

    Raises ValueError as `read_headers` does for its files.
    """
    found = (header for header in _read_files(root) if is_skipped(header.name))
    return {header.name.removeprefix(_VISUAL_PREFIX): header for header in found}


def is_skipped(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, which `read_headers` leaves out."""
    return name.startswith(_VISUAL_PREFIX)


def without_prefix(name: str) -> str:
    """The name of a tensor without the trunk's prefix."""
    return next((name.removeprefix(p) for p in _TRUNK_PREFIXES if name.startswith(p)), name)


def stored_name(name: str, headers: Mapping[str, StoredWeight]) -> str:
    """`name` with the trunk's prefix that the files use; `headers` need not have that tensor."""
    if name.startswith(_UNPREFIXED):
        return name
    # Only plain tensors: a quantised linear has the name of one of its tensors.
    plain = {n: h.name for n, h in headers.items() if not n.startswith(_UNPREFIXED) and h.name.endswith(n)}
    trunk = (full.removesuffix(n) for n, full in plain.items())
    return next(trunk, "") + name


def _is_mtp(name: str) -> bool:
    return without_prefix(name).startswith("mtp.")


def _read_files(root: Path) -> list[Header]:
    opened = TensorFiles()
    files = sorted(root.glob("*.safetensors"))
    index = root / "model.safetensors.index.json"
    if index.is_file():
        listed = {root / name for name in _read_index(index)}
        absent = sorted(file.name for file in listed - set(files))
        if absent:
            whole, remedy = root / "model.safetensors", "download them"
            if whole in files:  # transformers does not delete the index of an older save.
                remedy = f"remove {index.name} if {whole.name} is the newer save, else download them"
            raise ValueError(
                f"model must have the files its index names, got no {shown(absent)} in {root}; {remedy}"
            )
        # An MTP head that was added to a release may be missing from the index. Other files may belong to
        # another save.
        others = [file for file in files if file not in listed]
        stray = [f.name for f in others if not all(_is_mtp(h.name) for h in read_file(f, opened))]
        if stray:
            raise ValueError(
                f"model must have no weights outside its index, got {shown(stray)} in {root}; remove the "
                "older save: these files, or the index with the files that it names"
            )
    if not files:
        raise ValueError(f"model must have *.safetensors files, got none in {root}; convert or download them")
    return [header for file in files for header in read_file(file, opened)]


def _read_index(index: Path) -> list[str]:
    """The names of the files that the index lists. Raises ValueError for files outside its folder."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise fail(str(index), "be a readable JSON file", error, _AGAIN) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        got = shown(weight_map, repr)
        raise fail(str(index), "hold a weight_map from tensors to files", got, _AGAIN)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            got = f"{shown(name, repr)} for {shown(tensor)}"
            raise fail(str(index), "name files of its own folder", got, _AGAIN)
    return list(weight_map.values())


def read_file(file: Path, opened: TensorFiles | None = None) -> list[Header]:
    """The tensors of one file, in its order. Source: the safetensors format (a length in 8 bytes, then JSON).

    Raises ValueError for a file that is no valid safetensors file.
    """
    opened = TensorFiles() if opened is None else opened
    try:
        # Opening maps the file and checks its header against its length, so that a truncated download is
        # found before the parameters are allocated.
        with safe_open(file, framework="pt", device="cpu"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"model must hold safetensors files, got {file} ({shown(error)}); download it again"
        ) from None
    except RuntimeError as error:  # The kernel refuses to map a file that is far larger than memory.
        remedy = "use a smaller model or more memory"
        raise fail("free memory", "allow the weights to be mapped", f"{file} ({error})", remedy) from None
    entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
    found = []
    for name, entry in ordered:
        begin, end = entry["data_offsets"]
        offset = 8 + length + begin
        found.append(Header(file, name, entry["dtype"], tuple(entry["shape"]), end - begin, offset, opened))
    return found
