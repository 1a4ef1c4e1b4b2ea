"""Writes and reads the Hugging Face directory of the checkpoint that ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from default_model_training.data import END_OF_TEXT, TURN_END
from default_model_training.model import ModelShape, TrainingModel

CHAT_TEMPLATE = """\
{%- if not messages -%}
    {{- raise_exception("messages must hold at least one message") -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("role must be system, user or assistant, got " ~ message.role) -}}
    {%- endif -%}
    {%- if message.role == "system" and not loop.first -%}
        {{- raise_exception("a system message must come first") -}}
    {%- endif -%}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content | trim ~ "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""
MAX_POSITIONS = 4096
FLOAT32_SUFFIXES = (".A_log", "linear_attn.norm.weight")


def config_of(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of config.json, in the flat text-only layout of Qwen3.5."""
    layer_types = [
        "full_attention" if shape.is_full_attention(i) else "linear_attention"
        for i in range(shape.num_layers)
    ]
    frequencies = shape.rotary_dim // 2
    section = [(frequencies + 2 - axis) // 3 for axis in range(3)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "full_attention_interval": shape.full_attention_interval,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_value_head_dim": shape.linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": section,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Return the shape that `config_of` wrote into `config`."""
    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        full_attention_interval=config["full_attention_interval"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        partial_rotary_factor=config["rope_parameters"]["partial_rotary_factor"],
        linear_key_heads=config["linear_num_key_heads"],
        linear_value_heads=config["linear_num_value_heads"],
        linear_head_dim=config["linear_key_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
        eps=config["rms_norm_eps"],
    )


def stored_dtype(name: str) -> torch.dtype:
    """Return the stored dtype of a parameter: bfloat16, for two kinds float32 as in the released files."""
    return torch.float32 if name.endswith(FLOAT32_SUFFIXES) else torch.bfloat16


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export_checkpoint(model: TrainingModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write config, weights, tokenizer, generation config and chat template of `model` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", stored_dtype(name)).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    end_of_text, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    _write_json(out / "config.json", config_of(model.shape, tokenizer))
    _write_json(
        out / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.8,
            "eos_token_id": [turn_end, end_of_text],
            "pad_token_id": end_of_text,
        },
    )
    _write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_checkpoint(directory: Path) -> tuple[TrainingModel, Tokenizer]:
    """Return the float32 training model (evaluation mode) and the tokenizer of an exported directory."""
    shape = shape_of(json.loads((directory / "config.json").read_text()))
    model = TrainingModel(shape)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    model.load_state_dict(tensors)
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))
