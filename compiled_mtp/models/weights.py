"""Loads a checkpoint's files into the merged parameters of our models.

The family's layout says which tensor fills which rows of which parameter, and comparison.py checks it against
the files' headers. `check_weights` does that before anything is allocated; `load_weights` copies one tensor
at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from compiled_mtp.errors import check, shown
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.catalogue import check_packed, describe_packed, is_packed, read_stored
from compiled_mtp.models.comparison import check_counts, check_parameters, checked_layout, first_few
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.finite import find_not_finite
from compiled_mtp.models.formats.weight import PackedWeight
from compiled_mtp.models.four_bits import (
    codes_apart,
    fill_four_bits,
    four_bit_formats,
    has_codes,
    made_up_formats,
)
from compiled_mtp.models.headers import Header
from compiled_mtp.models.layout import Layout, Stored, WeightShard, kept_columns, with_scales
from compiled_mtp.models.lora import read_adapter, read_merged
from compiled_mtp.models.scaled_codes import (
    check_scales,
    fill_scaled_codes,
    has_scaled_codes,
    made_up_coded_formats,
    scaled_code_formats,
)
from compiled_mtp.models.shards import shard_layout
from compiled_mtp.models.stored_weight import Region, StoredWeight
from compiled_mtp.models.weight_format import (
    FP8,
    NO_FORMATS,
    PLAIN,
    Formats,
    Recipe,
    WeightFormat,
    formats_for,
)

logger = logging.getLogger(__name__)

# Values of a weight that are copied at a time, on a CPU and on a GPU. A value of a quantised weight takes a
# float32 and a few integers.
_VALUES_AT_ONCE, _GPU_VALUES_AT_ONCE = 1 << 22, 1 << 24


def read_formats(
    config: ModelConfig,
    path: str | Path | None,
    device: torch.device,
    recipe: Recipe | None,
    dtype: torch.dtype = torch.bfloat16,
    world: int = 1,
) -> Formats:
    """The formats of the parameters for the checkpoint in `path` on `device`; see `kept_columns`,
    `four_bit_formats` and `scaled_code_formats`.

    recipe: the result of `resolve_recipe`. dtype: of the activations. world: the number of ranks; several
    ranks do not divide scaled codes, so that these are multiplied out. Without a `path`, for parameters that
    no checkpoint fills, the formats of a release with this config. Raises ValueError for a config whose
    numbers of layers or experts contradict the files.
    """
    headers = {} if path is None else read_stored(Path(path))
    may_have_codes = dtype == torch.bfloat16 and (bool(config.four_bit_group) or has_codes(headers))
    may_have_blocks = dtype == torch.bfloat16 and world == 1
    may_have_blocks = may_have_blocks and (bool(config.scaled_codes) or has_scaled_codes(headers))
    if not config.quantized and not may_have_codes and not may_have_blocks:
        return NO_FORMATS
    if path is not None:
        check_counts(config, headers)

    def is_stored(name: str) -> bool:
        is_fp8 = name in headers and headers[name].dtype == FP8.header_dtype
        return path is None or (is_fp8 and name + FP8.scale_suffix in headers)

    gdn_layers = [i for i, full in enumerate(config.is_full_attention) if not full]
    in_projs = {f"layers.{i}.mixer.in_proj.weight": FP8 for i in gdn_layers}
    layout = FAMILIES[config.family].layout(config, headers, in_projs)
    formats: Formats = NO_FORMATS
    if config.quantized:
        formats = formats_for(recipe, kept_columns(layout, FP8, is_stored), device)
    if may_have_codes and path is None:
        return {**formats, **made_up_formats(layout, config.four_bit_group, device)}
    if not may_have_codes and not may_have_blocks:
        return formats
    layout = FAMILIES[config.family].layout(config, headers, codes_apart(config))
    if may_have_blocks and path is None:
        kind = config.scaled_codes
        return {**formats, **made_up_coded_formats(layout, kind, config.num_layers, device)}
    if may_have_blocks:
        formats = {**formats, **scaled_code_formats(layout, headers, device)}
    if not may_have_codes:
        return formats
    return {**formats, **four_bit_formats(layout, headers, device)}


def check_weights(
    config: ModelConfig,
    path: str | Path,
    formats: Formats,
    dtype: torch.dtype,
    *,
    with_mtp: bool,
    free_bytes: int,
    rank: int = 0,
    world: int = 1,
    prompt_rows: bool = False,
    allow_extra: bool = False,
    lora: Path | None = None,
) -> None:
    """Check the checkpoint in `path` and the adapter `lora` before anything is allocated for them.

    formats: the result of `read_formats`; dtype: of the other parameters. rank, world and prompt_rows are as
    in `shard_layout`. allow_extra: log unused tensors instead of refusing them. Raises ValueError as
    `load_weights` does, and for weights that take more than `free_bytes`.
    """
    weights = read_merged(config, Path(path), lora)
    whole, extra = checked_layout(config, path, weights, formats, with_mtp, allow_extra)
    if extra:
        logger.warning("skipped tensors of %s (allow_extra_tensors): %s", path, first_few(extra))
    part = shard_layout(whole, config, formats, rank, world, prompt_rows=prompt_rows)
    needed = count_parameters(part, formats, dtype)
    read = {name: weights[name] for name in whole}
    packed = describe_packed({name: read[name] for name in _multiplied_out(whole, formats)})
    how = f" ({packed}, multiplied out)" if packed else ""
    rule, got = f"hold {_gib(needed)} of weights{how}", f"{_gib(free_bytes)} for {path}"
    check(needed <= free_bytes, "free memory", rule, got, "use a smaller model or more memory")
    check_packed(read.values())
    if lora is not None:
        logger.info("LoRA adapter %s", read_adapter(lora).describe())
    if packed:
        logger.info("multiplied out while they are loaded: %s", packed)


def count_parameters(layout: Layout, formats: Formats, dtype: torch.dtype) -> int:
    """The bytes of the parameters that `layout` fills, without the factors of FP8 weights."""
    count = 0
    for stored in layout.values():
        form = formats.get(stored.shards[0].parameter)
        numbers = sum(shard.size_of(stored.shape) for shard in stored.shards)
        if form is not None and form.is_packed:
            width = numbers // sum(shard.rows for shard in stored.shards)
            count += sum(form.bytes_of(range(p.start, p.start + p.rows), width) for p in stored.shards)
        else:
            count += numbers * (dtype if form is None or form.storage is None else form.storage).itemsize
    return count


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
    prompt_rows: bool = False,
    allow_extra: bool = False,
    is_checked: bool = False,
    lora: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    weights: Mapping[str, StoredWeight] | None = None,
    copied: Callable[[str], None] | None = None,
) -> None:
    """Copy the checkpoint in `path` into `parameters`, which are mutated.

    parameters: allocated, on any device and in their final dtype, with the names of the layout and the
    formats of `formats`; they are the shards of `rank` of `world` ranks, while `config` is the whole model's.
    Only what they hold is read. FP8 weights with a `_scale_inv` are copied with their factors to FP8
    parameters, and multiplied out for others. Quantised weights are packed again for parameters of codes; for
    others they are multiplied out in float32, some rows at a time, and rounded once. Host memory besides the
    parameters: the largest shard of a plain tensor, and its product if it is multiplied out. progress: called
    with the bytes done and the bytes in all. lora: the directory of an adapter to merge, see `read_merged`.
    weights: read already, or given in place of files. copied: called with each stored tensor's full name once
    it is copied. allow_extra: accept unused tensors. is_checked: search the parameters for NaN and infinity.
    Raises ValueError before anything is copied, with the first tensors that are missing, unused, or of
    another shape or dtype, and the first parameters that would not be filled; and afterwards with the first
    tensors that are not finite.
    """
    weights = read_merged(config, Path(path), lora) if weights is None else weights
    whole, _ = checked_layout(config, path, weights, formats, with_mtp, allow_extra)
    layout = with_scales(shard_layout(whole, config, formats, rank, world, prompt_rows=prompt_rows), formats)
    check_parameters(layout, parameters, path, formats)
    num_bytes = {name: _shard_bytes(stored, weights[name]) for name, stored in layout.items()}
    done, total = 0, sum(num_bytes.values())
    checks: list[tuple[StoredWeight, torch.Tensor]] = []
    # In the order of the files, so that a disk reads forwards.
    for name in (n for n in weights if n in layout):
        weight, scale = weights[name], weights.get(name + FP8.scale_suffix)
        device = parameters[layout[name].shards[0].parameter].device
        if device.type == "cuda" and isinstance(weight, PackedWeight) and num_bytes[name] == weight.num_bytes:
            # Its tensors are read at once, and unpacked there.
            weight = weight.held(device)
        for shard in layout[name].shards:
            form = formats.get(shard.parameter, PLAIN)
            checks += [(weight, flags) for flags in _copy(weight, scale, shard, form, parameters)]
        if copied is not None:
            copied(weight.name)
        done += num_bytes[name]
        if progress is not None:
            progress(done, total)
    check_scales(checks)
    if is_checked and (wrong := find_not_finite(parameters)):
        raise _not_finite(wrong, layout, weights, parameters)


def _copy(
    weight: StoredWeight,
    scale: StoredWeight | None,
    shard: WeightShard,
    form: WeightFormat,
    parameters: Mapping[str, torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Copy a shard of a stored weight to its parameter; yield the flags of `fill_scaled_codes`.

    scale: the stored factors of an FP8 weight, else None.
    """
    parameter, region = parameters[shard.parameter], shard.region(weight.shape)
    target = shard.view_of(parameter, weight.shape)
    if form.is_packed:
        scales = parameters[f"{shard.parameter}_scale"]
        if form.parts:
            yield from fill_scaled_codes(weight, shard, form, parameter, scales)
        else:
            fill_four_bits(weight, shard, parameter, scales)
    elif scale is not None and not form.has_factors and isinstance(weight, Header):
        values = _multiply_out(weight, scale, region, parameter.dtype, parameter.device)
        target.copy_(values.reshape(target.shape))
    else:
        _fill(target, weight, region)


def multiplied_out(
    config: ModelConfig, weights: Mapping[str, StoredWeight], formats: Formats
) -> list[StoredWeight]:
    """The quantised weights among `weights` that the loader multiplies out."""
    layout = FAMILIES[config.family].layout(config, weights, formats)

    def is_changed(name: str) -> bool:
        forms = (formats.get(shard.parameter, PLAIN) for shard in layout[name].shards)
        is_fp8 = weights[name].dtype == FP8.header_dtype
        return is_packed(weights[name]) or (is_fp8 and not all(form.has_factors for form in forms))

    names = [name for name in _multiplied_out(layout, formats) if name in weights]
    return [weights[name] for name in names if is_changed(name)]


def _multiplied_out(layout: Layout, formats: Formats) -> Iterator[str]:
    """The names of the stored tensors that fill any parameter without packed codes."""
    for name, stored in layout.items():
        if not all(formats.get(shard.parameter, PLAIN).is_packed for shard in stored.shards):
            yield name


def _fill(target: torch.Tensor, weight: StoredWeight, region: Region) -> None:
    """Write a region of a weight into `target`, some rows at a time: a copy of all of it may not fit into
    memory."""
    rows, *rest = region
    at_once = _GPU_VALUES_AT_ONCE if target.is_cuda else _VALUES_AT_ONCE
    step = max(1, at_once // math.prod(part.stop - part.start for part in rest))
    for first in range(rows.start, rows.stop, step):
        some = slice(first, min(first + step, rows.stop))
        values = weight.read((some, *rest), target.device)
        own = target[some.start - rows.start : some.stop - rows.start]
        own.copy_(values.reshape(own.shape))


def _not_finite(
    wrong: Collection[str],
    layout: Mapping[str, Stored],
    weights: Mapping[str, StoredWeight],
    parameters: Mapping[str, torch.Tensor],
) -> ValueError:
    """The error that names the stored tensors from which the parameters `wrong` have NaN or infinity."""
    names = []
    for name, weight in weights.items():
        shards = layout[name].shards if name in layout else ()
        parts = (p.view_of(parameters[p.parameter], weight.shape) for p in shards if p.parameter in wrong)
        if find_not_finite(dict(enumerate(parts))):
            # In a weight that was multiplied out, the factors may be the cause.
            factors = weights.get(name + FP8.scale_suffix)
            named = weight if factors is None or _is_finite(factors) else factors
            names.append(f"{named.name} ({named.file.name})")
    return ValueError(
        f"weights must be finite, got NaN or infinity in {first_few(names)}; check the checkpoint's files, "
        "or whether its numbers fit dtype"
    )


def _is_finite(weight: StoredWeight) -> bool:
    """Whether all values of a stored tensor are finite, as stored."""
    return not find_not_finite({weight.name: weight.read(tuple(slice(0, size) for size in weight.shape))})


def _multiply_out(
    weight: StoredWeight, scale: StoredWeight, region: Region, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The values of a region of an FP8 matrix with a factor per block; reads whole blocks."""
    block = FP8.block
    blocks = tuple(slice(part.start // block, -(-part.stop // block)) for part in region)
    ends = zip(blocks, weight.shape, strict=True)
    whole = tuple(slice(part.start * block, min(part.stop * block, size)) for part, size in ends)
    within = tuple(slice(r.start - w.start, r.stop - w.start) for r, w in zip(region, whole, strict=True))
    return FP8.dequantize(weight.read(whole, device), scale.read(blocks, device), dtype)[within]


def _shard_bytes(stored: Stored, weight: StoredWeight) -> int:
    """Bytes in the files of the shards of a stored tensor."""
    numbers = sum(shard.size_of(weight.shape) for shard in stored.shards)
    return weight.num_bytes * numbers // max(math.prod(weight.shape), 1)


def _gib(count: int) -> str:
    return f"{shown(f'{count / 2**30:.1f}')} GiB"
