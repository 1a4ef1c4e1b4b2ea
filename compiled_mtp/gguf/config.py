"""Reads a GGUF file's metadata into the keys of Hugging Face's config.json. No torch.

Source: the keys that llama.cpp's converter writes for qwen35, qwen35moe and qwen3next, and Ollama's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from compiled_mtp.errors import check, fail, shown
from compiled_mtp.gguf.container import Container

# The model_type of config.json by general.architecture.
ARCHITECTURES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
_CONVERT_AGAIN = "convert the model again"
_INTEGERS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
}
_MOE_INTEGERS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}
# Tokens that end a turn or a text in these families, even if the metadata do not name them.
_ENDS = ("<|endoftext|>", "<|im_end|>")


def architecture_of(container: Container) -> str:
    """The file's general.architecture. Raises ValueError for one that is not supported."""
    name = container.metadata.get("general.architecture")
    remedy = "other architectures are not supported"
    if name == "clip":
        remedy = "this is a vision tower (mmproj): pass the file of the language model"
    rule = f"be of the architecture {', '.join(ARCHITECTURES)}"
    check(isinstance(name, str) and name in ARCHITECTURES, str(container.path), rule, name, remedy)
    return str(name)


@dataclass(frozen=True)
class Metadata:
    """The metadata of a model; errors name the key and the file."""

    container: Container

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; a key that begins with a dot gets the architecture's name in front."""
        architecture = self.container.metadata.get("general.architecture")
        return self.container.metadata.get(f"{architecture}{key}" if key.startswith(".") else key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise self.fail(key, f"be an integer of at least {least}", value)
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.fail(key, "be a positive number", value)
        return _shortest(value)

    def fail(self, key: str, rule: str, got: object) -> ValueError:
        architecture = self.container.metadata.get("general.architecture")
        name = f"{architecture}{key}" if key.startswith(".") else key
        return fail(name, rule, f"{shown(got)} in {self.container.path}", _CONVERT_AGAIN)


def hf_config(container: Container) -> dict[str, Any]:
    """The text section of the model's config.json, flat, for a family's reader.

    Raises ValueError, naming the key, for a missing value and for one that the engine does not support.
    """
    architecture, metadata = architecture_of(container), Metadata(container)
    tensors = container.tensors
    integers = _INTEGERS | (_MOE_INTEGERS if architecture != "qwen35" else {})
    config: dict[str, Any] = {"model_type": ARCHITECTURES[architecture]}
    config |= {name: metadata.integer(f".{key}") for name, key in integers.items()}
    config["num_key_value_heads"] = _kv_heads(metadata)
    if architecture == "qwen35":
        config["intermediate_size"] = metadata.integer(".feed_forward_length")
    num_nextn = metadata.integer(".nextn_predict_layers", 0, 0)
    count = metadata.integer(".block_count")
    if count <= num_nextn:
        raise metadata.fail(".block_count", f"be more than its {num_nextn} MTP layers", count)
    if not num_nextn and any(".nextn." in name for name in tensors):
        raise metadata.fail(".nextn_predict_layers", "be 1 in a file with nextn tensors", num_nextn)
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise fail(str(container.path), "hold token_embd.weight", "none", "download the file again")
    is_whole = not _has_mtp(container) or any(name.startswith("blk.0.") for name in tensors)
    remedy = "pass a file of the whole model; one that llama.cpp's converter makes by default has both"
    check(is_whole, str(container.path), "hold the model's layers", "an MTP head alone", remedy)
    inner, heads = metadata.integer(".ssm.inner_size"), config["linear_num_value_heads"]
    if inner % heads:
        raise metadata.fail(".ssm.inner_size", f"be a multiple of {heads} value heads", inner)
    _check_unsupported(metadata, config)
    vocab_size = tensors["token_embd.weight"].shape[0]
    return config | {
        "num_hidden_layers": count - num_nextn,
        "mtp_num_hidden_layers": (num_nextn or 1) if _has_mtp(container) else 0,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "linear_value_head_dim": inner // heads,
        "full_attention_interval": metadata.integer(".full_attention_interval", 4),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(".rope.freq_base"),
        "partial_rotary_factor": metadata.integer(".rope.dimension_count") / config["head_dim"],
        "rope_scaling": _rope_scaling(metadata),
        "norm_topk_prob": True,
        # The dtype of these families' releases; a GGUF file has a type per tensor only.
        "dtype": "bfloat16",
        "eos_token_id": _eos_token_ids(metadata, vocab_size),
    }


def generation_config(container: Container) -> dict[str, Any]:
    """The sampling parameters that the file recommends, with the keys of generation_config.json."""
    metadata = container.metadata
    found = {name: metadata[key] for name, key in _SAMPLING.items() if key in metadata}
    return {name: _shortest(value) for name, value in found.items()}


def _eos_token_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    """The ids that end a text or a turn: the ids that the metadata name, and the ids of the families."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {key: [value] for key in keys if (value := metadata.get(key)) is not None}
    # Ollama names all ids of generation_config.json beside one of them.
    if (listed := metadata.get("tokenizer.ggml.eos_token_ids")) is not None:
        named["tokenizer.ggml.eos_token_ids"] = listed if isinstance(listed, list) else [listed]
    for key, ids in named.items():
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
        if wrong:
            raise metadata.fail(key, f"be ids below {vocab_size}, the rows of token_embd.weight", wrong[0])
    tokens = metadata.get("tokenizer.ggml.tokens")
    # Of another type they are refused where the tokenizer is read.
    ends = {i for i, token in enumerate(tokens) if token in _ENDS} if isinstance(tokens, list) else set()
    return sorted(ends.union(*named.values()))


def _kv_heads(metadata: Metadata) -> int:
    """The KV heads of an attention layer. Ollama lists one number per layer, 0 for a GDN layer."""
    key = ".attention.head_count_kv"
    value = metadata.get(key)
    if not isinstance(value, list):
        return metadata.integer(key)
    counts = {count for count in value if count != 0}
    if len(counts) != 1 or not (type(only := counts.pop()) is int and only > 0):
        raise metadata.fail(key, "be one positive integer in all attention layers", value)
    return only


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """The rope scaling in the form of config.json, whose reader checks its type; None without one."""
    kind = metadata.get(".rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(".rope.scaling.factor")}
    length = metadata.integer(".rope.scaling.original_context_length", 0, 0)
    if length:
        scaling["original_max_position_embeddings"] = length
    betas = {name: metadata.get(f".rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return scaling | {name: value for name, value in betas.items() if value is not None}


def _has_mtp(container: Container) -> bool:
    """Whether an MTP head is stored, under llama.cpp's names or Ollama's."""
    return any(".nextn." in name or name.startswith("mtp.") for name in container.tensors)


def _check_unsupported(metadata: Metadata, config: dict[str, Any]) -> None:
    """Raise ValueError for features that these families never have and the engine does not support."""
    wanted = {
        ".attention.value_length": config["head_dim"],
        # Changes of YaRN that transformers does not have.
        ".rope.scaling.attn_factor": 1.0,
        ".rope.scaling.yarn_attn_factor": 1.0,
        ".rope.scaling.yarn_ext_factor": 1.0,
        ".rope.scaling.yarn_log_multiplier": 0.0,
        ".expert_gating_func": 1,
        ".expert_weights_norm": True,
        ".expert_weights_scale": 1.0,
        ".expert_group_count": 1,
        # Of Ollama's converter.
        ".norm_top_k_prob": True,
        ".ssm.v_head_reordered": True,
    }
    for key, value in wanted.items():
        got: Any = metadata.get(key, value)
        if got != value:
            raise metadata.fail(key, f"be {value}", got)


def _shortest(value: Any) -> Any:
    """The shortest decimal that rounds to the float32 `value`: a file holds 1e-6 as 9.99999997e-07.

    Other types are returned as they are.
    """
    if type(value) is not float:
        return value
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
