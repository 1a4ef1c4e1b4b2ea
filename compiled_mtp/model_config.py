"""ModelConfig: what a checkpoint's JSON files say it is, checked. Nothing here imports torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_FIX = "fix config.json"
FAMILIES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Keys that, where present, must hold one of these values: the engine computes nothing else.
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


def fail(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The one form of our configuration errors, to be raised by the caller."""
    return ValueError(f"{name} must {rule}, got {got}; {remedy}")


def check(ok: bool, name: str, rule: str, got: object, remedy: str) -> None:
    """Raise that error unless `ok`."""
    if not ok:
        raise fail(name, rule, got, remedy)


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint is: the text path of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model and its MTP head.

    Sizes are numbers of rows, heads or features; dtypes are names ('bfloat16'). A size of a part that the
    family lacks (experts in a dense model) is 0.
    """

    family: Literal["qwen3_next", "qwen3_5", "qwen3_5_moe"]
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    is_full_attention: tuple[bool, ...]
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    tie_word_embeddings: bool
    mtp_num_layers: int
    gate_activation: Literal["silu", "sigmoid"]
    dtype: str
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    quantized: bool
    generation_defaults: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def linear_key_dim(self) -> int:
        """Features of all linear key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Features of all linear value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def linear_proj_dim(self) -> int:
        """Rows of the merged GDN input projection q|k|v|z|b|a."""
        return self.linear_conv_dim + self.linear_value_dim + 2 * self.linear_num_value_heads

    @property
    def qkv_dim(self) -> int:
        """Rows of the merged attention projection (q and gate of each head)|k|v."""
        return 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim

    @property
    def is_moe(self) -> bool:
        """Whether every FFN is a mixture of experts."""
        return self.num_experts > 0

    @property
    def num_attention_layers(self) -> int:
        """Full-attention layers of the target model."""
        return sum(self.is_full_attention)

    @property
    def num_gdn_layers(self) -> int:
        """GDN layers of the target model."""
        return self.num_layers - self.num_attention_layers

    @classmethod
    def from_hf(cls, path: str | Path) -> ModelConfig:
        """Read config.json, generation_config.json and the tokenizer's eos of the checkpoint folder `path`.

        Raises ValueError for a directory that is no such checkpoint and for every feature the engine does not
        compute, each by name. Source: the configuration classes of Hugging Face transformers 5.
        """
        root = Path(path)
        is_gguf = root.suffix == ".gguf"
        check(not is_gguf, "model", "be a Hugging Face directory", root, "GGUF weights are not supported")
        remedy = "pass a Hugging Face checkpoint directory"
        check((root / "config.json").is_file(), "model", "be a directory with a config.json", root, remedy)
        other = root / "hf_quant_config.json"
        remedy = "use the bf16 or the FP8 release of the model"
        check(not other.is_file(), "quantization", "be fp8 in blocks of 128", other.name, remedy)
        top = _read_json(root / "config.json")
        name = top.get("model_type")
        remedy = "other architectures are not supported"
        is_known = isinstance(name, str) and name in FAMILIES
        check(is_known, "model_type", f"be one of {', '.join(FAMILIES)}", name, remedy)
        family = FAMILIES[top["model_type"]]
        text = _Keys(top).section("text_config") or top
        inner = str(text.get("model_type", name))
        check(FAMILIES.get(inner) == family, "text_config.model_type", f"belong to {family}", inner, _FIX)
        generation = _read_json(root / "generation_config.json", optional=True)
        return cls(**_text_fields(family, _Keys(text), top), **_sampling_fields(root, top, text, generation))


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise fail(str(path), "be a readable JSON file", error, "download the file again") from None
    if not isinstance(value, dict):
        raise fail(str(path), "hold a JSON object", type(value).__name__, "download the file again")
    return value


@dataclass(frozen=True)
class _Keys:
    """A section of config.json whose reads name the key that is missing or malformed."""

    values: dict[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.values.get(key, default)
        # By type, for a bool is an int; bounded, for JSON may hold NaN, Infinity and integers without end.
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise fail(key, "be a positive number", value, _FIX)
        return float(value)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise fail(key, f"be an integer of at least {least}", value, _FIX)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise fail(key, "be true or false", value, _FIX)
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under `key`, empty where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise fail(key, "be an object", repr(value), _FIX)
        return value or {}


def _text_fields(family: str, keys: _Keys, top: dict[str, Any]) -> dict[str, Any]:
    """The fields that describe the model, from the text section `keys` and the top level of config.json."""
    values = keys.values
    # A key that changes results must not pass unseen because it stands beside the text section.
    for section in (values, top):
        _check_supported(_Keys(section))
    num_layers, hidden_size = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    heads, kv_heads = keys.integer("num_attention_heads"), keys.integer("num_key_value_heads")
    check(heads % kv_heads == 0, "num_attention_heads", f"be a multiple of {kv_heads} KV heads", heads, _FIX)
    k_heads, v_heads = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    rule = f"be a multiple of {k_heads} key heads"
    check(v_heads % k_heads == 0, "linear_num_value_heads", rule, v_heads, _FIX)
    head_dim = keys.integer("head_dim", hidden_size // heads)
    remedy = "other head sizes are not supported"
    check(head_dim in (64, 128, 256), "head_dim", "be 64, 128 or 256", head_dim, remedy)
    theta, factor = _rope(keys)
    rotary_dim = int(head_dim * factor) if factor <= 1 else 0
    is_even_part = rotary_dim % 2 == 0 and rotary_dim > 0
    check(is_even_part, "partial_rotary_factor", f"give an even part of head_dim {head_dim}", factor, _FIX)
    gate = values.get("output_gate_type") or "silu"
    is_known = gate in ("silu", "swish", "sigmoid")
    check(is_known, "output_gate_type", "be silu, swish or sigmoid", gate, "other gates are not supported")
    return {
        "family": family,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": keys.integer("vocab_size"),
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rope_theta": theta,
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.integer("linear_key_head_dim"),
        "linear_value_head_dim": keys.integer("linear_value_head_dim"),
        "conv_kernel": 4,
        "is_full_attention": _layer_pattern(keys, num_layers),
        **_ffn_fields(family, keys),
        "tie_word_embeddings": _Keys(values | top).flag("tie_word_embeddings", False),
        "mtp_num_layers": _mtp_num_layers(keys),
        "gate_activation": "sigmoid" if gate == "sigmoid" else "silu",
        "dtype": _dtype_name(values, top),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "quantized": _is_fp8(_Keys(top)) or _is_fp8(keys),
    }


def _check_supported(keys: _Keys) -> None:
    """Refuse what the engine does not compute, in the text section or at the top level."""
    for key, allowed, why in _ONLY:
        # As JSON, in which 1, 1.0 and true differ.
        got = json.dumps(keys.values.get(key, allowed[0]))
        check(got in map(json.dumps, allowed), key, f"be {json.dumps(allowed[0])}", got, why)
    is_off = keys.values.get("use_sliding_window") is False
    window = None if is_off else keys.values.get("sliding_window")
    check(window is None, "sliding_window", "be null", window, "sliding windows are not supported")
    for key in ("rope_parameters", "rope_scaling"):
        section = keys.section(key)
        nested = sorted(name for name, value in section.items() if isinstance(value, dict))
        remedy = "other rotary embeddings for each type of layer are not supported"
        check(not nested, key, "be one for all layers", nested, remedy)
        kind = section.get("rope_type", section.get("type", "default"))
        remedy = "YaRN and other rope scalings are not supported"
        check(kind == "default", "rope_type", "be default", kind, remedy)


def _ffn_fields(family: str, keys: _Keys) -> dict[str, Any]:
    is_next = family == "qwen3_next"
    is_dense = family == "qwen3_5" or (is_next and keys.integer("num_experts", least=0) == 0)
    if is_dense:
        return {
            "intermediate_size": keys.integer("intermediate_size"),
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": 0,
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": True,
        }
    experts, top_k = keys.integer("num_experts"), keys.integer("num_experts_per_tok")
    check(top_k <= experts, "num_experts_per_tok", f"be at most num_experts ({experts})", top_k, _FIX)
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
        # Qwen3.5-MoE has no such key and always renormalises.
        "norm_topk_prob": keys.flag("norm_topk_prob", True) if is_next else True,
    }


def _layer_pattern(keys: _Keys, num_layers: int) -> tuple[bool, ...]:
    types = keys.values.get("layer_types")
    # Memory is counted in blocks of a KV cache.
    no_attention = "models without full attention are not supported"
    if types is None:
        interval = keys.integer("full_attention_interval", 4)
        rule = f"be at most num_hidden_layers ({num_layers})"
        check(interval <= num_layers, "full_attention_interval", rule, interval, no_attention)
        return tuple((i + 1) % interval == 0 for i in range(num_layers))
    check(isinstance(types, list), "layer_types", "be a list", repr(types), _FIX)
    unknown = sorted({str(t) for t in types} - {"full_attention", "linear_attention"})
    remedy = "other layers are not supported"
    check(not unknown, "layer_types", "be full_attention or linear_attention", unknown, remedy)
    rule = f"have num_hidden_layers ({num_layers}) entries"
    check(len(types) == num_layers, "layer_types", rule, len(types), _FIX)
    check("full_attention" in types, "layer_types", "name a full_attention layer", "none", no_attention)
    return tuple(t == "full_attention" for t in types)


def _rope(keys: _Keys) -> tuple[float, float]:
    """Theta and the rotary part of a head; M-RoPE sections do not matter to text, whose axes are equal."""
    rope = _Keys(keys.values | keys.section("rope_parameters"))
    return rope.number("rope_theta"), rope.number("partial_rotary_factor", 0.25)


def _mtp_num_layers(keys: _Keys) -> int:
    # Qwen3-Next names no count and ships one layer; a checkpoint without it still decodes with mtp_step 0.
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
    check(name in names, "dtype", "be bfloat16, float16 or float32", name, _FIX)
    return name


def _is_fp8(keys: _Keys) -> bool:
    quantization = keys.section("quantization_config")
    if not quantization:
        return False
    remedy = "use the bf16 or the FP8 release of the model"
    method = quantization.get("quant_method")
    check(method == "fp8", "quantization_config.quant_method", "be fp8", method, remedy)
    # A missing block size means one scale a tensor, which is another format.
    layout = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": None} | quantization
    for key, wanted in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("weight_block_size", [128, 128])):
        got, rule = json.dumps(layout[key]), f"be {json.dumps(wanted)}"
        check(layout[key] == wanted, f"quantization_config.{key}", rule, got, remedy)
    return True


def _sampling_fields(
    root: Path, top: dict[str, Any], text: dict[str, Any], generation: dict[str, Any]
) -> dict[str, Any]:
    """Default sampling parameters, and the union of all eos ids (a turn ends with another id than a text)."""
    remedy = "fix the checkpoint's JSON files"
    eos: set[int] = set()
    for section in (top, text, generation):
        ids = section.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        are_ids = all(type(i) is int for i in ids)
        check(are_ids, "eos_token_id", "be an integer or a list of integers", ids, remedy)
        eos.update(ids)
    eos.update(_tokenizer_eos(root))
    wrong = sorted(i for i in eos if not 0 <= i < text["vocab_size"])
    check(not wrong, "eos_token_id", f"lie in the vocabulary of {text['vocab_size']}", wrong, remedy)
    defaults = {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in defaults.items():
        check(type(value) in (int, float), key, "be a number", repr(value), "fix generation_config.json")
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return {"eos_token_ids": tuple(sorted(eos)), "generation_defaults": defaults}


def _tokenizer_eos(root: Path) -> list[int]:
    """The id of the eos token that the tokenizer's files name, or nothing where they name none."""
    token: Any = None
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = token or _read_json(root / file, optional=True).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None or not (root / "tokenizer.json").is_file():
        return []
    tokenizer = _read_json(root / "tokenizer.json")
    try:
        ids = {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
        found = ids.get(token, tokenizer.get("model", {}).get("vocab", {}).get(token))
    except (AttributeError, KeyError, TypeError):
        found = None
    if type(found) is not int:
        raise fail("eos_token", "be a token of tokenizer.json", repr(token), "fix the tokenizer's files")
    return [found]
