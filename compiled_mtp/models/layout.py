"""Which tensors a checkpoint stores, and which rows and columns of which parameters they fill.

`checkpoint_layout` is the whole mapping, as data. `kept_columns` names the parameters that can keep the
format of their stored tensors: every row is stored in it and every shard begins at a block of rows, so that
factors merge by rows of blocks. All others are multiplied out. In a released FP8 model every
projection and every expert keeps its format. These releases store b and a of the GDN input projection in
bfloat16, so q|k|v|z becomes an FP8 weight and b|a a separate weight. With mtp.fc, norms and convolutions,
0.6 % of the bytes of a 27B's layers are bfloat16. Embedding and head are bfloat16 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.weight_format import NO_FORMATS, Formats, WeightFormat


@dataclass(frozen=True, slots=True)
class WeightShard:
    """`rows` rows of a stored tensor, from row `source` on, which fill `parameter` from row `start` on.

    In a stack of experts [E, N, K] these are rows of each expert: a stored matrix fills the expert `expert`,
    a stored stack the experts from `expert` on. expert is None for a parameter that is no stack. columns: the
    stored columns that fill the parameter's, the first and one past the last; None for all.
    """

    parameter: str
    start: int
    rows: int
    source: int = 0
    expert: int | None = None
    columns: tuple[int, int] | None = None

    def region(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The ranges of the shard in a stored tensor of that shape."""
        whole = [slice(0, size) for size in shape]
        whole[int(self.expert is not None and len(shape) == 3)] = slice(self.source, self.source + self.rows)
        if self.columns is not None:
            whole[-1] = slice(*self.columns)
        return tuple(whole)

    def size_of(self, shape: Sequence[int]) -> int:
        """The number of the shard's values in a stored tensor of that shape."""
        return math.prod(part.stop - part.start for part in self.region(shape))

    def view_of(self, parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The view of `parameter` that the shard of a stored tensor of that shape fills."""
        rows = slice(self.start, self.start + self.rows)
        if self.expert is None:
            return parameter[rows]
        if len(shape) == 3:
            return parameter[self.expert : self.expert + shape[0], rows]
        return parameter[self.expert, rows]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: the shape that it must have, and the shards that its rows fill."""

    shape: tuple[int, ...]
    shards: tuple[WeightShard, ...]

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of experts [E, N, K]."""
        return len(self.shape) == 3 and self.shards[0].expert is not None


Layout = Mapping[str, Stored]
"""Every tensor that a checkpoint stores, by name without the trunk's prefix."""


def checkpoint_layout(
    config: ModelConfig,
    names: Collection[str],
    formats: Formats = NO_FORMATS,
    *,
    is_interleaved: bool = False,
) -> dict[str, Stored]:
    """Every tensor that a checkpoint of `config` stores, except weights' factors (see `with_scales`).

    names: those that it does store, without prefix. They decide whether the experts of the trunk, and those
    of the MTP layer, are stacked in one tensor or stored in one tensor each. Names of the MTP head begin with
    'mtp.'. formats: those of the parameters; a GDN layer's b|a fill ba_proj if in_proj is not plain,
    and a mixture's shared expert fills shared_gate_up and shared_down if they are listed.
    is_interleaved: the GDN input projections store q, k, v and z key head by key head. Source: the names in
    the released checkpoints.
    """
    h, vocab = config.hidden_size, config.vocab_size
    layout = {
        "embed_tokens.weight": _whole("embed.weight", vocab, h),
        "norm.weight": _whole("norm.weight", h),
    }
    if not config.tie_word_embeddings:
        layout["lm_head.weight"] = _whole("lm_head.weight", vocab, h)
    gdn = _gdn_interleaved if is_interleaved else _gdn_separate
    is_stacked = any(n.startswith("layers.") and n.endswith(".experts.gate_up_proj") for n in names)
    for i, is_attention in enumerate(config.is_full_attention):
        prefix = f"layers.{i}."
        mixer = _attention(config, prefix, prefix) if is_attention else _gdn(config, prefix, formats, gdn)
        layout |= mixer | _norms_and_ffn(config, prefix, prefix, is_stacked, formats)
    if config.mtp_num_layers:
        is_stacked = any(n.startswith("mtp.") and n.endswith(".experts.gate_up_proj") for n in names)
        layout["mtp.fc.weight"] = _whole("mtp.fc.weight", h, 2 * h)
        layout["mtp.pre_fc_norm_embedding.weight"] = _whole("mtp.norm_embedding.weight", h)
        layout["mtp.pre_fc_norm_hidden.weight"] = _whole("mtp.norm_hidden.weight", h)
        layout["mtp.norm.weight"] = _whole("mtp.norm.weight", h)
        layout |= _attention(config, "mtp.layers.0.", "mtp.layer.")
        layout |= _norms_and_ffn(config, "mtp.layers.0.", "mtp.layer.", is_stacked, formats)
    return layout


def kept_columns(layout: Layout, form: WeightFormat, is_stored: Callable[[str], bool]) -> dict[str, int]:
    """The parameters that can keep `form`, each with its number of columns.

    `layout` must be made for formats in which every in_proj keeps `form`. is_stored(name) says whether the
    checkpoint stores that tensor in `form` with its factors. A mixture's gate|up and down keep it both or
    neither, because one operator reads both.
    """
    is_kept: dict[str, bool] = {}
    columns: dict[str, int] = {}
    for name, stored in layout.items():
        fits = len(stored.shape) == 2 and is_stored(name)
        for shard in stored.shards:
            # If every shard begins at a block, every shard except the last also ends at one.
            fits = fits and shard.start % form.block == 0 and shard.source % form.block == 0
        for parameter in {shard.parameter for shard in stored.shards}:
            able = form.parameters.search(parameter) is not None
            is_kept[parameter] = is_kept.get(parameter, able) and fits
            columns[parameter] = stored.shape[-1]
    for down in [name for name in is_kept if name.endswith(".ffn.down")]:
        gate_up = down.removesuffix("down") + "gate_up"
        is_kept[down] = is_kept[gate_up] = is_kept[down] and is_kept[gate_up]
    return {parameter: columns[parameter] for parameter, kept in is_kept.items() if kept}


def with_scales(layout: Layout, formats: Formats) -> dict[str, Stored]:
    """`layout` with the factors of weights that keep their format: a tensor that fills X has factors that
    fill X_scale."""
    whole = dict(layout)
    for name, stored in layout.items():
        form = formats.get(stored.shards[0].parameter)
        # The scales of packed codes are filled together with the codes.
        if form is not None and form.has_factors and not form.is_packed:
            shards = tuple(_scale_shard(shard, form.block) for shard in stored.shards)
            whole[name + form.scale_suffix] = Stored(form.scale_shape(stored.shape), shards)
    return whole


def _scale_shard(shard: WeightShard, block: int) -> WeightShard:
    columns = None
    if shard.columns is not None:
        columns = (shard.columns[0] // block, -(-shard.columns[1] // block))
    return replace(
        shard,
        parameter=f"{shard.parameter}_scale",
        start=shard.start // block,
        rows=-(-shard.rows // block),
        source=shard.source // block,
        columns=columns,
    )


def _whole(parameter: str, *shape: int) -> Stored:
    return Stored(shape, (WeightShard(parameter, 0, shape[0]),))


def _part(parameter: str, start: int, *shape: int, expert: int | None = None) -> Stored:
    return Stored(shape, (WeightShard(parameter, start, shape[0], expert=expert),))


def _norms_and_ffn(
    c: ModelConfig, src: str, dst: str, is_stacked: bool, formats: Formats
) -> dict[str, Stored]:
    norms = {
        f"{src}input_layernorm.weight": _whole(f"{dst}input_norm.weight", c.hidden_size),
        f"{src}post_attention_layernorm.weight": _whole(f"{dst}post_norm.weight", c.hidden_size),
    }
    h, ffn = c.hidden_size, f"{dst}ffn."
    if not c.is_moe:
        names = (f"{ffn}gate_up.weight", f"{ffn}down.weight")
        return norms | _gated(f"{src}mlp.", *names, c.intermediate_size, h)
    layout = norms | _moe(c, src, dst, is_stacked)
    if f"{ffn}shared_gate_up" in formats:
        # The shared expert in parameters of its own.
        names = (f"{ffn}shared_gate_up", f"{ffn}shared_down")
        layout |= _gated(f"{src}mlp.shared_expert.", *names, c.moe_intermediate_size, h)
    return layout


def _attention(c: ModelConfig, src: str, dst: str) -> dict[str, Stored]:
    src, dst, h, hd = f"{src}self_attn.", f"{dst}mixer.", c.hidden_size, c.head_dim
    q, kv = 2 * c.num_q_heads * hd, c.num_kv_heads * hd
    return {
        f"{src}q_proj.weight": _part(f"{dst}qkv.weight", 0, q, h),
        f"{src}k_proj.weight": _part(f"{dst}qkv.weight", q, kv, h),
        f"{src}v_proj.weight": _part(f"{dst}qkv.weight", q + kv, kv, h),
        f"{src}q_norm.weight": _whole(f"{dst}q_norm", hd),
        f"{src}k_norm.weight": _whole(f"{dst}k_norm", hd),
        f"{src}o_proj.weight": _whole(f"{dst}o_proj.weight", h, c.num_q_heads * hd),
    }


_GDNInputs = Callable[[ModelConfig, str, str, str, int], dict[str, Stored]]
"""Makes the layout of a GDN layer's input projections from config, source prefix, the names of in_proj and of
the weight with b|a, and the row at which b begins in the latter."""


def _gdn(c: ModelConfig, prefix: str, formats: Formats, inputs: _GDNInputs) -> dict[str, Stored]:
    src, dst, h = f"{prefix}linear_attn.", f"{prefix}mixer.", c.hidden_size
    nv, v_dim, conv = c.linear_num_value_heads, c.linear_value_dim, c.linear_conv_dim
    in_proj = f"{dst}in_proj.weight"
    gates, first = (f"{dst}ba_proj.weight", 0) if in_proj in formats else (in_proj, conv + v_dim)
    return inputs(c, src, in_proj, gates, first) | {
        f"{src}conv1d.weight": _whole(f"{dst}conv_weight", conv, 1, c.conv_kernel),
        f"{src}A_log": _whole(f"{dst}a_log", nv),
        f"{src}dt_bias": _whole(f"{dst}dt_bias", nv),
        f"{src}norm.weight": _whole(f"{dst}norm_weight", c.linear_value_head_dim),
        f"{src}out_proj.weight": _whole(f"{dst}out_proj.weight", h, v_dim),
    }


def _gdn_separate(c: ModelConfig, src: str, in_proj: str, gates: str, first: int) -> dict[str, Stored]:
    """Qwen3.5 stores q|k|v, z, b and a in one tensor each."""
    nv, v_dim, conv, h = c.linear_num_value_heads, c.linear_value_dim, c.linear_conv_dim, c.hidden_size
    return {
        f"{src}in_proj_qkv.weight": _part(in_proj, 0, conv, h),
        f"{src}in_proj_z.weight": _part(in_proj, conv, v_dim, h),
        f"{src}in_proj_b.weight": _part(gates, first, nv, h),
        f"{src}in_proj_a.weight": _part(gates, first + nv, nv, h),
    }


def _gdn_interleaved(c: ModelConfig, src: str, in_proj: str, gates: str, first: int) -> dict[str, Stored]:
    """Qwen3-Next stores q|k|v|z in one tensor and b|a in another, both key head by key head."""
    qkvz = (c.linear_conv_dim + c.linear_value_dim, c.hidden_size)
    ba = (2 * c.linear_num_value_heads, c.hidden_size)
    return {
        f"{src}in_proj_qkvz.weight": Stored(qkvz, tuple(_split_qkvz(c, in_proj))),
        f"{src}in_proj_ba.weight": Stored(ba, tuple(_split_ba(c, gates, first))),
    }


def _split_qkvz(c: ModelConfig, parameter: str) -> Iterator[WeightShard]:
    """The shards that reorder q|k|v|z, stored key head by key head, to all q, then all k, all v, all z."""
    per_key = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
    parts = (
        (0, c.linear_key_head_dim),
        (c.linear_key_dim, c.linear_key_head_dim),
        (2 * c.linear_key_dim, per_key),
        (c.linear_conv_dim, per_key),
    )
    source = 0
    for head in range(c.linear_num_key_heads):
        for start, rows in parts:
            yield WeightShard(parameter, start + head * rows, rows, source)
            source += rows


def _split_ba(c: ModelConfig, parameter: str, start: int) -> Iterator[WeightShard]:
    """The shards that reorder b|a, stored key head by key head, to all b, then all a."""
    per_key = c.linear_num_value_heads // c.linear_num_key_heads
    for head in range(c.linear_num_key_heads):
        for part in range(2):
            row = start + part * c.linear_num_value_heads + head * per_key
            yield WeightShard(parameter, row, per_key, (2 * head + part) * per_key)


def _gated(
    src: str, gate_up: str, down: str, inner: int, hidden: int, expert: int | None = None
) -> dict[str, Stored]:
    """One FFN, or one expert of stacks: gate and up in one parameter, down in another."""
    return {
        f"{src}gate_proj.weight": _part(gate_up, 0, inner, hidden, expert=expert),
        f"{src}up_proj.weight": _part(gate_up, inner, inner, hidden, expert=expert),
        f"{src}down_proj.weight": _part(down, 0, hidden, inner, expert=expert),
    }


def _moe(c: ModelConfig, src: str, dst: str, is_stacked: bool) -> dict[str, Stored]:
    """Routed experts 0..E-1, the shared expert as expert E, and its gate as row E of the router."""
    h, mi, e = c.hidden_size, c.moe_intermediate_size, c.num_experts
    gate_up, down = f"{dst}ffn.gate_up", f"{dst}ffn.down"
    layout = {
        f"{src}mlp.gate.weight": _part(f"{dst}ffn.router.weight", 0, e, h),
        f"{src}mlp.shared_expert_gate.weight": _part(f"{dst}ffn.router.weight", e, 1, h),
    }
    single = {f"{src}mlp.shared_expert.": e}
    if is_stacked:
        stack = Stored((e, 2 * mi, h), (WeightShard(gate_up, 0, 2 * mi, expert=0),))
        layout[f"{src}mlp.experts.gate_up_proj"] = stack
        layout[f"{src}mlp.experts.down_proj"] = Stored((e, h, mi), (WeightShard(down, 0, h, expert=0),))
    else:
        single |= {f"{src}mlp.experts.{expert}.": expert for expert in range(e)}
    for name, expert in single.items():
        layout |= _gated(name, gate_up, down, mi, h, expert)
    return layout
