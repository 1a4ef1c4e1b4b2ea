"""The headers of a checkpoint's files: what is stored, before any of it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compiled_mtp.errors import fail, shown
from compiled_mtp.models.stored_weight import StoredWeight

# Longest first: one is a prefix of the other.
_TRUNK_PREFIXES = ("model.language_model.", "model.")
# What no trunk's prefix stands before.
_APART = ("mtp.", "lm_head.")
_SKIPPED_PREFIXES = ("model.visual.",)
_AGAIN = "download it again"


class OpenFiles:
    """Files that are opened when something of them is first read, and stay mapped."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def read(self, file: Path, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """A region of the tensor `name`, with a range for each of its dimensions."""
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt", device="cpu")
        tensors = self._files[file]
        part: torch.Tensor = tensors.get_slice(name)[region] if region else tensors.get_tensor(name)
        return part


@dataclass(frozen=True)
class Header:
    """A tensor as the header of its file describes it; `name` is the full one, with the prefix."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: OpenFiles = field(default_factory=OpenFiles, compare=False, repr=False)

    def read(self, region: tuple[slice, ...], device: torch.device | None = None) -> torch.Tensor:
        """What lies in `region` (a range of each dimension), on the CPU whatever the device."""
        return self.files.read(self.file, self.name, region)


def read_headers(root: Path) -> dict[str, Header]:
    """The tensors of the checkpoint folder `root` by name without the trunk's prefix, in the order in which
    they lie in the files; the vision tower is left out.

    Raises ValueError for files that are no safetensors files, and for such as do not belong together.
    """
    found: dict[str, Header] = {}
    for header in _read_files(root):
        if header.name.startswith(_SKIPPED_PREFIXES):
            continue
        name = _without_prefix(header.name)
        if name in found:
            raise ValueError(
                f"model must store each tensor once, got {shown(header.name)} in {found[name].file} and "
                f"{header.file}; remove one of the files"
            )
        found[name] = header
    return found


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(p) for p in _TRUNK_PREFIXES if name.startswith(p)), name)


def stored_name(name: str, headers: Mapping[str, StoredWeight]) -> str:
    """`name`, of a tensor that `headers` may lack, with the trunk's prefix as the files have it."""
    if name.startswith(_APART):
        return name
    # A quantised linear goes by the name of one of its tensors.
    plain = {n: h.name for n, h in headers.items() if not n.startswith(_APART) and h.name.endswith(n)}
    trunk = (full.removesuffix(n) for n, full in plain.items())
    return next(trunk, "") + name


def _is_mtp(name: str) -> bool:
    return _without_prefix(name).startswith("mtp.")


def _read_files(root: Path) -> list[Header]:
    opened = OpenFiles()
    files = sorted(root.glob("*.safetensors"))
    index = root / "model.safetensors.index.json"
    if index.is_file():
        listed = {root / name for name in _read_index(index)}
        absent = sorted(file.name for file in listed - set(files))
        if absent:
            whole, remedy = root / "model.safetensors", "download them"
            if whole in files:  # transformers leaves the index of an older save.
                remedy = f"remove {index.name} if {whole.name} is the newer save, else download them"
            raise ValueError(
                f"model must have the files its index names, got no {shown(absent)} in {root}; {remedy}"
            )
        # A head added to a released trunk may be missing from the index; other weights may not belong to it.
        stray = [
            f.name for f in files if f not in listed and not all(_is_mtp(h.name) for h in _header(f, opened))
        ]
        if stray:
            raise ValueError(
                f"model must have no weights beside its index, got {shown(stray)} in {root}; remove what is "
                "older: these files, or the index with the files that it names"
            )
    if not files:
        raise ValueError(f"model must have *.safetensors files, got none in {root}; convert or download them")
    return [header for file in files for header in _header(file, opened)]


def _read_index(index: Path) -> list[str]:
    """The names of the files that the index lists: files of its own folder."""
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


def _header(file: Path, opened: OpenFiles) -> list[Header]:
    """The header of one file. Source: the safetensors format (a length in 8 bytes, then JSON)."""
    try:
        # Opening maps the file and checks all that its header says against its length: a download that was
        # cut short must not come to light only after the parameters are allocated.
        with safe_open(file, framework="pt", device="cpu"), file.open("rb") as stream:
            entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"model must hold safetensors files, got {file} ({shown(error)}); download it again"
        ) from None
    except RuntimeError as error:  # The kernel maps no file that is far larger than its memory.
        remedy = "use a smaller model or more memory"
        raise fail("free memory", "allow the weights to be mapped", f"{file} ({error})", remedy) from None
    entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
    return [
        Header(file, name, e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0], opened)
        for name, e in ordered
    ]
