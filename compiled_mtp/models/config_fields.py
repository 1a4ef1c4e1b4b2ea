"""Reads the text section of a Hugging Face config.json into fields of ModelConfig."""

from __future__ import annotations

import json
from typing import Any

from compiled_mtp.errors import check
from compiled_mtp.models.config_keys import FIX, Keys
from compiled_mtp.models.formats.claims import SECTION, claims_of
from compiled_mtp.models.rope_keys import check_no_rope, rope_fields

# Far above existing models, and small enough that a wrong number takes neither time nor memory before the
# weights' headers contradict it.
MOST_LAYERS = 4096
# The same for ids: grammars make masks of all ids before the weights are read.
MOST_IDS = 1 << 24
# Keys that, if present, must have one of these values: the engine supports no others.
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hidden_act", ("silu",), "other activations are not supported"),
    ("attention_bias", (False, None), "attention biases are not supported"),
    ("attn_output_gate", (True,), "attention without its output gate is not supported"),
    ("use_sliding_window", (False, None), "sliding windows are not supported"),
    ("mlp_only_layers", ([], None), "layers that mix dense and expert FFNs are not supported"),
    ("decoder_sparse_step", (1,), "layers that mix dense and expert FFNs are not supported"),
    ("mtp_use_dedicated_embeddings", (False, None), "an MTP head with its own embedding is not supported"),
    ("mamba_ssm_dtype", ("float32", None), "the recurrent state is kept in float32"),
    ("linear_conv_kernel_dim", (4,), "convolutions of another length are not supported"),
)


def text_fields(keys: Keys, top: dict[str, Any]) -> dict[str, Any]:
    """Every field except the family's name and the fields of the FFN, from the text section `keys` and the
    top level."""
    values = keys.values
    # Both levels: a key that changes results must not be missed because it is outside the text section.
    for section in (values, top):
        _check_supported(Keys(section))
    if values is not top:
        check_no_rope(Keys(top))
    num_layers, hidden_size = keys.integer("num_hidden_layers", most=MOST_LAYERS), keys.integer("hidden_size")
    gate = values.get("output_gate_type") or "silu"
    is_known = gate in ("silu", "swish", "sigmoid")
    check(is_known, "output_gate_type", "be silu, swish or sigmoid", gate, "other gates are not supported")
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": keys.integer("vocab_size", most=MOST_IDS),
        **_attention_fields(keys, hidden_size),
        **_linear_attention_fields(keys),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "is_full_attention": _layer_pattern(keys, num_layers),
        # Fine-tunes may lose it in one of the sections. `as_stored` unties a stored head of its own.
        "tie_word_embeddings": any(Keys(s).flag("tie_word_embeddings", False) for s in (values, top)),
        "mtp_num_layers": _mtp_num_layers(keys),
        "gate_activation": "sigmoid" if gate == "sigmoid" else "silu",
        "dtype": _dtype_name(values, top),
        "quantized": _is_fp8(Keys(top)) or _is_fp8(keys),
    }


def dense_ffn(keys: Keys) -> dict[str, Any]:
    """The fields of an FFN without experts."""
    return {
        "intermediate_size": keys.integer("intermediate_size"),
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True,
    }


def moe_ffn(keys: Keys, *, norm_topk_prob: bool = True) -> dict[str, Any]:
    """The fields of a mixture of experts with a shared expert."""
    experts, top_k = keys.integer("num_experts"), keys.integer("num_experts_per_tok")
    check(top_k <= experts, "num_experts_per_tok", f"be at most num_experts ({experts})", top_k, FIX)
    size, shared = keys.integer("moe_intermediate_size"), keys.integer("shared_expert_intermediate_size")
    remedy = "the shared expert is computed as one more expert; other sizes are not supported"
    rule = f"equal moe_intermediate_size ({size})"
    check(shared == size, "shared_expert_intermediate_size", rule, shared, remedy)
    return {
        "intermediate_size": 0,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": norm_topk_prob,
    }


def _attention_fields(keys: Keys, hidden_size: int) -> dict[str, Any]:
    heads, kv_heads = keys.integer("num_attention_heads"), keys.integer("num_key_value_heads")
    check(heads % kv_heads == 0, "num_attention_heads", f"be a multiple of {kv_heads} KV heads", heads, FIX)
    head_dim = keys.integer("head_dim", hidden_size // heads)
    remedy = "other head sizes are not supported"
    check(head_dim in (64, 128, 256), "head_dim", "be 64, 128 or 256", head_dim, remedy)
    return {
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        **rope_fields(keys, head_dim),
    }


def _linear_attention_fields(keys: Keys) -> dict[str, Any]:
    k_heads, v_heads = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    rule = f"be a multiple of {k_heads} key heads"
    check(v_heads % k_heads == 0, "linear_num_value_heads", rule, v_heads, FIX)
    return {
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.integer("linear_key_head_dim"),
        "linear_value_head_dim": keys.integer("linear_value_head_dim"),
        "conv_kernel": 4,
    }


def _check_supported(keys: Keys) -> None:
    """Raise ValueError for features that the engine does not support, in one section of config.json."""
    for key, allowed, why in _ONLY:
        # Compared as JSON, in which 1, 1.0 and true differ.
        got = json.dumps(keys.values.get(key, allowed[0]))
        check(got in map(json.dumps, allowed), key, f"be {json.dumps(allowed[0])}", got, why)
    is_off = keys.values.get("use_sliding_window") is False
    window = None if is_off else keys.values.get("sliding_window")
    check(window is None, "sliding_window", "be null", window, "sliding windows are not supported")


def _layer_pattern(keys: Keys, num_layers: int) -> tuple[bool, ...]:
    types = keys.values.get("layer_types")
    # The memory plan counts blocks of a KV cache, so there must be a layer with full attention.
    no_attention = "models without full attention are not supported"
    if types is None:
        interval = keys.integer("full_attention_interval", 4)
        rule = f"be at most num_hidden_layers ({num_layers})"
        check(interval <= num_layers, "full_attention_interval", rule, interval, no_attention)
        return tuple((i + 1) % interval == 0 for i in range(num_layers))
    check(isinstance(types, list), "layer_types", "be a list", repr(types), FIX)
    unknown = sorted({str(t) for t in types} - {"full_attention", "linear_attention"})
    remedy = "other layers are not supported"
    check(not unknown, "layer_types", "be full_attention or linear_attention", unknown, remedy)
    rule = f"have num_hidden_layers ({num_layers}) entries"
    check(len(types) == num_layers, "layer_types", rule, len(types), FIX)
    check("full_attention" in types, "layer_types", "name a full_attention layer", "none", no_attention)
    return tuple(t == "full_attention" for t in types)


def _mtp_num_layers(keys: Keys) -> int:
    # Qwen3-Next's config.json has no count, and its releases have one layer. A checkpoint without that layer
    # still decodes with mtp_step 0.
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    name = next((n for n in names if n in keys.values), names[1])
    count = keys.integer(name, 1, least=0)
    check(count <= 1, name, "be 0 or 1", count, "heads of several layers are not supported")
    return count


def _dtype_name(text: dict[str, Any], top: dict[str, Any]) -> str:
    keys = ("dtype", "torch_dtype")
    found = [got for section in (text, top) for key in keys if (got := section.get(key)) is not None]
    name = str(found[0]).removeprefix("torch.") if found else "bfloat16"
    names = ("bfloat16", "float16", "float32")
    check(name in names, "dtype", "be bfloat16, float16 or float32", name, FIX)
    return name


def _is_fp8(keys: Keys) -> bool:
    section = keys.section(SECTION)
    return bool(section) and claims_of(section).is_fp8
