"""A model's configuration: what is read from a checkpoint, what is refused, and every message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.models.hf_config import read_model_config
from tests.checkpoints import FAMILIES, YARN, write_checkpoint

ORIGINAL = "original_max_position_embeddings"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def edit(directory: Path, changes: dict[str, Any], *, section: str | None = "text_config") -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(changes)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kwargs", [k for _, k in FAMILIES], ids=[n for n, _ in FAMILIES])
def test_reads_every_family(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    c = read_model_config(write_checkpoint(tmp_path, **kwargs))
    assert c.family == kwargs["family"]
    assert (c.num_layers, c.hidden_size, c.vocab_size) == (4, 128, 512)
    assert (c.num_q_heads, c.num_kv_heads, c.head_dim, c.rotary_dim) == (2, 1, 256, 64)
    assert (c.rope_theta, c.rms_norm_eps) == (1e7, 1e-6)
    nk, nv = kwargs["num_key_heads"], kwargs["num_value_heads"]
    assert (c.linear_num_key_heads, c.linear_num_value_heads) == (nk, nv)
    assert (c.linear_key_dim, c.linear_value_dim) == (nk * 128, nv * 128)
    assert c.linear_conv_dim == 2 * nk * 128 + nv * 128
    assert c.linear_proj_dim == c.linear_conv_dim + nv * 128 + 2 * nv
    assert (c.conv_kernel, c.qkv_dim) == (4, 6 * 256)
    assert c.is_full_attention == (False, False, False, True)
    assert (c.num_gdn_layers, c.num_attention_layers) == (3, 1)
    assert c.is_moe == (c.family != "qwen3_5")
    moe = (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, c.shared_expert_intermediate_size)
    assert moe == ((8, 4, 64, 64) if c.is_moe else (0, 0, 0, 0))
    assert c.intermediate_size == (0 if c.is_moe else 192)
    assert c.norm_topk_prob
    assert c.tie_word_embeddings == kwargs.get("tied", False)
    assert c.mtp_num_layers == 1
    assert (c.gate_activation, c.dtype, c.max_position_embeddings) == ("silu", "bfloat16", 4096)
    assert c.quantized == ("fp8_scale" in kwargs)
    assert c.eos_token_ids == (511,)
    assert c.generation_defaults == {}


def test_a_flat_export_is_the_same_model(tmp_path: Path) -> None:
    nested = write_checkpoint(tmp_path / "nested", "qwen3_5_moe")
    flat = write_checkpoint(tmp_path / "flat", "qwen3_5_moe", flat=True)
    assert read_model_config(nested) == read_model_config(flat)


def test_layer_pattern_from_interval_and_from_types(directory: Path) -> None:
    edit(directory, {"layer_types": None, "full_attention_interval": 2})
    assert read_model_config(directory).is_full_attention == (False, True, False, True)
    edit(directory, {"layer_types": ["full_attention"] + ["linear_attention"] * 3})
    assert read_model_config(directory).is_full_attention == (True, False, False, False)


def test_dense_qwen3_next(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_next")
    edit(directory, {"num_experts": 0}, section=None)
    config = read_model_config(directory)
    assert (config.is_moe, config.intermediate_size) == (False, 192)


def test_newer_rope_keys_of_qwen3_next(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_next")
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    edit(directory, {"rope_parameters": rope, "rope_theta": None}, section=None)
    config = read_model_config(directory)
    assert (config.rope_theta, config.rotary_dim) == (5e6, 128)


@pytest.mark.parametrize(("name", "meant"), [("swish", "silu"), ("silu", "silu"), ("sigmoid", "sigmoid")])
def test_output_gate(directory: Path, name: str, meant: str) -> None:
    edit(directory, {"output_gate_type": name})
    assert read_model_config(directory).gate_activation == meant


def test_no_mtp_layer(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, mtp=False)
    edit(directory, {"mtp_num_hidden_layers": 0})
    assert read_model_config(directory).mtp_num_layers == 0


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tokenizer=True)
    assert read_model_config(directory).eos_token_ids == (0, 2)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
    (directory / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}))
    config = read_model_config(directory)
    assert config.eos_token_ids == (0, 2, 7)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    edit(directory, {"eos_token_id": [9]}, section=None)
    assert read_model_config(directory).eos_token_ids == (0, 2, 7, 9)


def test_greedy_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert read_model_config(directory).generation_defaults == {"temperature": 0.0}


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, 'hidden_act must be "silu", got "gelu"; other activations are not supported'),
    ({"attention_bias": True}, "attention_bias must be false, got true; attention biases are not supported"),
    (
        {"attn_output_gate": False},
        "attn_output_gate must be true, got false; attention without its output gate",
    ),
    ({"use_sliding_window": True}, "use_sliding_window must be false, got true; sliding windows are not"),
    ({"sliding_window": 4096}, "sliding_window must be null, got 4096; sliding windows are not supported"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers must be [], got [1]; layers that mix"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2; layers that mix"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 0 or 1, got 2; heads of several layers"),
    ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers must be 0 or 1, got 3; heads of several"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings must be false, got true; an MTP"),
    (
        {"mamba_ssm_dtype": "bfloat16"},
        'mamba_ssm_dtype must be "float32", got "bfloat16"; the recurrent state',
    ),
    (
        {"linear_conv_kernel_dim": 3},
        "linear_conv_kernel_dim must be 4, got 3; convolutions of another length",
    ),
    ({"output_gate_type": "tanh"}, "output_gate_type must be silu, swish or sigmoid, got tanh; other gates"),
    (
        {"layer_types": ["mamba"] * 4},
        "layer_types must be full_attention or linear_attention, got ['mamba'];",
    ),
    ({"layer_types": ["full_attention"]}, "layer_types must have num_hidden_layers (4) entries, got 1; fix"),
    ({"head_dim": 96}, "head_dim must be 64, 128 or 256, got 96; other head sizes are not supported"),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads must be a multiple of 3 KV heads, got 2; fix config.json",
    ),
    ({"linear_num_key_heads": 4}, "linear_num_value_heads must be a multiple of 4 key heads, got 2; fix"),
    ({"hidden_size": None}, "hidden_size must be an integer of at least 1, got None; fix config.json"),
    ({"vocab_size": "512"}, "vocab_size must be an integer of at least 1, got '512'; fix config"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0; fix config.json"),
    ({"eos_token_id": 512}, "eos_token_id must be ids below vocab_size (512), got [512]; fix the checkpoint"),
    ({"dtype": "int8"}, "dtype must be bfloat16, float16 or float32, got int8; fix config.json"),
    (
        {"model_type": "qwen3_5_moe_text"},
        "text_config.model_type must belong to qwen3_5, got qwen3_5_moe_text;",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e7}},
        "rope_type must be default, linear or yarn, got longrope; other rope scalings are not supported",
    ),
    (
        {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e7}},
        "rope_type must be default, linear or yarn, got ['yarn']; other rope scalings are not supported",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling must be absent beside rope_parameters, got linear; keep one of the two, with",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, "factor": 0.5}},
        "factor must be at least 1, got 0.5; give factor, or original_max_position_embeddings below",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, "factor": "4"}},
        "factor must be a positive number, got '4'; fix config.json",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, "factor": None, ORIGINAL: 8192}},
        "factor must be at least 1, got 0.5; give factor, or original_max_position_embeddings below",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, ORIGINAL: 0}},
        "original_max_position_embeddings must be an integer of at least 1, got 0; fix config.json",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast must be at least beta_slow (2), got 1; fix config.json",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1e7, "truncate": 1}},
        "truncate must be true or false, got 1; fix config.json",
    ),
    (
        {"rope_parameters": YARN | {"rope_theta": 1}},
        "rope_theta must be above 1 with rope_type yarn, got 1.0; fix config.json",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor must give an even part of head_dim 256, got 1.5; fix config.json",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1e308}},
        "partial_rotary_factor must give an even part of head_dim 256, got 1e+308; fix config.json",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e6}, "rope_theta": 1e7}},
        "rope_parameters must be one for all layers, got ['full_attention']; other rotary embeddings for",
    ),
    (
        {"layer_types": None, "full_attention_interval": 8},
        "full_attention_interval must be at most num_hidden_layers (4), got 8; models without full",
    ),
    (
        {"layer_types": ["linear_attention"] * 4},
        "layer_types must name a full_attention layer, got none; models without full attention are not",
    ),
    ({"decoder_sparse_step": True}, "decoder_sparse_step must be 1, got true; layers that mix"),
    ({"rope_parameters": []}, "rope_parameters must be an object, got []; fix config.json"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'; fix config.json"),
    ({"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'; fix config.json"),
    ({"layer_types": 4}, "layer_types must be a list, got 4; fix config.json"),
    (
        {"layer_types": [["full_attention"]] * 4},
        "layer_types must be full_attention or linear_attention, got",
    ),
    ({"vocab_size": 10**12}, f"vocab_size must be at most {2**24}, got {10**12}; fix config.json"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1, got True; fix"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True; fix config.json"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan; fix config.json"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
    ({"dtype": []}, "dtype must be bfloat16, float16 or float32, got []; fix config.json"),
    ({"eos_token_id": "511"}, "eos_token_id must be an integer or a list of integers, got ['511']; fix the"),
    ({"eos_token_id": [[511]]}, "eos_token_id must be an integer or a list of integers, got [[511]]; fix"),
    ({"eos_token_id": True}, "eos_token_id must be an integer or a list of integers, got [True]; fix the"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[m.split(" must")[0] for _, m in REFUSALS])
def test_refused_by_name(directory: Path, changes: dict[str, Any], message: str) -> None:
    edit(directory, changes)
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        read_model_config(directory)
    assert "\n" not in str(error.value)


TOP_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": YARN}, "rope_scaling must be in text_config, got yarn outside it; move it there"),
    ({"rope_parameters": {"type": "linear"}}, "rope_parameters must be in text_config, got linear outside"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e6}}},
        "rope_parameters must be one for all layers, got ['full_attention']; other rotary embeddings for",
    ),
    ({"hidden_act": "gelu"}, 'hidden_act must be "silu", got "gelu"; other activations are not supported'),
    ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype must be "float32", got "bfloat16"; the recurrent'),
    ({"sliding_window": 4096}, "sliding_window must be null, got 4096; sliding windows are not supported"),
    ({"text_config": "x"}, "text_config must be an object, got 'x'; fix config.json"),
    ({"text_config": []}, "text_config must be an object, got []; fix config.json"),
    ({"model_type": []}, "model_type must be one of qwen3_next, qwen3_5, qwen3_5_text, qwen3_5_moe,"),
    ({"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'; fix config.json"),
    ({"eos_token_id": "511"}, "eos_token_id must be an integer or a list of integers, got ['511']; fix the"),
]


@pytest.mark.parametrize(
    ("changes", "message"), TOP_REFUSALS, ids=[m.split(" must")[0] for _, m in TOP_REFUSALS]
)
def test_refused_by_name_at_the_top_level(directory: Path, changes: dict[str, Any], message: str) -> None:
    edit(directory, changes, section=None)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_model_config(directory)


def test_other_sections_and_ignored_keys_do_not_matter_to_text(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5_moe")
    config = read_model_config(directory)
    vision = {"hidden_act": "gelu_pytorch_tanh", "attention_bias": True, "sliding_window": 8}
    edit(directory, vision | {"rope_parameters": {"rope_type": "yarn"}}, section="vision_config")
    edit(directory, {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, section=None)
    # transformers ignores it too.
    edit(directory, {"norm_topk_prob": False})
    assert read_model_config(directory) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "511"}, "eos_token_id must be an integer or a list of integers, got ['511']; fix"),
        ({"eos_token_id": [2, False]}, "eos_token_id must be an integer or a list of integers, got [2, Fals"),
        ({"temperature": "0.6"}, "temperature must be a number, got '0.6'; fix generation_config.json"),
        ({"top_k": True}, "top_k must be a number, got True; fix generation_config.json"),
    ],
)
def test_generation_config_refused_by_name(directory: Path, content: dict[str, Any], message: str) -> None:
    (directory / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_model_config(directory)


MOE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"shared_expert_intermediate_size": 32},
        "shared_expert_intermediate_size must equal moe_intermediate_size (64), got 32; the shared expert",
    ),
    (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok must be at most num_experts (8), got 9; fix config.json",
    ),
    ({"num_experts": 0}, "num_experts must be an integer of at least 1, got 0; fix config.json"),
]


@pytest.mark.parametrize(("changes", "message"), MOE_REFUSALS)
def test_experts_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5_moe")
    edit(directory, changes)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_model_config(directory)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTIZATION: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"quant_method": m},
            "quantization_config.quant_method must be fp8 or gptq or auto-round or awq or compressed-tensors "
            f"or modelopt, got {m}; use the bf16 or the FP8 release",
        )
        for m in ("bitsandbytes", "quark", None, 4)
    ),
    ({"quant_method": "fp8"}, "quantization_config.weight_block_size must be [128, 128], got null;"),
    (
        FP8 | {"weight_block_size": [64, 64]},
        "quantization_config.weight_block_size must be [128, 128], got [64",
    ),
    (FP8 | {"fmt": "e5m2"}, 'quantization_config.fmt must be "e4m3", got "e5m2";'),
    (
        FP8 | {"activation_scheme": "static"},
        'quantization_config.activation_scheme must be "dynamic", got "static"',
    ),
]


@pytest.mark.parametrize(("quantization", "message"), QUANTIZATION)
def test_quantization_refused_by_name(directory: Path, quantization: dict[str, Any], message: str) -> None:
    edit(directory, {"quantization_config": quantization}, section=None)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_model_config(directory)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.gguf must be a readable file, got .*No such file"):
        read_model_config(tmp_path / "model.gguf")
    with pytest.raises(
        ValueError,
        match=r"model must be a directory with a config.json, got .*; there is no such path, pass a Hugging",
    ):
        read_model_config(tmp_path / "nowhere")
    for name, remedy in (
        ("model.safetensors", "pass the directory of this file"),
        ("model.gguf.incomplete", "the name of a GGUF file must end in .gguf"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=re.escape(remedy)):
            read_model_config(tmp_path / name)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "Tiny-Q4_K_M.gguf").touch()
    with pytest.raises(ValueError, match=r"pass one of its GGUF files: Tiny-Q4_K_M\.gguf"):
        read_model_config(tmp_path / "files")
    unreadable = "must be a readable JSON file"
    for text, message in (
        ("{", unreadable),
        ("[" * 100_000, unreadable),
        ("[]", "must hold a JSON object, got list"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ValueError, match=r"^model_type must be one of qwen3_next, .*, got llama; other archi"
    ):
        read_model_config(tmp_path)


def test_eos_token_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tokenizer=True)
    for token, got in (('{"content": "<eos>"}', "'<eos>'"), ('["<eos>"]', r"\['<eos>'\]")):
        (directory / "tokenizer_config.json").write_text(f'{{"eos_token": {token}}}')
        with pytest.raises(ValueError, match=f"eos_token must be a token of tokenizer.json, got {got}; fix"):
            read_model_config(directory)
    (directory / "tokenizer.json").write_text('{"added_tokens": [{}], "model": []}')
    with pytest.raises(ValueError, match=r"eos_token must be a token of tokenizer.json"):
        read_model_config(directory)


def test_a_sound_number_of_layers(directory: Path) -> None:
    """The number is checked before anything of that length is made."""
    edit(directory, {"num_hidden_layers": 10**9, "layer_types": None})
    with pytest.raises(ValueError, match=r"^num_hidden_layers must be at most 4096, got 1000000000; fix"):
        read_model_config(directory)


def test_messages_are_bounded_and_print_what_they_show(directory: Path) -> None:
    edit(directory, {"hidden_act": "\x1b[2J\n" + "x" * 5_000_000})
    with pytest.raises(ValueError, match="hidden_act must be") as error:
        read_model_config(directory)
    text = str(error.value)
    assert len(text) < 1000
    assert text.isprintable()
    edit(directory, {"hidden_act": "silu", "dtype": "\ud800\x07"})
    with pytest.raises(ValueError, match=r"got \\ud800\\x07; fix config.json"):
        read_model_config(directory)
    for value in ("a" * 5_000_000, 10**5000, ["b"] * 10**6):
        with pytest.raises(ValueError, match=r"^max_batch must") as error:
            EngineConfig(max_batch=value)
        assert len(str(error.value)) < 1000
