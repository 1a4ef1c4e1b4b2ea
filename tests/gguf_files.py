"""GGUF files of checkpoints, as llama.cpp's converter writes them; independent of our reader.

`convert` turns a checkpoint's tensors into those of a GGUF file: it changes values and the order of heads.
`write_gguf` quantises and writes them with the package gguf. That package cannot make K-quants, so the plain
roundings below do. `multiplied_out` writes the checkpoint whose weights are a file's values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
TypeOf = Callable[[str], Type]
_RENAMED = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{p}_proj.weight": f"attn_{p}.weight" for p in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{p}_norm.weight": f"attn_{p}_norm.weight" for p in "qk"},
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"mlp.{n}_proj.weight": f"ffn_{n}.weight" for n in ("gate", "up", "down")},
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{n}_proj.weight": f"ffn_{n}_shexp.weight" for n in ("gate", "up", "down")},
}
_MTP = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head_norm.weight",
}
# Never quantised, by the rules of llama-quantize.
_F32 = re.compile(r"norm\.weight$|ffn_gate_inp|ssm_conv1d|ssm_a$|\.bias$")


@dataclass
class Converted:
    """A tensor of the file, and a function that turns its values back into the checkpoint's."""

    values: np.ndarray
    back: Callable[[np.ndarray], Mapping[str, np.ndarray]] = field(repr=False)


def read_config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    return {**text, "tie_word_embeddings": config.get("tie_word_embeddings", False), "top": config}


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by their names without prefix, without the vision tower."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    short = {n.removeprefix("model.").removeprefix("language_model."): w for n, w in found.items()}
    return {n: w for n, w in short.items() if not n.startswith("visual.")}


def convert(directory: Path, *, fused_experts: bool = False) -> dict[str, Converted]:
    """Return the tensors of the GGUF file of a checkpoint, in float32 by name."""
    c = read_config(directory)
    is_next = c["top"]["model_type"] == "qwen3_next"
    tensors = {name: w.float().numpy() for name, w in read_tensors(directory).items()}
    out: dict[str, Converted] = {}
    for name, w in _stack(tensors).items():
        block, part = _place(name, c["num_hidden_layers"])
        if part == "linear_attn.in_proj_qkvz.weight":
            out |= _split_qkvz(c, name, block, w)
        elif part in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            out |= _experts(name, block, w, fused_experts)
        else:
            target = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}.get(
                part, "output.weight" if part == "lm_head.weight" else f"{block}{_RENAMED.get(part, part)}"
            )
            out[target] = _changed(c, name, part, w, is_next)
    return out


def _place(name: str, num_layers: int) -> tuple[str, str]:
    """Return the block's prefix in the file, with the point, and the name within the block."""
    if found := re.fullmatch(r"layers\.(\d+)\.(.*)", name):
        return f"blk.{found[1]}.", found[2]
    if name.startswith("mtp.layers.0."):
        return f"blk.{num_layers}.", name.removeprefix("mtp.layers.0.")
    if name.startswith("mtp."):
        return f"blk.{num_layers}.nextn.", _MTP[name.removeprefix("mtp.")]
    return "", name


def _stack(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the experts of each layer in one tensor, as in the file."""
    out: dict[str, np.ndarray] = {}
    single: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for name, w in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            single.setdefault(found[1], {})[int(found[2]), found[3]] = w
        else:
            out[name] = w
    for name, parts in single.items():
        count = max(e for e, _ in parts) + 1
        gate_up = [np.concatenate((parts[e, "gate"], parts[e, "up"])) for e in range(count)]
        out[f"{name}.gate_up_proj"] = np.stack(gate_up)
        out[f"{name}.down_proj"] = np.stack([parts[e, "down"] for e in range(count)])
    return out


def _experts(name: str, block: str, w: np.ndarray, is_fused: bool) -> dict[str, Converted]:
    base = name.rpartition(".")[0]
    if name.endswith("down_proj"):
        return {f"{block}ffn_down_exps.weight": Converted(w, lambda v: {f"{base}.down_proj": v})}
    if is_fused:
        return {f"{block}ffn_gate_up_exps.weight": Converted(w, lambda v: {f"{base}.gate_up_proj": v})}
    gate, up = np.split(w, 2, axis=1)
    parts = {"gate": gate, "up": up}
    return {
        f"{block}ffn_{n}_exps.weight": Converted(p, lambda v, n=n: {f"{base}.{n}": v})
        for n, p in parts.items()
    }


def _split_qkvz(c: Mapping[str, Any], name: str, block: str, w: np.ndarray) -> dict[str, Converted]:
    """Split Qwen3-Next's q|k|v|z of each key head into q|k|v and z."""
    nk, r = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    k, v = c["linear_key_head_dim"], r * c["linear_value_head_dim"]
    index = np.arange(len(w)).reshape(nk, 2 * k + 2 * v)
    q, kk, vv, z = np.split(index, [k, 2 * k, 2 * k + v], axis=1)
    qkv, z = np.concatenate([p.reshape(-1) for p in (q, kk, vv)]), z.reshape(-1)
    return {
        f"{block}attn_qkv.weight": Converted(w[qkv], lambda x: {f"{name}@qkv": _put(len(w), qkv, x)}),
        f"{block}attn_gate.weight": Converted(w[z], lambda x: {f"{name}@z": _put(len(w), z, x)}),
    }


def _put(rows: int, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.zeros((rows, *values.shape[1:]), np.float32)
    out[index] = values
    return out


def _tiles(c: Mapping[str, Any], first: int, width: int) -> np.ndarray:
    """Return the source of the file's rows: value heads of `width` rows from `first` on, in tiles."""
    nk, nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    heads = np.arange(nv * width).reshape(nk, nv // nk, width).transpose(1, 0, 2).reshape(-1)
    return np.concatenate((np.arange(first), first + heads))


def _changed(c: Mapping[str, Any], name: str, part: str, w: np.ndarray, is_next: bool) -> Converted:
    dv, keys = c["linear_value_head_dim"], 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    is_norm = "norm" in part and "linear_attn" not in part
    if is_norm:
        return Converted(w + np.float32(1), lambda v: {name: v - np.float32(1)})
    shape = w.shape
    if part.endswith("conv1d.weight"):
        w = w[:, 0]
    if part.endswith("A_log"):
        w = -np.exp(w)
    if part.endswith("shared_expert_gate.weight"):
        w = w[0]
    starts = {"in_proj_qkv": (keys, dv), "in_proj_z": (0, dv), "conv1d": (keys, dv)}
    starts |= dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), (0, 1))
    place = next((at for n, at in starts.items() if f"linear_attn.{n}" in part), None)

    def back(v: np.ndarray) -> Mapping[str, np.ndarray]:
        if part.endswith("A_log"):
            v = np.log(-v.astype(np.float64)).astype(np.float32)
        return {name: v.reshape(shape)}

    if is_next or (place is None and "out_proj" not in part):
        return Converted(w, back)
    if place is None:
        columns = _tiles(c, 0, dv)
        return Converted(w[:, columns], lambda v: back(v[:, np.argsort(columns)]))
    rows = _tiles(c, *place)
    return Converted(w[rows], lambda v: back(v[np.argsort(rows)]))


def as_ollama(directory: Path, tensors: Mapping[str, Converted]) -> dict[str, Converted]:
    """Return the tensors with the names and values of Ollama's converter, and a tensor of a vision tower.

    It leaves the names of the MTP head outside the MTP layer as they are, and the values of its norms.
    """
    last = read_config(directory)["num_hidden_layers"]
    of_head = {f"blk.{last}.nextn.{theirs}": f"mtp.{name}" for name, theirs in _MTP.items()}
    out = {"v.blk.0.attn_q.weight": Converted(np.ones((8, 8), np.float32), lambda v: {})}
    for name, one in tensors.items():
        if own := of_head.get(name):
            is_norm = own.endswith("norm.weight") or "_norm_" in own
            out[own] = Converted(one.values - is_norm, one.back)
        else:
            out[name.replace(f"blk.{last}.", "mtp.layers.0.").replace("ssm_dt.bias", "ssm_dt")] = one
    return out


def ollama_metadata(directory: Path) -> dict[str, Any]:
    """Return what Ollama's converter writes in place of `metadata_of`."""
    c = read_config(directory)
    layers, arch = c["num_hidden_layers"], ARCHITECTURES[c["top"]["model_type"].removesuffix("_text")]
    is_full = [(i + 1) % c.get("full_attention_interval", 4) == 0 for i in range(layers)]
    own: dict[str, Any] = {
        "block_count": layers,
        "nextn_predict_layers": None,
        "attention.head_count_kv": [c["num_key_value_heads"] * full for full in is_full],
        "rope.dimension_sections": [11, 11, 10],
        "ssm.v_head_reordered": True,
        "vision.block_count": 1,
    }
    return {f"{arch}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eos_token_ids": [5, 6],
    }


def q5_k(rows: np.ndarray) -> np.ndarray:
    """Round to blocks of Q5_K."""
    return q4_k(rows, bits=5)


def q4_k(rows: np.ndarray, bits: int = 4) -> np.ndarray:
    """Round to blocks of Q4_K or Q5_K, with the scale and minimum that span each sub-block."""
    x, most = rows.reshape(-1, 8, 32), (1 << bits) - 1
    low, span = np.minimum(x.min(2), 0), x.max(2) - np.minimum(x.min(2), 0)
    d = (span.max(1) / most / 63).astype(np.float16)
    dmin = (-low.min(1) / 63).astype(np.float16)
    scale = _codes(span / most, d, 63)
    minimum = _codes(-low, dmin, 63)
    step = d.astype(np.float32)[:, None] * scale
    offset = dmin.astype(np.float32)[:, None] * minimum
    q = np.divide(x + offset[..., None], step[..., None], out=np.zeros_like(x), where=step[..., None] > 0)
    q = np.clip(np.rint(q), 0, most).astype(np.uint8)
    packed = np.zeros((len(x), 12), np.uint8)
    packed[:, :4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    packed[:, 4:8] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    packed[:, 8:] = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    nibbles = (q & 15).reshape(-1, 4, 2, 32)
    data = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128)
    halves = np.stack((d, dmin), 1).view(np.uint8)
    high = [np.asarray(sum((q[:, j] >> 4) << j for j in range(8)), np.uint8)] if bits == 5 else []
    return np.concatenate((halves, packed, *high, data), 1).reshape(*rows.shape[:-1], -1)


def q6_k(rows: np.ndarray) -> np.ndarray:
    """Round to blocks of Q6_K."""
    x = rows.reshape(-1, 16, 16)
    most = np.abs(x).max(2)
    d = (most.max(1) / 31 / 127).astype(np.float16)
    scale = _codes(most / 31, d, 127)
    step = (d.astype(np.float32)[:, None] * scale)[..., None]
    q = np.divide(x, step, out=np.zeros_like(x), where=step > 0)
    q = (np.clip(np.rint(q), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = sum((q[:, :, g] >> 4) << 2 * g for g in range(4))
    parts = (
        low.reshape(-1, 128),
        np.asarray(high, np.uint8).reshape(-1, 64),
        scale,
        d[:, None].view(np.uint8),
    )
    return np.concatenate(parts, 1).reshape(*rows.shape[:-1], -1)


def _codes(values: np.ndarray, d: np.ndarray, most: int) -> np.ndarray:
    unit = d.astype(np.float32)[:, None]
    codes = np.divide(values, unit, out=np.zeros_like(values), where=unit > 0)
    return np.clip(np.ceil(codes), 0, most).astype(np.uint8)


def encode(values: np.ndarray, kind: Type) -> np.ndarray:
    """Return the rows of a tensor in blocks of `kind`, as bytes, or as numbers if `kind` has no blocks."""
    own = {Type.Q4_K: q4_k, Type.Q5_K: q5_k, Type.Q6_K: q6_k}
    return own[kind](values) if kind in own else gguf.quants.quantize(values, kind)


def type_of(name: str, shape: tuple[int, ...], chosen: TypeOf) -> Type:
    return Type.F32 if _F32.search(name) or len(shape) < 2 else chosen(name)


def metadata_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint's file, without its tokenizer."""
    c = read_config(directory)
    arch = ARCHITECTURES[c["top"]["model_type"].removesuffix("_text")]
    has_mtp = any(name.startswith("mtp.") for name in read_tensors(directory))
    rope = c.get("rope_parameters") or c
    value_heads = c["linear_num_value_heads"]
    own: dict[str, Any] = {
        "block_count": c["num_hidden_layers"] + has_mtp,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c.get("intermediate_size", 0),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": np.float32(c["rms_norm_eps"]),
        "rope.freq_base": np.float32(rope["rope_theta"]),
        "rope.dimension_count": int(c["head_dim"] * rope["partial_rotary_factor"]),
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * c["linear_value_head_dim"],
        "full_attention_interval": c.get("full_attention_interval", 4),
    }
    scaling = rope if "factor" in rope else c.get("rope_scaling")
    if scaling:
        own["rope.scaling.type"] = scaling.get("rope_type", scaling.get("type"))
        own["rope.scaling.factor"] = np.float32(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            own["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if has_mtp:
        own["nextn_predict_layers"] = 1
    if "num_experts" in c:
        own |= {
            "expert_count": c["num_experts"],
            "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c["moe_intermediate_size"],
            "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"],
        }
    found = {f"{arch}.{key}": value for key, value in own.items()}
    end = c.get("eos_token_id")
    if isinstance(end, int):
        found["tokenizer.ggml.eos_token_id"] = end
    return {"general.architecture": arch} | found


def write_gguf(
    directory: Path,
    path: Path,
    chosen: TypeOf = lambda name: Type.BF16,
    *,
    changes: Mapping[str, Any] | None = None,
    max_tensors: int = 0,
    fused_experts: bool = False,
    ollama: bool = False,
) -> Path:
    """Write the GGUF file of a checkpoint and return its path, the first part's if there are several.

    chosen: gives the type for a tensor's name; tensors of one dimension, and rows that do not fit the type's
    blocks, ignore it. changes: metadata to replace, or to leave out (None). max_tensors: per part of a file
    in parts. ollama: as Ollama's converter writes it.
    """
    tensors = convert(directory, fused_experts=fused_experts)
    metadata = metadata_of(directory) | (ollama_metadata(directory) if ollama else {}) | dict(changes or {})
    tensors = as_ollama(directory, tensors) if ollama else tensors
    writer = gguf.GGUFWriter(
        path, metadata["general.architecture"], split_max_tensors=max_tensors, use_temp_file=False
    )
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    for name, one in tensors.items():
        kind = type_of(name, one.values.shape, chosen)
        data = encode(np.ascontiguousarray(one.values), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return parts[0] if max_tensors else path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, (float, np.floating)):
        writer.add_float32(key, float(value))
    else:
        writer.add_uint32(key, int(value))


def multiplied_out(directory: Path, target: Path, chosen: TypeOf) -> Path:
    """Write the float32 checkpoint whose weights are the file's values.

    The file is that of `write_gguf` with `chosen`; the package gguf reads it.
    """
    target.mkdir(parents=True)
    for file in directory.glob("*.json"):
        if not file.name.endswith("index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    found: dict[str, np.ndarray] = {}
    for name, one in convert(directory).items():
        kind = type_of(name, one.values.shape, chosen)
        data = encode(np.ascontiguousarray(one.values), kind)
        values = gguf.quants.dequantize(data, kind).reshape(one.values.shape)
        for stored, part in one.back(values).items():
            # Parts of one tensor are in different rows.
            whole = stored.partition("@")[0]
            found[whole] = found[whole] + part if whole in found else part
    joined = {n: w for n, w in found.items() if not n.endswith((".gate", ".up"))}
    for name in [n for n in found if n.endswith(".experts.gate")]:
        base = name.removesuffix(".gate")
        joined[f"{base}.gate_up_proj"] = np.concatenate((found[name], found[f"{base}.up"]), axis=1)
    is_next = read_config(directory)["top"]["model_type"] == "qwen3_next"
    named: dict[str, torch.Tensor] = {}
    for name, w in joined.items():
        full = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        parts = _unstacked(full, w) if is_next and ".experts." in name else {full: w}
        named |= {n: torch.from_numpy(part.copy()) for n, part in parts.items()}
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _unstacked(name: str, w: np.ndarray) -> dict[str, np.ndarray]:
    """Return the experts of a stack, each in its own tensor, as in Qwen3-Next."""
    base, part = name.rsplit(".", 1)
    if part == "down_proj":
        return {f"{base}.{e}.down_proj.weight": matrix for e, matrix in enumerate(w)}
    halves = np.split(w, 2, axis=1)
    gates = {f"{base}.{e}.gate_proj.weight": matrix for e, matrix in enumerate(halves[0])}
    return gates | {f"{base}.{e}.up_proj.weight": matrix for e, matrix in enumerate(halves[1])}
