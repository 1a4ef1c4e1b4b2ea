"""From a checkpoint's files to the merged parameters of our models.

The family's layout says which tensor fills which rows of which parameter. `check_weights` compares that with
the headers of the files before anything is allocated; `load_weights` copies, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from compiled_mtp.errors import check, shown
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.headers import Header, read_headers
from compiled_mtp.models.layout import Stored, kept_formats, with_scales
from compiled_mtp.models.shards import shard_layout
from compiled_mtp.models.weight_format import FP8, NO_FORMATS, Formats

_FLOATS = ("BF16", "F16", "F32")
_SCALES = ("BF16", "F32")
# How many names a message lists of each kind.
_FEW = 5


def has_mtp(path: str | Path) -> bool:
    """Whether the checkpoint directory `path` stores an MTP head; without one only mtp_step 0 is possible."""
    return any(name.startswith("mtp.") for name in read_headers(Path(path)))


def read_formats(config: ModelConfig, path: str | Path | None, device: torch.device) -> Formats:
    """The formats to allocate parameters in for the checkpoint in `path` on `device`; see `kept_formats`.

    Empty where the device's operators would not read them as they are. Without a `path` (parameters that
    something else than a checkpoint fills) those of a release with this config. Raises ValueError for a
    config whose numbers of layers or experts are not those of the files.
    """
    if not config.quantized or not FP8.is_read_on(device):
        return NO_FORMATS
    headers = {} if path is None else read_headers(Path(path))
    if path is not None:
        _check_counts(config, headers)

    def is_stored(name: str) -> bool:
        is_fp8 = name in headers and headers[name].dtype == FP8.header_dtype
        return path is None or (is_fp8 and name + FP8.scale_suffix in headers)

    gdn_layers = [i for i, full in enumerate(config.is_full_attention) if not full]
    in_projs = {f"layers.{i}.mixer.in_proj.weight": FP8 for i in gdn_layers}
    return kept_formats(FAMILIES[config.family].layout(config, headers, in_projs), FP8, is_stored)


def check_weights(
    config: ModelConfig,
    path: str | Path,
    formats: Formats,
    dtype: torch.dtype,
    *,
    with_mtp: bool,
    free_bytes: int,
) -> None:
    """Raise what is wrong with the checkpoint in `path`, before anything is allocated for it.

    `formats` are those of `read_formats` and `dtype` that of the other parameters. Raises ValueError as
    `load_weights`, and for weights that take more than `free_bytes`.
    """
    layout = _checked_layout(config, path, formats, with_mtp)
    needed = 0
    for stored in layout.values():
        form = formats.get(stored.pieces[0].parameter)
        itemsize = dtype.itemsize if form is None or form.storage is None else form.storage.itemsize
        needed += math.prod(stored.shape) * itemsize
    rule, got = f"hold {_gib(needed)} of weights", f"{_gib(free_bytes)} for {path}"
    check(needed <= free_bytes, "free memory", rule, got, "use a smaller model or more memory")


@torch.no_grad()
def load_weights(
    config: ModelConfig,
    path: str | Path,
    parameters: Mapping[str, torch.Tensor],
    *,
    with_mtp: bool,
    formats: Formats = NO_FORMATS,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy the checkpoint in `path` into `parameters`, which are mutated.

    `parameters` are allocated, on any device and in the dtype to keep; their names are those of the layout,
    their formats those of `formats`. Of `world` ranks' parameters they are those of `rank`, while `config` is
    the whole model's. Weights in FP8 (with a `_scale_inv` beside them) are copied with their factors to
    parameters in FP8 and multiplied out for others. Host memory beside the parameters: the largest stored
    tensor, and its product where it is multiplied out. `progress` gets the bytes done and the bytes in all.
    Raises ValueError, before anything is copied, with the first tensors that are missing, unused, or of
    another shape or dtype, and the first parameters that would not be filled.
    """
    headers = read_headers(Path(path))
    layout = _checked_layout(config, path, formats, with_mtp, headers)
    sharded = with_scales(shard_layout(layout, config, formats, rank, world), formats)
    problems = _compare_parameters(sharded, parameters)
    if problems:
        raise _misfit([problems], path)
    total = sum(headers[name].num_bytes for name in sharded)
    done = 0
    with ExitStack() as stack:
        # A scale may lie in another file than its weight, so all stay open; they are mapped, not read.
        files = {
            file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in {header.file for header in headers.values()}
        }
        # Headers keep the order of the files, so that a disk reads forwards.
        for name in (n for n in headers if n in sharded):
            weight = files[headers[name].file].get_tensor(headers[name].name)
            scale = headers.get(name + FP8.scale_suffix)
            parameter = sharded[name].pieces[0].parameter
            if scale is not None and parameter not in formats:
                factors = files[scale.file].get_tensor(scale.name)
                weight = FP8.dequantize(weight, factors, parameters[parameter].dtype)
            _copy(weight, sharded[name], parameters)
            done += headers[name].num_bytes
            if progress is not None:
                progress(done, total)


def _copy(weight: torch.Tensor, stored: Stored, parameters: Mapping[str, torch.Tensor]) -> None:
    for piece in stored.pieces:
        target = piece.place_in(parameters[piece.parameter], weight)
        target.copy_(piece.part_of(weight).reshape(target.shape))


def _checked_layout(
    config: ModelConfig,
    path: str | Path,
    formats: Formats,
    with_mtp: bool,
    headers: Mapping[str, Header] | None = None,
) -> dict[str, Stored]:
    """The whole model's layout, once the files hold just that; factors are not in it."""
    headers = read_headers(Path(path)) if headers is None else headers
    if with_mtp and not any(name.startswith("mtp.") for name in headers):
        raise ValueError(f"model must store an MTP head (mtp.* tensors), got none in {path}; pass mtp_step=0")
    _check_counts(config, headers)
    layout = FAMILIES[config.family].layout(config, headers, formats)
    required = [n for n in with_scales(layout, formats) if with_mtp or not n.startswith("mtp.")]
    unused, misfitting, without_scale = _compare(layout, headers)
    missing = list(dict.fromkeys([n for n in required if n not in headers] + without_scale))
    kinds = (("missing", missing), ("unused", unused), ("misfitting", misfitting))
    problems = [f"{kind} tensors: {_first_few(names)}" for kind, names in kinds if names]
    if problems:
        raise _misfit(problems, path, _common_cause(config, missing, unused))
    return {name: stored for name, stored in layout.items() if with_mtp or not name.startswith("mtp.")}


def _check_counts(config: ModelConfig, headers: Mapping[str, Header]) -> None:
    """Compare what the layout counts through with the files, so that a wrong number costs no time."""
    parts = [name.split(".", 2) for name in headers if name.startswith("layers.")]
    num_layers = len({part[1] for part in parts})
    if num_layers:
        rule = f"be the number of stored layers ({num_layers})"
        remedy = "fix config.json or download the missing files"
        check(config.num_layers == num_layers, "num_hidden_layers", rule, config.num_layers, remedy)
    for field, suffix in (("num_experts", ".mlp.gate.weight"), ("linear_num_value_heads", ".A_log")):
        rows = [h.shape[0] for name, h in headers.items() if name.endswith(suffix) and h.shape]
        rule = f"be at most {max(rows, default=len(headers))}, as stored"
        count = getattr(config, field)
        check(count <= max(rows, default=len(headers)), field, rule, count, "fix config.json")


def _compare(
    layout: Mapping[str, Stored], headers: Mapping[str, Header]
) -> tuple[list[str], list[str], list[str]]:
    """The stored tensors that are unused and misfitting, and the factors that stored weights lack."""
    unused, wrong, without_scale = [], [], []
    for name, header in headers.items():
        weight = name.removesuffix(FP8.scale_suffix)
        is_scale = weight != name
        if weight not in layout or weight not in headers:
            unused.append(header.name)
            continue
        stored = layout[weight]
        has_scale = name + FP8.scale_suffix in headers
        if header.dtype == FP8.header_dtype and not is_scale and not has_scale:
            without_scale.append(name + FP8.scale_suffix)
            continue
        shape = stored.shape
        dtypes: tuple[str, ...] = _FLOATS
        if is_scale:
            shape, dtypes = FP8.scale_shape(shape), _SCALES
        elif has_scale and len(shape) == 2:  # Stacked experts with scales are no released format.
            dtypes = (FP8.header_dtype,)
        if header.shape != shape:
            wrong.append(f"{shown(header.name)} of shape {shown(list(header.shape))} for {list(shape)}")
        elif header.dtype not in dtypes:
            wrong.append(f"{shown(header.name)} of dtype {shown(header.dtype)} for {' or '.join(dtypes)}")
    return unused, wrong, without_scale


def _compare_parameters(layout: Mapping[str, Stored], parameters: Mapping[str, torch.Tensor]) -> str:
    """The parameters that `layout` does not fill exactly, as a part of a message; empty if there are none."""
    filled = dict.fromkeys(parameters, 0)
    wrong = []
    for stored in layout.values():
        # A convolution's weight [C,1,4] is kept as [C,4].
        is_conv = len(stored.shape) == 3 and not stored.is_stack
        row = stored.shape[2:] if stored.is_stack or is_conv else stored.shape[1:]
        for piece in stored.pieces:
            width = row if piece.columns is None else (piece.columns[1] - piece.columns[0],)
            have = parameters.get(piece.parameter)
            if have is None or tuple(have.shape)[1 if piece.expert is None else 2 :] != width:
                wrong.append(piece.parameter)
            else:
                count = stored.shape[0] if stored.is_stack else 1
                filled[piece.parameter] += count * piece.rows * math.prod(width)
    wrong += [name for name, count in filled.items() if count != parameters[name].numel()]
    return f"parameters that do not fit: {_first_few(dict.fromkeys(wrong))}" if wrong else ""


def _common_cause(config: ModelConfig, missing: list[str], unused: list[str]) -> str:
    """What is likely to be wrong and what to do about it, or nothing."""
    if config.tie_word_embeddings and "lm_head.weight" in unused:
        return "config.json ties the head to the embedding: set tie_word_embeddings to false or drop the head"
    wanted = set(missing)
    for name in unused:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in wanted:
                prefix = ".".join(parts[:cut])
                return f"the names begin with {shown(prefix)}., a wrapper's: save the model without it"
    return ""


def _first_few(names: Iterable[str]) -> str:
    names = list(names)
    few = ", ".join(map(shown, names[:_FEW]))
    return few if len(names) <= _FEW else f"{few} and {len(names) - _FEW} more"


def _misfit(problems: list[str], path: str | Path, cause: str = "") -> ValueError:
    remedy = cause or "download the checkpoint again or use one of a supported family"
    return ValueError(
        f"model must hold exactly the tensors that its config.json describes, got {'; '.join(problems)} "
        f"in {path}; {remedy}"
    )


def _gib(count: int) -> str:
    return f"{shown(f'{count / 2**30:.1f}')} GiB"
