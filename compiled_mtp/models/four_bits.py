"""Four-bit weights that a GPU's products read as codes: which parameters keep codes, and how they are filled.

Every row of a weight has its own scales, so a parameter may merge rows of several stored tensors at any block
of 16 rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.formats.integers import IntegerWeight
from compiled_mtp.models.layout import Layout, WeightShard
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import EXPERTS, PLAIN, Formats, WeightFormat, four_bits
from compiled_mtp.ops import int4

_SCALES = (torch.float16, torch.bfloat16)
# Codes that are unpacked at a time; each takes a few integers.
_CODES_AT_ONCE = 1 << 25


def has_codes(weights: Mapping[str, StoredWeight]) -> bool:
    """Whether any of a checkpoint's weights has four-bit integer codes."""
    return any(isinstance(weight, IntegerWeight) and weight.bits == 4 for weight in weights.values())


def four_bit_formats(layout: Layout, weights: Mapping[str, StoredWeight], device: torch.device) -> Formats:
    """The formats of the parameters that stay four-bit codes on `device`.

    These are the weights of products all of whose stored tensors have such codes, in groups of one size. A
    mixture keeps both stacks or neither; if its shared expert is stored otherwise, it is listed as plain.
    `layout` must be made for `codes_apart`.
    """
    found: dict[str, WeightFormat | None] = {}
    for name, stored in layout.items():
        form = _format_of(weights.get(name))
        for parameter in {shard.parameter for shard in stored.shards}:
            is_able = form is not None and form.parameters.search(parameter) is not None
            is_able = is_able and all(_is_in_blocks(shard) for shard in stored.shards)
            own = form if is_able and found.get(parameter, form) is form else None
            found[parameter] = own
    experts = {name: found.pop(name) for name in [*found] if EXPERTS.search(name)}
    kept = {name: form for name, form in found.items() if form is not None and form.is_read_on(device)}
    return kept | _expert_formats(experts, device)


def _expert_formats(
    found: Mapping[str, WeightFormat | None], device: torch.device
) -> dict[str, WeightFormat]:
    """The formats of mixtures' stacks, of which `found` has those that the stored tensors allow."""
    formats: dict[str, WeightFormat] = {}
    for name in [name for name in found if name.endswith(".ffn.gate_up")]:
        prefix = name.removesuffix("gate_up")
        stacks, shared = (
            {f"{prefix}{part}{end}": found[f"{prefix}{part}{end}"] for end in ("gate_up", "down")}
            for part in ("", "shared_")
        )
        kept = {stack: form for stack, form in stacks.items() if form is not None and form.is_read_on(device)}
        if len(kept) == len(stacks):
            formats |= kept
            if [*shared.values()] != [*kept.values()]:
                formats |= dict.fromkeys(shared, PLAIN)
    return formats


def codes_apart(config: ModelConfig) -> Formats:
    """Formats for a layout in which in_proj is q|k|v|z alone, and no stack holds a shared expert."""
    gdn_layers = [i for i, full in enumerate(config.is_full_attention) if not full]
    layers = [f"layers.{i}" for i in range(config.num_layers)] + ["mtp.layer"]
    apart = [f"layers.{i}.mixer.in_proj.weight" for i in gdn_layers]
    apart += [f"{layer}.ffn.shared_gate_up" for layer in layers if config.is_moe]
    return dict.fromkeys(apart, PLAIN)


def made_up_formats(layout: Layout, group: int, device: torch.device) -> Formats:
    """The formats of a model with four-bit weights that is filled without a checkpoint; its head is plain, as
    in the releases."""
    form = four_bits(group, torch.bfloat16)
    parameters = {shard.parameter for stored in layout.values() for shard in stored.shards}
    parameters.discard("lm_head.weight")
    return {name: form for name in parameters if form.parameters.search(name) and form.is_read_on(device)}


def _is_in_blocks(shard: WeightShard) -> bool:
    """Whether the shard's rows fill whole blocks of rows of a parameter."""
    return shard.start % int4.ROWS == shard.rows % int4.ROWS == 0


def _format_of(weight: StoredWeight | None) -> WeightFormat | None:
    """The format that keeps a stored linear's codes; None if no product reads them."""
    if not isinstance(weight, IntegerWeight) or weight.bits != 4 or weight.scale_dtype not in _SCALES:
        return None
    if not weight.is_in_order:
        return None
    rows, columns = weight.shape
    group = min(weight.group, int4.UNIT)
    if rows % int4.ROWS or columns % int4.UNIT or group not in int4.GROUPS or weight.group % group:
        return None
    return four_bits(group, weight.scale_dtype)


def fill_four_bits(
    weight: StoredWeight, shard: WeightShard, words: torch.Tensor, groups: torch.Tensor
) -> None:
    """Write `shard` of a stored linear into the parameter `words` [N, K / 4] and its `groups`
    [K / group, N, 2], or into those of its expert in stacks, some rows at a time. Mutates both."""
    assert isinstance(weight, IntegerWeight)
    if shard.expert is not None:
        words, groups = words[shard.expert], groups[shard.expert]
    rows, columns = shard.region(weight.shape)
    group = words.shape[1] * 4 // groups.shape[0]
    # A stored group wider than a product's step has its scale repeated.
    first = torch.arange(columns.start, columns.stop, group, device=words.device)
    of_stored = first // weight.group - columns.start // weight.group
    step = max(1, _CODES_AT_ONCE // (columns.stop - columns.start) // int4.ROWS) * int4.ROWS
    for begin in range(rows.start, rows.stop, step):
        some = slice(begin, min(begin + step, rows.stop))
        codes, zeros, scales = weight.codes(some, columns, words.device)
        if isinstance(zeros, int):
            zeros = torch.full_like(scales, zeros, dtype=torch.int32)
        to = slice(shard.start + some.start - rows.start, shard.start + some.stop - rows.start)
        words[to] = int4.pack(codes.to(torch.uint8))
        groups[:, to] = int4.pack_groups(scales[:, of_stored].contiguous(), zeros[:, of_stored])
