"""Which tensors a checkpoint stores, and which rows of which parameters they fill; what stays in FP8.

`checkpoint_layout` is the whole mapping, as data. `fp8_parameters` says which parameters keep the stored FP8
values: those whose every row is FP8 in the checkpoint and whose parts begin at a block of 128 rows, so that
scales merge by rows of blocks. All others are multiplied out; nothing is ever quantised here. In a released
FP8 model every projection and every expert is kept. b and a of the GDN input projection are bfloat16 there,
so q|k|v|z becomes an FP8 weight and b|a a weight of its own; with mtp.fc, norms and convolutions that leaves
0.6 % of the bytes of the layers of a 27B in bfloat16. Embedding and head are bfloat16 too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.ops.fp8 import FP8_BLOCK, scale_shape

SCALE_SUFFIX = "_scale_inv"
# Parameters whose modules take FP8, by the end of their names.
_FP8_ABLE = re.compile(r"\.(mixer\.(qkv|o_proj|in_proj|out_proj)\.weight|ffn\.(gate_up|down)(\.weight)?)$")


@dataclass(frozen=True)
class Piece:
    """`rows` rows of a stored tensor, from `source`, that fill a parameter or an expert of it at `start`."""

    parameter: str
    start: int
    rows: int
    source: int = 0
    expert: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: the shape it must have and where its rows go."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def checkpoint_layout(
    config: ModelConfig, names: Collection[str], fp8: Collection[str] = ()
) -> dict[str, Stored]:
    """Every tensor that a checkpoint of `config` stores, by its name without the trunk's prefix.

    `names` are the names it does store (without prefix): they decide whether the experts of the trunk, and
    those of the MTP layer, lie stacked in one tensor or in a tensor each. Names of the MTP head begin 'mtp.'.
    `fp8` are the parameters kept in FP8: the scales of what fills X are listed and fill X_scale, and a GDN
    layer's b|a fill ba_proj where in_proj is one of them. Other scales are not listed: they follow from their
    weights. Source: the names in the released checkpoints.
    """
    h, vocab = config.hidden_size, config.vocab_size
    layout = {
        "embed_tokens.weight": _whole("embed.weight", vocab, h),
        "norm.weight": _whole("norm.weight", h),
    }
    if not config.tie_word_embeddings:
        layout["lm_head.weight"] = _whole("lm_head.weight", vocab, h)
    trunk_stacked = any(n.startswith("layers.") and n.endswith(".experts.gate_up_proj") for n in names)
    for i, is_attention in enumerate(config.is_full_attention):
        prefix = f"layers.{i}."
        layout |= _layer(config, prefix, prefix, is_attention, trunk_stacked, fp8)
    if config.mtp_num_layers:
        mtp_stacked = any(n.startswith("mtp.") and n.endswith(".experts.gate_up_proj") for n in names)
        layout["mtp.fc.weight"] = _whole("mtp.fc.weight", h, 2 * h)
        layout["mtp.pre_fc_norm_embedding.weight"] = _whole("mtp.norm_embedding.weight", h)
        layout["mtp.pre_fc_norm_hidden.weight"] = _whole("mtp.norm_hidden.weight", h)
        layout["mtp.norm.weight"] = _whole("mtp.norm.weight", h)
        layout |= _layer(config, "mtp.layers.0.", "mtp.layer.", True, mtp_stacked, fp8)
    kept = {name: stored for name, stored in layout.items() if stored.pieces[0].parameter in fp8}
    return layout | {name + SCALE_SUFFIX: _scales_of(stored) for name, stored in kept.items()}


def fp8_parameters(
    config: ModelConfig, names: Collection[str], is_fp8: Callable[[str], bool]
) -> frozenset[str]:
    """The parameters to allocate in FP8, by the names that `checkpoint_layout` gives them.

    `names` as there. `is_fp8(name)` says whether the checkpoint stores a tensor in FP8 with its scales. A
    mixture's gate|up and down are kept both or neither, as their operator wants them.
    """
    gdn_layers = [i for i, full in enumerate(config.is_full_attention) if not full]
    layout = checkpoint_layout(config, names, [f"layers.{i}.mixer.in_proj.weight" for i in gdn_layers])
    is_kept: dict[str, bool] = {}
    for name, stored in layout.items():
        fits = len(stored.shape) == 2 and is_fp8(name)
        for piece in stored.pieces:
            # As every part begins at a block, every part but the last ends at one.
            fits = fits and piece.start % FP8_BLOCK == 0 and piece.source % FP8_BLOCK == 0
        for parameter in {piece.parameter for piece in stored.pieces}:
            able = _FP8_ABLE.search(parameter) is not None
            is_kept[parameter] = is_kept.get(parameter, able) and fits
    for down in [name for name in is_kept if name.endswith(".ffn.down")]:
        gate_up = down.removesuffix("down") + "gate_up"
        is_kept[down] = is_kept[gate_up] = is_kept[down] and is_kept[gate_up]
    return frozenset(parameter for parameter, kept in is_kept.items() if kept)


def _scales_of(stored: Stored) -> Stored:
    """The scales of an FP8 tensor that fills an FP8 parameter: a row of them for each block of rows."""
    pieces = (
        Piece(
            f"{p.parameter}_scale",
            p.start // FP8_BLOCK,
            -(-p.rows // FP8_BLOCK),
            p.source // FP8_BLOCK,
            p.expert,
        )
        for p in stored.pieces
    )
    return Stored(scale_shape(stored.shape), tuple(pieces))


def _whole(parameter: str, *shape: int) -> Stored:
    return Stored(shape, (Piece(parameter, 0, shape[0]),))


def _part(parameter: str, start: int, *shape: int, expert: int | None = None) -> Stored:
    return Stored(shape, (Piece(parameter, start, shape[0], expert=expert),))


def _layer(
    c: ModelConfig, src: str, dst: str, is_attention: bool, stacked: bool, fp8: Collection[str]
) -> dict[str, Stored]:
    layout = {
        f"{src}input_layernorm.weight": _whole(f"{dst}input_norm.weight", c.hidden_size),
        f"{src}post_attention_layernorm.weight": _whole(f"{dst}post_norm.weight", c.hidden_size),
    }
    layout |= _attention(c, src, dst) if is_attention else _gdn(c, src, dst, fp8)
    return layout | (_moe(c, src, dst, stacked) if c.is_moe else _dense(c, src, dst))


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


def _gdn(c: ModelConfig, src: str, dst: str, fp8: Collection[str]) -> dict[str, Stored]:
    src, dst, h = f"{src}linear_attn.", f"{dst}mixer.", c.hidden_size
    nv, v_dim, conv = c.linear_num_value_heads, c.linear_value_dim, c.linear_conv_dim
    in_proj = f"{dst}in_proj.weight"
    gates, first = (f"{dst}ba_proj.weight", 0) if in_proj in fp8 else (in_proj, conv + v_dim)
    layout = {
        f"{src}conv1d.weight": _whole(f"{dst}conv_weight", conv, 1, c.conv_kernel),
        f"{src}A_log": _whole(f"{dst}a_log", nv),
        f"{src}dt_bias": _whole(f"{dst}dt_bias", nv),
        f"{src}norm.weight": _whole(f"{dst}norm_weight", c.linear_value_head_dim),
        f"{src}out_proj.weight": _whole(f"{dst}out_proj.weight", h, v_dim),
    }
    if c.family == "qwen3_next":
        layout[f"{src}in_proj_qkvz.weight"] = Stored((conv + v_dim, h), tuple(_split_qkvz(c, in_proj)))
        layout[f"{src}in_proj_ba.weight"] = Stored((2 * nv, h), tuple(_split_ba(c, gates, first)))
    else:
        layout[f"{src}in_proj_qkv.weight"] = _part(in_proj, 0, conv, h)
        layout[f"{src}in_proj_z.weight"] = _part(in_proj, conv, v_dim, h)
        layout[f"{src}in_proj_b.weight"] = _part(gates, first, nv, h)
        layout[f"{src}in_proj_a.weight"] = _part(gates, first + nv, nv, h)
    return layout


def _split_qkvz(c: ModelConfig, parameter: str) -> Iterator[Piece]:
    """Qwen3-Next stores q|k|v|z of one key head after another; here all q come first, then all k, v and z."""
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
            yield Piece(parameter, start + head * rows, rows, source)
            source += rows


def _split_ba(c: ModelConfig, parameter: str, start: int) -> Iterator[Piece]:
    """The same for the gates: b|a of one key head after another."""
    per_key = c.linear_num_value_heads // c.linear_num_key_heads
    for head in range(c.linear_num_key_heads):
        for part in range(2):
            row = start + part * c.linear_num_value_heads + head * per_key
            yield Piece(parameter, row, per_key, (2 * head + part) * per_key)


def _dense(c: ModelConfig, src: str, dst: str) -> dict[str, Stored]:
    h, i = c.hidden_size, c.intermediate_size
    return {
        f"{src}mlp.gate_proj.weight": _part(f"{dst}ffn.gate_up.weight", 0, i, h),
        f"{src}mlp.up_proj.weight": _part(f"{dst}ffn.gate_up.weight", i, i, h),
        f"{src}mlp.down_proj.weight": _whole(f"{dst}ffn.down.weight", h, i),
    }


def _moe(c: ModelConfig, src: str, dst: str, stacked: bool) -> dict[str, Stored]:
    """Routed experts 0..E-1, the shared expert as number E, and its gate as row E of the router."""
    h, mi, e = c.hidden_size, c.moe_intermediate_size, c.num_experts
    gate_up, down = f"{dst}ffn.gate_up", f"{dst}ffn.down"
    layout = {
        f"{src}mlp.gate.weight": _part(f"{dst}ffn.router.weight", 0, e, h),
        f"{src}mlp.shared_expert_gate.weight": _part(f"{dst}ffn.router.weight", e, 1, h),
    }
    single = {f"{src}mlp.shared_expert.": e}
    if stacked:
        layout[f"{src}mlp.experts.gate_up_proj"] = _part(gate_up, 0, e, 2 * mi, h)
        layout[f"{src}mlp.experts.down_proj"] = _part(down, 0, e, h, mi)
    else:
        single |= {f"{src}mlp.experts.{expert}.": expert for expert in range(e)}
    for name, expert in single.items():
        layout[f"{name}gate_proj.weight"] = _part(gate_up, 0, mi, h, expert=expert)
        layout[f"{name}up_proj.weight"] = _part(gate_up, mi, mi, h, expert=expert)
        layout[f"{name}down_proj.weight"] = _part(down, 0, h, mi, expert=expert)
    return layout
