"""Scaled codes that a GPU's products read: which parameters keep them, and how they are filled.

GGUF files and FP4 checkpoints store such weights. A parameter may merge rows of several stored tensors at any
block of 16 rows; where their kinds differ, it has several parts, and a product is one launch per part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from compiled_mtp.errors import check
from compiled_mtp.gguf.tensors import StoredTensor
from compiled_mtp.models.formats.fp4 import MXFP4, NVFP4
from compiled_mtp.models.layout import Layout, WeightShard
from compiled_mtp.models.stored import EMBEDDING, HEAD
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import (
    PLAIN,
    CodedRows,
    Formats,
    WeightFormat,
    coded_part,
    scaled_codes,
)
from compiled_mtp.ops import blocks

# Codes that are packed at a time; each takes a few integers.
_CODES_AT_ONCE = 1 << 25
# What holds the codes of both kinds exactly: a code of four bits is one of five.
_WIDENED = {("Q4_K", "Q5_K"): "Q5_K", ("Q5_K", "Q4_K"): "Q5_K"}


def kind_of(weight: StoredWeight | None) -> str | None:
    """The kind of scaled codes in which products can read a stored weight, by its name; None for none."""
    if not isinstance(weight, (StoredTensor, NVFP4, MXFP4)) or weight.shape[0] % blocks.ROWS:
        return None
    return weight.kind


def has_scaled_codes(weights: Mapping[str, StoredWeight]) -> bool:
    """Whether products can read any of a checkpoint's weights as scaled codes."""
    return any(kind_of(weight) is not None for weight in weights.values())


def scaled_code_formats(layout: Layout, weights: Mapping[str, StoredWeight], device: torch.device) -> Formats:
    """The formats of the parameters that stay scaled codes on `device`.

    These are weights of products, embeddings and heads all of whose stored tensors have such codes. A mixture
    keeps both stacks or neither, if all experts have the same kinds; its shared expert is then apart, and
    plain. `layout` must be made for `codes_apart`.
    """
    return _formats_of(layout, lambda name: kind_of(weights.get(name)), device)


def _expert_formats(
    layout: Layout, kind_of: Callable[[str], str | None], device: torch.device
) -> dict[str, WeightFormat]:
    """The formats of mixtures' stacks that stay packed, and of the shared experts, which are then apart."""
    kinds: dict[str, set[str | None]] = {}
    rows: dict[str, int] = {}
    for name, stored in layout.items():
        for shard in stored.shards:
            if shard.expert is not None:
                is_whole = shard.start % blocks.ROWS == shard.rows % blocks.ROWS == 0
                kind = kind_of(name) if is_whole else None
                kinds.setdefault(shard.parameter, set()).add(kind)
                rows[shard.parameter] = max(rows.get(shard.parameter, 0), shard.start + shard.rows)
    formats: dict[str, WeightFormat] = {}
    for gate_up in [name for name in kinds if name.endswith(".gate_up")]:
        prefix = gate_up.removesuffix("gate_up")
        stacks = {name: kinds[name] for name in (gate_up, f"{prefix}down")}
        if any(len(found) > 1 or None in found for found in stacks.values()):
            continue
        kept = {name: scaled_codes([CodedRows(rows[name], str(*found))]) for name, found in stacks.items()}
        if all(form.is_read_on(device) for form in kept.values()):
            formats |= kept
            formats |= dict.fromkeys((f"{prefix}shared_gate_up", f"{prefix}shared_down"), PLAIN)
    return formats


def made_up_coded_formats(layout: Layout, kind: str, num_layers: int, device: torch.device) -> Formats:
    """The formats of a model in scaled codes that is filled without a checkpoint; `layout` as above.

    kind: one of ops.blocks.KINDS, or Q4_K_M, whose types llama.cpp chooses by tensor and layer.
    """
    if kind == "Q4_K_M":
        return _formats_of(layout, lambda name: _kind_in_q4_k_m(name, num_layers), device)
    return _formats_of(layout, lambda name: kind, device)


def _kind_in_q4_k_m(name: str, num_layers: int) -> str:
    """The type of a stored tensor in a file of Q4_K_M."""
    if name in (EMBEDDING, HEAD):
        return "Q6_K"
    if "in_proj_qkv" in name:
        return "Q5_K"
    if "v_proj" in name or "down_proj" in name:
        layer = 0 if name.startswith("mtp.") else int(name.split(".")[1])
        eighth = num_layers // 8
        if layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def _formats_of(layout: Layout, kind_of: Callable[[str], str | None], device: torch.device) -> Formats:
    kinds: dict[str, dict[int, tuple[int, str | None]]] = {}
    for name, stored in layout.items():
        kind = kind_of(name)
        for shard in stored.shards:
            is_whole = shard.start % blocks.ROWS == shard.rows % blocks.ROWS == 0 and shard.expert is None
            kinds.setdefault(shard.parameter, {})[shard.start] = (shard.rows, kind if is_whole else None)
    found: dict[str, WeightFormat] = {}
    for parameter, rows_of in kinds.items():
        parts: list[CodedRows] = []
        for _, (rows, kind) in sorted(rows_of.items()):
            if kind is None:
                parts = []
                break
            last = parts[-1] if parts else None
            joined = None
            if last is not None:
                joined = kind if last.name == kind else _WIDENED.get((last.name, kind))
            if last is not None and joined is not None:
                parts[-1] = CodedRows(last.rows + rows, joined)
            else:
                parts.append(CodedRows(rows, kind))
        if not parts:
            continue
        form = scaled_codes(parts)
        if form.parameters.search(parameter) and form.is_read_on(device):
            found[parameter] = form
    return found | _expert_formats(layout, kind_of, device)


def fill_scaled_codes(
    weight: StoredWeight, shard: WeightShard, form: WeightFormat, words: torch.Tensor, scales: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Write `shard` of a stored weight into a parameter of scaled codes, some rows at a time.

    Mutates words and scales. Yields for `check_scales`, on their device, whether the scales of each step are
    finite, and whether a product can read them.
    """
    assert isinstance(weight, (StoredTensor, NVFP4, MXFP4))
    if shard.expert is not None:
        words, scales = words[shard.expert], scales[shard.expert]
    rows, columns = shard.region(weight.shape)
    first, part = form.part_at(shard.start)
    own_words, own_scales = coded_part(form, words, scales, first, columns.stop - columns.start)
    kind = part.kind
    step = max(1, _CODES_AT_ONCE // (columns.stop - columns.start) // blocks.ROWS) * blocks.ROWS
    for begin in range(rows.start, rows.stop, step):
        some = slice(begin, min(begin + step, rows.stop))
        codes, fields, factor = weight.units(some, columns, words.device)
        yield _test_scales(codes, fields, kind)
        start = shard.start - first + some.start - rows.start
        to = slice(start, start + some.stop - some.start)
        own_words[to] = blocks.pack(codes, kind)
        own_scales[:, to] = blocks.pack_scales(fields, kind, factor)


def _test_scales(codes: torch.Tensor, fields: torch.Tensor, kind: blocks.Kind) -> torch.Tensor:
    """Two flags [2]: whether all scales are finite, and whether none is too small for a product."""
    scales = [one for one in kind.scales(fields) if one is not None]
    is_finite = torch.stack([one.isfinite().all() for one in scales]).all()
    is_large = torch.ones_like(is_finite)
    if kind.name == "MXFP4":
        # 2^-127 would be taken for zero.
        is_zero = (codes & 7).unflatten(1, (-1, kind.group)).amax(-1) == 0
        is_large = ((scales[0].flatten(1) > 0) | is_zero).all()
    return torch.stack((is_finite, is_large))


def check_scales(checks: Sequence[tuple[StoredWeight, torch.Tensor]]) -> None:
    """Raise ValueError for the first of the weights whose flags, of `fill_scaled_codes`, are not all set.

    A GPU's flags are read together, after the last weight: reading one waits for all that the GPU has to do.
    """
    if not checks:
        return
    rules = {"have finite scales": "NaN or infinity", "have scales above 2^-127": "a smaller one"}
    for (weight, _), flags in zip(checks, torch.stack([flags for _, flags in checks]).tolist(), strict=True):
        for ok, (rule, got) in zip(flags, rules.items(), strict=True):
            check(ok, weight.name, rule, got, f"check {weight.file.name}, or download it again")
