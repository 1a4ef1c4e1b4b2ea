"""From a checkpoint's files to the merged parameters of our models.

`layout.py` says which tensor fills which rows of which parameter. `load_weights` compares that with the
headers of the files, and only then copies, one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.fp8 import dequantize, multiplies_fp8
from compiled_mtp.models.layout import SCALE_SUFFIX, Stored, checkpoint_layout, fp8_parameters
from compiled_mtp.ops.fp8 import scale_shape

# Longest first: one is a prefix of the other.
_TRUNK_PREFIXES = ("model.language_model.", "model.")
_SKIPPED_PREFIXES = ("model.visual.",)
_FLOATS = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"


@dataclass(frozen=True)
class _Header:
    """A tensor as the header of its file describes it; `name` is the full one, with the prefix."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def has_mtp(path: str | Path) -> bool:
    """Whether the checkpoint directory `path` stores an MTP head; without one only mtp_step 0 is possible."""
    return any(_is_mtp(header.name) for header in _read_headers(Path(path)))


def kept_fp8(config: ModelConfig, path: str | Path | None, device: torch.device) -> frozenset[str]:
    """The parameters to allocate in FP8 for the checkpoint in `path` on `device`; see `fp8_parameters`.

    Empty where the device's operators would not read them as they are. Without a `path` (parameters that
    something else than a checkpoint fills) those of a release with this config.
    """
    if not config.quantized or not multiplies_fp8(device):
        return frozenset()
    if path is None:
        return fp8_parameters(config, (), lambda name: True)
    headers = _by_name(_read_headers(Path(path)))

    def is_fp8(name: str) -> bool:
        return name in headers and headers[name].dtype == _FP8 and name + SCALE_SUFFIX in headers

    return fp8_parameters(config, headers, is_fp8)


@torch.no_grad()
def load_weights(
    config: ModelConfig,
    path: str | Path,
    parameters: Mapping[str, torch.Tensor],
    *,
    with_mtp: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy the checkpoint in `path` into `parameters`, which are mutated.

    `parameters` are allocated, on any device and in the dtype to keep; their names are those of
    `checkpoint_layout`. FP8 weights (a weight with a `_scale_inv` beside it) are copied with their scales to
    parameters in FP8 and multiplied out for others. Host memory beside the parameters: the largest stored
    tensor, and its product where it is multiplied out. `progress` gets the bytes
    done and the bytes in all. Raises ValueError, before anything is copied, that names every tensor that is
    missing, unused, or of another shape or dtype, and every parameter that would not be filled.
    """
    headers = _by_name(_read_headers(Path(path)))
    if with_mtp and not any(map(_is_mtp, headers)):
        raise ValueError(f"model must store an MTP head (mtp.* tensors), got none in {path}; pass mtp_step=0")
    kept = {name for name, parameter in parameters.items() if parameter.dtype == torch.float8_e4m3fn}
    layout = checkpoint_layout(config, headers, kept)
    problems = _compare(layout, headers, with_mtp)
    if not with_mtp:
        layout = {name: stored for name, stored in layout.items() if not name.startswith("mtp.")}
    problems += _compare_parameters(layout, parameters)
    if problems:
        raise ValueError(
            f"model must hold exactly the tensors that its config.json describes, got {'; '.join(problems)} "
            f"in {path}; download the checkpoint again or use one of a supported family"
        )
    total = sum(headers[name].num_bytes for name in layout)
    done = 0
    with ExitStack() as stack:
        # A scale may lie in another file than its weight, so all stay open; they are mapped, not read.
        files = {
            file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in {header.file for header in headers.values()}
        }
        # Headers keep the order of the files, so that a disk reads forwards.
        for name in (n for n in headers if n in layout):
            weight = files[headers[name].file].get_tensor(headers[name].name)
            scale = headers.get(name + SCALE_SUFFIX)
            dtype = parameters[layout[name].pieces[0].parameter].dtype
            if scale is not None and dtype != torch.float8_e4m3fn:
                weight = dequantize(weight, files[scale.file].get_tensor(scale.name), dtype)
            _copy(weight, layout[name], parameters)
            done += headers[name].num_bytes
            if progress is not None:
                progress(done, total)


def _copy(weight: torch.Tensor, stored: Stored, parameters: Mapping[str, torch.Tensor]) -> None:
    for piece in stored.pieces:
        parameter = parameters[piece.parameter]
        target = parameter if piece.expert is None else parameter[piece.expert]
        target = target[piece.start : piece.start + piece.rows]
        target.copy_(weight[piece.source : piece.source + piece.rows].reshape(target.shape))


def _compare(layout: Mapping[str, Stored], headers: Mapping[str, _Header], with_mtp: bool) -> list[str]:
    """What is wrong with the stored tensors, as parts of a message; only `with_mtp` asks for a head."""
    required = [name for name in layout if with_mtp or not name.startswith("mtp.")]
    missing = [name for name in required if name not in headers]
    unused, wrong = [], []
    for name, header in headers.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        is_scale = weight != name
        if weight not in layout or weight not in headers:
            unused.append(header.name)
            continue
        shape = layout[weight].shape
        if is_scale:
            shape = scale_shape(shape)
        if is_scale:
            dtypes: tuple[str, ...] = ("BF16", "F32")
        elif name + SCALE_SUFFIX in headers:
            # Stacked experts with scales are no released format.
            dtypes = (_FP8,) if len(shape) == 2 else _FLOATS
        else:
            dtypes = _FLOATS
            if header.dtype == _FP8:
                missing.append(name + SCALE_SUFFIX)
                continue
        if header.shape != shape:
            wrong.append(f"{header.name} of shape {list(header.shape)} for {list(shape)}")
        elif header.dtype not in dtypes:
            wrong.append(f"{header.name} of dtype {header.dtype} for {' or '.join(dtypes)}")
    found = (("missing", missing), ("unused", unused), ("misfitting", wrong))
    return [f"{kind} tensors: {', '.join(dict.fromkeys(names))}" for kind, names in found if names]


def _compare_parameters(layout: Mapping[str, Stored], parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters that `layout` does not fill exactly, as parts of a message."""
    filled = dict.fromkeys(parameters, 0)
    wrong = []
    for stored in layout.values():
        for piece in stored.pieces:
            # A convolution's weight [C,1,4] is kept as [C,4].
            is_conv = len(stored.shape) == 3 and stored.shape[1] == 1
            row = stored.shape[2:] if is_conv else stored.shape[1:]
            have = parameters.get(piece.parameter)
            if have is None or tuple(have.shape)[1 if piece.expert is None else 2 :] != row:
                wrong.append(piece.parameter)
            else:
                filled[piece.parameter] += piece.rows * math.prod(row)
    wrong += [name for name, count in filled.items() if count != parameters[name].numel()]
    return [f"parameters that do not fit: {', '.join(dict.fromkeys(wrong))}"] if wrong else []


def _by_name(headers: list[_Header]) -> dict[str, _Header]:
    """Headers by name without the trunk's prefix; the vision tower is left out."""
    found: dict[str, _Header] = {}
    for header in headers:
        if header.name.startswith(_SKIPPED_PREFIXES):
            continue
        name = _without_prefix(header.name)
        if name in found:
            raise ValueError(
                f"model must store each tensor once, got {header.name} in {found[name].file} and "
                f"{header.file}; remove one of the files"
            )
        found[name] = header
    return found


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(p) for p in _TRUNK_PREFIXES if name.startswith(p)), name)


def _is_mtp(name: str) -> bool:
    return _without_prefix(name).startswith("mtp.")


def _read_headers(root: Path) -> list[_Header]:
    """The tensors of all files, in the order in which they lie in them."""
    files = sorted(root.glob("*.safetensors"))
    index = root / "model.safetensors.index.json"
    if index.is_file():
        listed = {root / name for name in _read_index(index)}
        absent = sorted(file.name for file in listed - set(files))
        if absent:
            raise ValueError(
                f"model must have the files its index names, got no {absent} in {root}; download them"
            )
        # A head added to a released trunk may be missing from the index; other weights may not belong to it.
        stray = [f.name for f in files if f not in listed and not all(_is_mtp(h.name) for h in _header(f))]
        if stray:
            raise ValueError(
                f"model must have no weights beside its index, got {stray} in {root}; remove them"
            )
    if not files:
        raise ValueError(f"model must have *.safetensors files, got none in {root}; convert or download them")
    return [header for file in files for header in _header(file)]


def _read_index(index: Path) -> list[str]:
    """The names of the files that the index lists: files of its own folder."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{index} must be a readable JSON file, got {error}; download it again") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{index} must hold a weight_map from tensors to files, got {weight_map!r}; download it again"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise ValueError(
                f"{index} must name files of its own folder, got {name!r} for {tensor}; download it again"
            )
    return list(weight_map.values())


def _header(file: Path) -> list[_Header]:
    """The header of one file. Source: the safetensors format (a length in 8 bytes, then JSON)."""
    try:
        # Opening maps the file and checks all that its header says against its length: a download that was
        # cut short must not come to light only after the parameters are allocated.
        with safe_open(file, framework="pt", device="cpu"), file.open("rb") as stream:
            entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"model must hold safetensors files, got {file} ({error}); download it again"
        ) from None
    entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
    return [
        _Header(file, name, e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0])
        for name, e in ordered
    ]
