"""Tiny random checkpoints with the names, nesting and dtypes of released ones; transformers as oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models import family
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import NO_FORMATS, Formats
from compiled_mtp.models.weights import count_parameters

HEAD_DIM = 256
LINEAR_HEAD_DIM = 128
LOGIT_SCALE = 4.5
FP8_BLOCK = 128
# Modules that the FP8 releases quantise; everything else stays bfloat16.
FP8_MODULES = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)\.weight$"
)

# One entry per layout that the releases use; r is the number of value heads per key head.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("next-r2", {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4}),
    ("dense-r1-tied", {"family": "qwen3_5", "num_key_heads": 2, "num_value_heads": 2, "tied": True}),
    ("dense-r2", {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 2, "sharded": True}),
    ("dense-r3", {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 3, "fp32_gates": False}),
    ("dense-r4", {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 4, "mtp_file": True}),
    ("moe-stacked", {"family": "qwen3_5_moe", "num_key_heads": 1, "num_value_heads": 2}),
    (
        "moe-mixed",
        {"family": "qwen3_5_moe", "num_key_heads": 1, "num_value_heads": 2, "mtp_experts": "per_expert"},
    ),
    (
        "next-fp8",
        {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4, "fp8_scale": torch.float32},
    ),
    (
        "moe-fp8",
        {"family": "qwen3_5_moe", "num_key_heads": 1, "num_value_heads": 2, "fp8_scale": torch.bfloat16},
    ),
]

# Rope scalings that change the frequencies within the length of a test's prompt; the experts of one are not
# renormalised.
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPE_FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("dense-yarn", {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 2, "rope": YARN}),
    (
        "next-linear",
        {
            "family": "qwen3_next",
            "num_key_heads": 1,
            "num_value_heads": 2,
            "rope": {"type": "linear", "factor": 3.0},
            "norm_topk_prob": False,
        },
    ),
]

# Sizes at which every part of a merged weight begins at a block, as in the releases: FP8 stays FP8 on a GPU.
_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
FP8_FAMILIES: list[tuple[str, dict[str, Any]]] = [
    (
        "next",
        {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4, "fp8_scale": torch.float32}
        | _BLOCKS,
    ),
    (
        "dense",
        {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 3, "fp8_scale": torch.bfloat16}
        | _BLOCKS,
    ),
    (
        "moe",
        {"family": "qwen3_5_moe", "num_key_heads": 1, "num_value_heads": 2, "fp8_scale": torch.bfloat16}
        | _BLOCKS,
    ),
]


_FIXED_FIELDS: dict[str, Any] = {
    "head_dim": HEAD_DIM,
    "linear_key_head_dim": LINEAR_HEAD_DIM,
    "linear_value_head_dim": LINEAR_HEAD_DIM,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
}
_FP8_SECTION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


def write_checkpoint(
    directory: Path,
    family: str = "qwen3_5",
    *,
    num_layers: int = 4,
    interval: int = 4,
    hidden_size: int = 128,
    vocab_size: int = 512,
    num_q_heads: int = 2,
    num_kv_heads: int = 1,
    num_key_heads: int = 1,
    num_value_heads: int = 2,
    intermediate_size: int = 192,
    num_experts: int = 8,
    moe_intermediate_size: int = 64,
    tied: bool = False,
    fp32_gates: bool | None = None,
    trunk_experts: str | None = None,
    mtp_experts: str | None = None,
    mtp: bool = True,
    mtp_file: bool = False,
    flat: bool = False,
    vision: bool = True,
    sharded: bool = False,
    fp8_scale: torch.dtype | None = None,
    tokenizer: bool = False,
    rope: dict[str, Any] | None = None,
    norm_topk_prob: bool = True,
    seed: int = 0,
) -> Path:
    """Write a checkpoint to `directory` and return it.

    Every `interval`-th layer has full attention. `flat` writes a text-only export of a Qwen3.5 model (no
    nesting, names without `language_model.`). Experts are 'stacked' or 'per_expert'; None is what the release
    does. `fp32_gates` stores A_log and the gated norm in float32 (None: as released). `fp8_scale` is the
    dtype of FP8 scales, None for bfloat16 weights. `mtp_file` puts the head in mtp.safetensors, which a
    sharded checkpoint's index leaves out. `tokenizer` adds a byte-level tokenizer. `rope` is a rope scaling,
    in the spelling of the family's releases. `norm_topk_prob` is Qwen3-Next's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_next = family == "qwen3_next"
    text: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "full_attention_interval": interval,
        "eos_token_id": vocab_size - 1,
        **_FIXED_FIELDS,
    }
    if family != "qwen3_5":
        text |= _expert_fields(num_experts, moe_intermediate_size)
    if family != "qwen3_5_moe":
        text["intermediate_size"] = intermediate_size
    text |= _next_fields(rope, norm_topk_prob) if is_next else _newer_fields(rope, num_layers, interval)
    config = _nest(text, family, tied, flat or is_next)
    if fp8_scale is not None:
        config["quantization_config"] = _FP8_SECTION
    generator = torch.Generator().manual_seed(seed)
    weights = _trunk(text, is_next, tied, generator) | (_mtp(text, generator) if mtp else {})
    released = "per_expert" if is_next or fp8_scale is not None else "stacked"
    for prefix, layout in (("layers.", trunk_experts or released), ("mtp.", mtp_experts or released)):
        if layout == "per_expert":
            weights = unstack(weights, prefix)
    stored = _round(weights, has_fp32_gates=not is_next if fp32_gates is None else fp32_gates)
    if fp8_scale is not None:
        stored = _quantize(stored, fp8_scale)
    if vision and not flat and not is_next:
        stored["visual.patch_embed.proj.weight"] = torch.randn(8, 3, 2, 4, 4, generator=generator)
    prefix = "model." if flat or is_next else "model.language_model."
    named = {_full_name(name, prefix): w.contiguous() for name, w in stored.items()}
    _save(directory, named, sharded=sharded, mtp_file=mtp_file)
    if tokenizer:
        eos = write_tokenizer(directory, vocab_size)
        config.get("text_config", config)["eos_token_id"] = eos
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def _expert_fields(count: int, size: int) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": count, "num_experts_per_tok": 4} | sizes


def _next_fields(rope: dict[str, Any] | None, norm_topk_prob: bool) -> dict[str, Any]:
    """Return the fields of config.json that only Qwen3-Next has."""
    return {
        "norm_topk_prob": norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_scaling": rope,
        "torch_dtype": "bfloat16",
    }


def _newer_fields(rope: dict[str, Any] | None, num_layers: int, interval: int) -> dict[str, Any]:
    """Return the fields of config.json that the releases after Qwen3-Next have."""
    default = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    default |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    return {
        "rope_parameters": default | (rope or {}),
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
        ],
    }


def _round(weights: Mapping[str, torch.Tensor], *, has_fp32_gates: bool) -> dict[str, torch.Tensor]:
    """Return the weights in bfloat16, except A_log and the gated norm if they stay in float32."""
    fp32 = re.compile(r"linear_attn\.(A_log|norm\.weight)$" if has_fp32_gates else r"$^")
    return {name: w if fp32.search(name) else w.to(torch.bfloat16) for name, w in weights.items()}


def _nest(text: dict[str, Any], family: str, tied: bool, flat: bool) -> dict[str, Any]:
    classes = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
    if flat:
        model_type = family if family == "qwen3_next" else family + "_text"
        head = {"architectures": [classes[family] + "ForCausalLM"], "model_type": model_type}
        return head | text | {"tie_word_embeddings": tied}
    return {
        "architectures": [classes[family] + "ForConditionalGeneration"],
        "model_type": family,
        "tie_word_embeddings": tied,
        "text_config": {"model_type": family + "_text"}
        | text
        | ({"tie_word_embeddings": True} if tied else {}),
        "vision_config": {"model_type": family, "depth": 1},
    }


def _full_name(name: str, prefix: str) -> str:
    if name.startswith(("lm_head.", "mtp.")):
        return name
    return ("model." if name.startswith("visual.") else prefix) + name


def _matrix(rows: int, columns: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)


def _trunk(
    c: Mapping[str, Any], is_next: bool, tied: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    h, vocab = c["hidden_size"], c["vocab_size"]
    weights = {"embed_tokens.weight": _matrix(vocab, h, generator, LOGIT_SCALE)}
    if not tied:
        weights["lm_head.weight"] = _matrix(vocab, h, generator, LOGIT_SCALE)
    weights["norm.weight"] = torch.randn(h, generator=generator) * 0.1
    for i in range(c["num_hidden_layers"]):
        weights |= _layer(c, f"layers.{i}.", (i + 1) % c["full_attention_interval"] == 0, is_next, generator)
    return weights


def _mtp(c: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    h = c["hidden_size"]
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    weights = {name: torch.randn(h, generator=generator) * 0.3 for name in norms}
    weights["mtp.fc.weight"] = _matrix(h, 2 * h, generator)
    return weights | _layer(c, "mtp.layers.0.", True, False, generator)


def _layer(
    c: Mapping[str, Any], prefix: str, is_attention: bool, is_next: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    h = c["hidden_size"]

    def norm(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.3

    weights = {"input_layernorm.weight": norm(h), "post_attention_layernorm.weight": norm(h)}
    if is_attention:
        q, kv = c["num_attention_heads"] * HEAD_DIM, c["num_key_value_heads"] * HEAD_DIM
        for name, rows in (("q_proj", 2 * q), ("k_proj", kv), ("v_proj", kv)):
            weights[f"self_attn.{name}.weight"] = _matrix(rows, h, generator)
        weights["self_attn.o_proj.weight"] = _matrix(h, q, generator, 2.0)
        weights["self_attn.q_norm.weight"] = norm(HEAD_DIM) + 0.5
        weights["self_attn.k_norm.weight"] = norm(HEAD_DIM) + 0.5
    else:
        weights |= _gdn(c, is_next, generator)
    if "num_experts" in c:
        e, mi = c["num_experts"], c["moe_intermediate_size"]
        weights["mlp.gate.weight"] = _matrix(e, h, generator)
        weights["mlp.shared_expert_gate.weight"] = _matrix(1, h, generator)
        weights["mlp.experts.gate_up_proj"] = _matrix(e * 2 * mi, h, generator).view(e, 2 * mi, h)
        weights["mlp.experts.down_proj"] = _matrix(e * h, mi, generator, 2.0).view(e, h, mi)
        ffn, size = "mlp.shared_expert.", mi
    else:
        ffn, size = "mlp.", c["intermediate_size"]
    weights[ffn + "gate_proj.weight"] = _matrix(size, h, generator)
    weights[ffn + "up_proj.weight"] = _matrix(size, h, generator)
    weights[ffn + "down_proj.weight"] = _matrix(h, size, generator, 2.0)
    return {prefix + name: w for name, w in weights.items()}


def _gdn(c: Mapping[str, Any], is_next: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    h, nk, nv = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    k, v = nk * LINEAR_HEAD_DIM, nv * LINEAR_HEAD_DIM
    # As in trained models: exp(A_log) in 1..16, softplus(dt_bias) in 0.001..0.1.
    steps = torch.exp(torch.rand(nv, generator=generator) * 4.6 - 6.9)
    weights = {
        "conv1d.weight": torch.randn(2 * k + v, 1, 4, generator=generator) * 0.5,
        "A_log": torch.log(1 + 15 * torch.rand(nv, generator=generator)),
        "dt_bias": torch.log(torch.expm1(steps)),
        "norm.weight": 1 + 0.3 * torch.randn(LINEAR_HEAD_DIM, generator=generator),
        "out_proj.weight": _matrix(h, v, generator, 2.0),
    }
    shapes = (
        {"in_proj_qkvz": 2 * k + 2 * v, "in_proj_ba": 2 * nv}
        if is_next
        else {"in_proj_qkv": 2 * k + v, "in_proj_z": v, "in_proj_b": nv, "in_proj_a": nv}
    )
    weights |= {f"{name}.weight": _matrix(rows, h, generator) for name, rows in shapes.items()}
    return {f"linear_attn.{name}": w for name, w in weights.items()}


def unstack(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Split the stacked experts of the tensors whose names begin with `prefix`."""
    split: dict[str, torch.Tensor] = {}
    for name, w in weights.items():
        if not name.startswith(prefix) or ".experts." not in name or w.dim() != 3:
            split[name] = w
            continue
        base, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(w):
            if part == "down_proj":
                split[f"{base}.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                split[f"{base}.{expert}.gate_proj.weight"] = gate
                split[f"{base}.{expert}.up_proj.weight"] = up
    return split


def _quantize(weights: dict[str, torch.Tensor], scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Quantise to FP8 in blocks of 128 by 128, for the modules that the releases quantise."""
    quantized = dict(weights)
    for name, w in weights.items():
        if not FP8_MODULES.search(name):
            continue
        rows, columns = (-(-n // FP8_BLOCK) for n in w.shape)
        scale = torch.empty(rows, columns)
        for r in range(rows):
            for c in range(columns):
                scale[r, c] = _block(w, r, c).abs().max().float() / 448
        scale = scale.to(scale_dtype)
        out = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
        for r in range(rows):
            for c in range(columns):
                _block(out, r, c).copy_((_block(w, r, c).float() / scale[r, c].float()).clamp(-448, 448))
        quantized[name] = out
        quantized[name + "_scale_inv"] = scale
    return quantized


def _block(w: torch.Tensor, row: int, column: int) -> torch.Tensor:
    rows = slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK)
    return w[rows, column * FP8_BLOCK : (column + 1) * FP8_BLOCK]


def _save(directory: Path, named: dict[str, torch.Tensor], *, sharded: bool, mtp_file: bool) -> None:
    files: dict[str, dict[str, torch.Tensor]] = {}
    if mtp_file:
        files["mtp.safetensors"] = {n: w for n, w in named.items() if n.startswith("mtp.")}
        named = {n: w for n, w in named.items() if not n.startswith("mtp.")}
    if sharded:
        # Spread over the shards in no usable order, as in the releases.
        for i, (name, w) in enumerate(named.items()):
            files.setdefault(f"model-0000{i % 3 + 1}-of-00003.safetensors", {})[name] = w
        weight_map = {n: file for file, part in files.items() if file != "mtp.safetensors" for n in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        files["model.safetensors"] = named
    for file, part in files.items():
        save_file(part, directory / file, metadata={"format": "pt"})


def write_tokenizer(directory: Path, vocab_size: int) -> int:
    """Train a byte-level tokenizer on a fixed text, write its files, and return the id of '<|endoftext|>'.

    Its eos token is '<|im_end|>', another id, as in the releases.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 320),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "def quicksort(items):\n    return items if len(items) < 2 else sorted(items)\n"
    tokenizer.train_from_iterator([text, "The quick brown fox jumps over the lazy dog."], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return int(tokenizer.token_to_id("<|endoftext|>"))


def read_stored(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by their full names, FP8 dequantised to float32."""
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    for name in [n for n in stored if n.endswith("_scale_inv")]:
        scale, weight = stored.pop(name), name.removesuffix("_scale_inv")
        full = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        w = stored[weight].float()
        stored[weight] = w * full[: w.shape[0], : w.shape[1]]
    return stored


def allocate(
    config: ModelConfig,
    with_mtp: bool = True,
    dtype: torch.dtype = torch.float32,
    formats: Formats = NO_FORMATS,
) -> dict[str, Any]:
    """Return the parameters of our models by name, full of NaN."""
    parameters = dict(TargetModel(config, dtype, torch.device("cpu"), formats).named_parameters())
    if with_mtp:
        parameters |= {
            f"mtp.{n}": p
            for n, p in DraftModel(config, dtype, torch.device("cpu"), formats).named_parameters()
        }
    for parameter in parameters.values():
        parameter.fill_(float("nan") if parameter.is_floating_point() else -77)
    return parameters


def count_weights(
    config: ModelConfig,
    weights: Mapping[str, StoredWeight],
    formats: Formats,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the parameters of a checkpoint with `weights`, the MTP head's included."""
    return count_parameters(family.FAMILIES[config.family].layout(config, weights, formats), formats, dtype)
