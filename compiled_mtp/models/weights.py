"""From a checkpoint's tensors to the merged parameters of our models.

`checkpoint_layout` is the whole mapping, as data: for every tensor that a checkpoint of this configuration
stores, its shape and the row ranges of parameters that its rows fill. `load_weights` compares it with the
headers of the files, and only then copies, one tensor at a time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from compiled_mtp.config import ModelConfig

FP8_BLOCK = 128
# Longest first: one is a prefix of the other.
_TRUNK_PREFIXES = ("model.language_model.", "model.")
_SKIPPED_PREFIXES = ("model.visual.",)
_SCALE_SUFFIX = "_scale_inv"
_FLOATS = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"


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


@dataclass(frozen=True)
class _Header:
    """A tensor as the header of its file describes it; `name` is the full one, with the prefix."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def checkpoint_layout(config: ModelConfig, names: Collection[str]) -> dict[str, Stored]:
    """Every tensor that a checkpoint of `config` stores, by its name without the trunk's prefix.

    `names` are the names it does store (without prefix): they decide whether the experts of the trunk, and
    those of the MTP layer, lie stacked in one tensor or in a tensor each. Names of the MTP head begin 'mtp.'.
    FP8 scales are not listed: they follow from their weights. Source: the names in the released checkpoints.
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
        layout |= _layer(config, prefix, prefix, is_attention, trunk_stacked)
    if config.mtp_num_layers:
        mtp_stacked = any(n.startswith("mtp.") and n.endswith(".experts.gate_up_proj") for n in names)
        layout["mtp.fc.weight"] = _whole("mtp.fc.weight", h, 2 * h)
        layout["mtp.pre_fc_norm_embedding.weight"] = _whole("mtp.norm_embedding.weight", h)
        layout["mtp.pre_fc_norm_hidden.weight"] = _whole("mtp.norm_hidden.weight", h)
        layout["mtp.norm.weight"] = _whole("mtp.norm.weight", h)
        layout |= _layer(config, "mtp.layers.0.", "mtp.layer.", True, mtp_stacked)
    return layout


def _whole(parameter: str, *shape: int) -> Stored:
    return Stored(shape, (Piece(parameter, 0, shape[0]),))


def _part(parameter: str, start: int, *shape: int, expert: int | None = None) -> Stored:
    return Stored(shape, (Piece(parameter, start, shape[0], expert=expert),))


def _layer(c: ModelConfig, src: str, dst: str, is_attention: bool, stacked: bool) -> dict[str, Stored]:
    layout = {
        f"{src}input_layernorm.weight": _whole(f"{dst}input_norm.weight", c.hidden_size),
        f"{src}post_attention_layernorm.weight": _whole(f"{dst}post_norm.weight", c.hidden_size),
    }
    layout |= (_attention if is_attention else _gdn)(c, src, dst)
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


def _gdn(c: ModelConfig, src: str, dst: str) -> dict[str, Stored]:
    src, dst, h = f"{src}linear_attn.", f"{dst}mixer.", c.hidden_size
    nv, v_dim, conv = c.linear_num_value_heads, c.linear_value_dim, c.linear_conv_dim
    in_proj = f"{dst}in_proj.weight"
    layout = {
        f"{src}conv1d.weight": _whole(f"{dst}conv_weight", conv, 1, c.conv_kernel),
        f"{src}A_log": _whole(f"{dst}a_log", nv),
        f"{src}dt_bias": _whole(f"{dst}dt_bias", nv),
        f"{src}norm.weight": _whole(f"{dst}norm_weight", c.linear_value_head_dim),
        f"{src}out_proj.weight": _whole(f"{dst}out_proj.weight", h, v_dim),
    }
    if c.family == "qwen3_next":
        layout[f"{src}in_proj_qkvz.weight"] = Stored((conv + v_dim, h), tuple(_split_qkvz(c, in_proj)))
        layout[f"{src}in_proj_ba.weight"] = Stored((2 * nv, h), tuple(_split_ba(c, in_proj)))
    else:
        layout[f"{src}in_proj_qkv.weight"] = _part(in_proj, 0, conv, h)
        layout[f"{src}in_proj_z.weight"] = _part(in_proj, conv, v_dim, h)
        layout[f"{src}in_proj_b.weight"] = _part(in_proj, conv + v_dim, nv, h)
        layout[f"{src}in_proj_a.weight"] = _part(in_proj, conv + v_dim + nv, nv, h)
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


def _split_ba(c: ModelConfig, parameter: str) -> Iterator[Piece]:
    """The same for the gates: b|a of one key head after another."""
    per_key = c.linear_num_value_heads // c.linear_num_key_heads
    start = c.linear_conv_dim + c.linear_value_dim
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


def has_mtp(path: str | Path) -> bool:
    """Whether the checkpoint directory `path` stores an MTP head; without one only mtp_step 0 is possible."""
    return any(header.name.startswith("mtp.") for header in _read_headers(Path(path)))


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
    `checkpoint_layout`. FP8 weights (a weight with a `_scale_inv` beside it) are multiplied out. Host memory
    beside the parameters: the largest stored tensor, and for FP8 its product too. `progress` gets the bytes
    done and the bytes in all. Raises ValueError, before anything is copied, that names every tensor that is
    missing, unused, or of another shape or dtype, and every parameter that would not be filled.
    """
    headers = _by_name(_read_headers(Path(path)))
    if with_mtp and not any(name.startswith("mtp.") for name in headers):
        raise ValueError(f"model must store an MTP head (mtp.* tensors), got none in {path}; pass mtp_step=0")
    layout = checkpoint_layout(config, headers)
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
            scale = headers.get(name + _SCALE_SUFFIX)
            if scale is not None:
                dtype = parameters[layout[name].pieces[0].parameter].dtype
                weight = dequantize(weight, files[scale.file].get_tensor(scale.name), dtype)
            _copy(weight, layout[name], parameters)
            done += headers[name].num_bytes
            if progress is not None:
                progress(done, total)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An FP8 weight times its block scales: `weight` [N,K] float8_e4m3fn, `scale` [ceil(N/128),ceil(K/128)].

    The product is taken in float32 and rounded once to `dtype`; edge blocks may be partial. Despite its
    stored name, `scale_inv`, the scale is a factor.
    """
    out = torch.empty(weight.shape, dtype=dtype)
    columns = scale.float().repeat_interleave(FP8_BLOCK, dim=1)[:, : weight.shape[1]]
    for block, factor in enumerate(columns):
        rows = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        out[rows] = weight[rows].float() * factor
    return out


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
        weight = name.removesuffix(_SCALE_SUFFIX)
        is_scale = weight != name
        if weight not in layout or weight not in headers:
            unused.append(header.name)
            continue
        shape = layout[weight].shape
        if is_scale:
            shape = tuple(math.ceil(n / FP8_BLOCK) for n in shape)
        if name + _SCALE_SUFFIX in headers:
            dtypes: tuple[str, ...] = (_FP8,)
        else:
            dtypes = ("BF16", "F32") if is_scale else _FLOATS
            if header.dtype == _FP8:
                missing.append(name + _SCALE_SUFFIX)
                continue
        if header.shape != shape:
            wrong.append(f"{header.name} of shape {list(header.shape)} for {list(shape)}")
        elif header.dtype not in dtypes:
            wrong.append(f"{header.name} of dtype {header.dtype} for {' or '.join(dtypes)}")
    found = (("missing", missing), ("unused", unused), ("misfitting", wrong))
    return [f"{kind} tensors: {', '.join(names)}" for kind, names in found if names]


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
        name = next(
            (header.name.removeprefix(p) for p in _TRUNK_PREFIXES if header.name.startswith(p)), header.name
        )
        if name in found:
            raise ValueError(
                f"model must store each tensor once, got {header.name} in {found[name].file} and "
                f"{header.file}; remove one of the files"
            )
        found[name] = header
    return found


def _read_headers(root: Path) -> list[_Header]:
    """The tensors of all files, in the order in which they lie in them."""
    files = sorted(root.glob("*.safetensors"))
    index = root / "model.safetensors.index.json"
    if index.is_file():
        listed = {
            root / file for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        }
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


def _is_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def _header(file: Path) -> list[_Header]:
    """The header of one file. Source: the safetensors format (a length in 8 bytes, then JSON)."""
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(length))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"model must hold safetensors files, got {file} ({error}); download it again"
            ) from None
    entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
    return [
        _Header(file, name, e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0])
        for name, e in ordered
    ]
