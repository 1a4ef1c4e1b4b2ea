"""Writes checkpoints in a released shape with random packed weights, as fast as the disk takes them.

Their values are small and finite, so that an engine can decode with them. Only the first MiBs of a tensor are
random; the rest repeats them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from compiled_mtp.benchmarks.released_shapes import model_config
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.family import FAMILIES

FORMATS = ("bf16", "int4", "q4_k_m")
GROUP = 128
END = "<|im_end|>"
# Bytes of a tensor that are random.
_RANDOM_BYTES = 8 << 20
_SHARD_BYTES = 5 << 30
_LINEARS = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}

Tensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype, shape and the first bytes of a tensor of a safetensors file."""


def path_of(directory: Path, shape: str, form: str) -> Path:
    """Return where `write` puts a checkpoint; nothing is there before it is whole."""
    return directory / f"{shape}-{form}{'.gguf' if form == 'q4_k_m' else ''}"


def write(directory: Path, shape: str, form: str, layers: int = 0) -> Path:
    """Write a checkpoint in one of FORMATS and return its path; `layers` replaces the shape's number."""
    config = model_config(shape)
    if layers:
        config = replace(config, num_layers=layers, is_full_attention=config.is_full_attention[:layers])
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, shape, form)
    partial = path.with_name(f"partial-{path.name}")
    if form == "q4_k_m":
        _write_gguf(partial, config)
    else:
        partial.mkdir(exist_ok=True)
        (partial / "config.json").write_text(json.dumps(_config_json(config, form)))
        _write_safetensors(partial, _tensors(config, form))
    return partial.rename(path)


def _config_json(c: ModelConfig, form: str) -> dict[str, Any]:
    text = {
        "model_type": f"{c.family}_text",
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_conv_kernel_dim": c.conv_kernel,
        "full_attention_interval": 4,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    if c.is_moe:
        text |= {
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.num_experts_per_tok,
            "moe_intermediate_size": c.moe_intermediate_size,
            "shared_expert_intermediate_size": c.shared_expert_intermediate_size,
        }
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    own = {"quantization_config": quantised} if form == "int4" else {}
    tied = {"tie_word_embeddings": c.tie_word_embeddings}
    return {"model_type": c.family, **tied, "text_config": text, "vision_config": {}, **own}


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a plain checkpoint by its name without prefix, experts one by one."""
    return {name: stored.shape for name, stored in FAMILIES[c.family].layout(c, (), {}).items()}


def _tensors(c: ModelConfig, form: str) -> Iterator[Tensor]:
    noise = np.random.default_rng(0)
    for name, shape in _shapes(c).items():
        full = name if name.startswith(("mtp.", "lm_head.")) else f"model.language_model.{name}"
        is_packed = form == "int4" and len(shape) == 2 and name.endswith(_LINEARS)
        if not is_packed:
            yield full, "BF16", shape, _bfloat16(_values(name, shape, noise))
            continue
        (rows, columns), module = shape, full.removesuffix("weight")
        groups = columns // GROUP
        index = np.arange(columns, dtype=np.int32) // GROUP
        yield module + "g_idx", "I32", (columns,), index.tobytes()
        yield module + "qweight", "I32", (columns // 8, rows), noise.bytes(_RANDOM_BYTES)
        yield module + "qzeros", "I32", (groups, rows // 8), np.full(1024, 0x77777777, np.int32).tobytes()
        scale = np.full(1024, 0.7 * columns**-0.5 / 4, np.float16)
        yield module + "scales", "F16", (groups, rows), scale.tobytes()


def _values(name: str, shape: tuple[int, ...], noise: np.random.Generator) -> np.ndarray:
    """The first values of a plain tensor, in float32."""
    count = min(int(np.prod(shape)), _RANDOM_BYTES // 2)
    if name.endswith("A_log"):
        return noise.uniform(-1, 2, count).astype(np.float32)
    if name.endswith("dt_bias"):
        return noise.uniform(-4, -1, count).astype(np.float32)
    if name.endswith("linear_attn.norm.weight"):
        return np.ones(count, np.float32)
    if "norm" in name:
        return np.zeros(count, np.float32)
    return (0.7 * shape[-1] ** -0.5 * noise.standard_normal(count, np.float32)).astype(np.float32)


def _bfloat16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _repeated(first: bytes, size: int) -> Iterator[bytes]:
    """`size` bytes that repeat `first`."""
    while size > 0:
        yield first[:size]
        size -= len(first)


def _write_safetensors(directory: Path, tensors: Iterator[Tensor]) -> None:
    """Write files of about _SHARD_BYTES, with an index if there are several."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor)
        if filled and filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        names |= dict.fromkeys((tensor[0] for tensor in shard), file)
        header, at = {}, 0
        for tensor in shard:
            name, dtype, shape, _ = tensor
            end = at + _size(tensor)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in shard:
                stream.writelines(_repeated(tensor[3], _size(tensor)))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _size(tensor: Tensor) -> int:
    return int(np.prod(tensor[2])) * _BYTES[tensor[1]]


_RENAMED = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.experts.0.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
}


def _gguf_name(name: str, layers: int) -> str:
    if name in _RENAMED:
        return _RENAMED[name]
    prefix = f"blk.{layers}."
    if name == "mtp.norm.weight":
        return prefix + "nextn.shared_head_norm.weight"
    rest = name.removeprefix("mtp.").removeprefix("layers.0.") if name.startswith("mtp.") else name
    if not name.startswith("mtp."):
        _, number, rest = name.split(".", 2)
        prefix = f"blk.{number}."
    if rest in _RENAMED:
        return prefix + _RENAMED[rest]
    stem, _, suffix = rest.rpartition(".")
    return f"{prefix}{_RENAMED[stem]}.{suffix}" if stem in _RENAMED else prefix + _RENAMED[rest]


def _type_in_q4_k_m(name: str, layers: int) -> Type:
    """The type that llama-quantize's rules give a tensor of two or three dimensions."""
    if name in ("token_embd.weight", "output.weight"):
        return Type.Q6_K
    if "attn_qkv" in name:
        return Type.Q5_K
    if "attn_v." in name or "ffn_down" in name:
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2:
            return Type.Q6_K
    return Type.Q4_K


def _blocks(kind: Type, columns: int, noise: np.random.Generator) -> bytes:
    """Random blocks of a K-quant whose scales give values of the usual size."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    count = _RANDOM_BYTES // size
    blocks = np.frombuffer(noise.bytes(count * size), np.uint8).reshape(count, size).copy()
    d = np.float16(0.7 * columns**-0.5 / 300)
    both = np.array([d, d * 8] if kind != Type.Q6_K else [d / 8], np.float16).view(np.uint8)
    place = slice(0, 4) if kind != Type.Q6_K else slice(208, 210)
    blocks[:, place] = both
    return blocks.tobytes()


def _add_tokenizer(writer: gguf.GGUFWriter, num_ids: int) -> None:
    """Add a byte-level tokenizer: the bytes, and longer tokens by merges of a shorter one with a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = [*alphabet], []
    for first, second in ((f, s) for f in itertools.count() for s in alphabet):
        if len(tokens) == num_ids - 1:
            break
        merges.append(f"{tokens[first]} {second}")
        tokens.append(tokens[first] + second)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([*tokens, END])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens))


def _write_gguf(path: Path, c: ModelConfig) -> None:
    architecture = "qwen35moe" if c.is_moe else "qwen35"
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=False)
    numbers = {
        "block_count": c.num_layers + 1,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_q_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rotary_dim,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_value_dim,
        "full_attention_interval": 4,
        "nextn_predict_layers": 1,
    }
    if c.is_moe:
        numbers |= {
            "expert_count": c.num_experts,
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
            "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        }
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", c.rope_theta)
    _add_tokenizer(writer, c.vocab_size)
    noise = np.random.default_rng(0)
    first: list[tuple[bytes, int]] = []
    for name, shape in _shapes(c).items():
        if ".experts." in name:
            if ".experts.0." not in name:
                continue
            shape = (c.num_experts, *shape)
        target = _gguf_name(name, c.num_layers)
        shape = (shape[0], shape[-1]) if "conv1d" in name else shape
        is_plain = len(shape) == 1 or "conv1d" in name or "ffn_gate_inp" in target
        if is_plain:
            kind, values = Type.F32, _values(name, shape, noise)
            if name.endswith("A_log"):
                values = -np.exp(values)
            if "norm" in name and "linear_attn" not in name:
                values += 1
            data, size = values.tobytes(), 4 * int(np.prod(shape))
        else:
            kind = _type_in_q4_k_m(target, c.num_layers)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            data, size = _blocks(kind, shape[-1], noise), int(np.prod(shape)) // block * block_bytes
        stored = shape if is_plain else gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(
            target, stored, np.dtype(np.float32 if is_plain else np.uint8), size, raw_dtype=kind
        )
        first.append((data, size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    for data, size in first:
        stream.write(bytes(-stream.tell() % writer.data_alignment))
        stream.writelines(_repeated(data, size))
    stream.write(bytes(-stream.tell() % writer.data_alignment))
    writer.close()
