"""Quantised checkpoints: every format's values are its codes times its scales, and decide the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.models.catalogue import describe_packed, read_stored
from compiled_mtp.models.formats.weight import PackedWeight
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import check_weights, load_weights
from tests.checkpoints import allocate, write_checkpoint
from tests.quantised import Packer, awq, fp8, gptq, int8, mxfp4, mxfp8, nvfp4, pack_quantized, quantise

GPTQ_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
AWQ_GEMM = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
LINEARS = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)$|^lm_head$|^mtp\.fc$"
)


def pack_config(
    group: int, bits: int = 4, *, symmetric: bool = True, actorder: str | None = None
) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group, "actorder": actorder}
    if group < 0:
        weights |= {"strategy": "channel", "group_size": None}
    return tensors_config("pack-quantized", weights)


def tensors_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mtp.*"],
        "kv_cache_scheme": None,
    }


SMALL: dict[str, Any] = {"num_layers": 2, "interval": 2, "vocab_size": 256}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]}

FORMATS: dict[str, tuple[Packer, dict[str, Any] | None]] = {
    "gptq": (gptq(), GPTQ_INT4),
    "gptq-g32-bf16": (gptq(32, dtype=torch.bfloat16), GPTQ_INT4 | {"group_size": 32}),
    "gptq-row": (gptq(4096), GPTQ_INT4 | {"group_size": -1}),
    "gptq-asym": (gptq(64, symmetric=False), GPTQ_INT4 | {"group_size": 64, "sym": False}),
    "gptq-8": (gptq(bits=8), GPTQ_INT4 | {"bits": 8}),
    "gptq-8-asym": (gptq(bits=8, symmetric=False), GPTQ_INT4 | {"bits": 8, "sym": False}),
    "gptq-v2": (gptq(version=2), GPTQ_INT4 | {"checkpoint_format": "gptq_v2"}),
    "gptq-v2-asym": (
        gptq(version=2, symmetric=False),
        GPTQ_INT4 | {"checkpoint_format": "gptq_v2", "sym": False},
    ),
    # The words of symmetric weights tell the version.
    "gptq-v2-unsaid": (gptq(version=2), GPTQ_INT4),
    "gptq-v2-8-unsaid": (gptq(version=2, bits=8), GPTQ_INT4 | {"bits": 8}),
    "gptq-no-config": (gptq(64), None),
    "gptq-act-order": (
        gptq(32, symmetric=False, version=2, act_order=True),
        GPTQ_INT4 | {"group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8-act-order": (
        gptq(64, 8, act_order=True),
        GPTQ_INT4 | {"bits": 8, "group_size": 64, "desc_act": True},
    ),
    "gptq-act-order-of-static-groups": (gptq(), GPTQ_INT4 | {"desc_act": True}),
    "auto-round-gptq": (
        gptq(with_indices=False, negative=True),
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round-gptq-asym": (
        gptq(with_indices=False, symmetric=False),
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": False},
    ),
    # AutoRound's plain packing stores zero points without an offset.
    "auto-round-asym": (
        gptq(with_indices=False, version=2, symmetric=False),
        AUTO_ROUND | {"packing_format": "auto_round", "sym": False},
    ),
    "auto-round-gptqmodel": (
        gptq(version=2, symmetric=False),
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
    ),
    "auto-round-unsaid": (gptq(version=2), AUTO_ROUND),
    "auto-round-mxfp4": (
        mxfp4(),
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "group_size": 32},
    ),
    "auto-round-fp8": (
        fp8("tensor", torch.bfloat16),
        AUTO_ROUND | {"bits": 8, "data_type": "fp", "group_size": 0, "fmt": "e4m3"},
    ),
    "auto-round-fp8-block": (
        fp8("block", torch.bfloat16),
        AUTO_ROUND
        | {"packing_format": "auto_round:fp8", "bits": 8, "data_type": "fp", "group_size": [128, 128]},
    ),
    "auto-round-awq": (awq(negative=True), AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "awq": (awq(), AWQ_GEMM),
    "awq-g32": (awq(32), AWQ_GEMM | {"group_size": 32}),
    "pack": (pack_quantized(), pack_config(128)),
    "pack-g64": (pack_quantized(64), pack_config(64)),
    "pack-g32": (pack_quantized(32, dtype=torch.float16), pack_config(32)),
    "pack-channel": (pack_quantized(-1), pack_config(-1)),
    "pack-asym": (pack_quantized(symmetric=False), pack_config(128, symmetric=False)),
    "pack-channel-asym": (pack_quantized(-1, symmetric=False), pack_config(-1, symmetric=False)),
    "pack-act-order": (
        pack_quantized(32, symmetric=False, act_order=True),
        pack_config(32, symmetric=False, actorder="group"),
    ),
    "pack-8": (pack_quantized(bits=8), pack_config(128, 8)),
    "pack-8-asym": (pack_quantized(32, 8, symmetric=False), pack_config(32, 8, symmetric=False)),
    "fp8-channel": (fp8(), tensors_config("float-quantized", FLOAT8 | {"strategy": "channel"})),
    "fp8-channel-bf16": (
        fp8(dtype=torch.bfloat16),
        tensors_config("float-quantized", FLOAT8 | {"strategy": "channel"}),
    ),
    "fp8-tensor": (fp8("tensor"), tensors_config("float-quantized", FLOAT8 | {"strategy": "tensor"})),
    "fp8-block": (
        fp8("block", torch.bfloat16),
        tensors_config("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}),
    ),
    "fp8-dense": (
        fp8(),
        tensors_config("float-quantized", FLOAT8 | {"strategy": "channel"})
        | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}},
    ),
    "int8-channel": (int8(), tensors_config("int-quantized", INT8 | {"strategy": "channel"})),
    "int8-tensor": (int8("tensor"), tensors_config("int-quantized", INT8 | {"strategy": "tensor"})),
    "modelopt-fp8": (fp8("tensor", static=True), MODELOPT),
    "modelopt-fp8-block": (fp8("block", with_axes=True), MODELOPT | {"quant_algo": "fp8_pb_wo"}),
    "modelopt-fp8-row": (fp8(), MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "nvfp4": (
        nvfp4(),
        tensors_config("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}),
    ),
    "modelopt-nvfp4": (nvfp4(modelopt=True), MODELOPT),
    "mxfp8": (
        mxfp8(),
        tensors_config("mxfp8-quantized", FLOAT8 | {"strategy": "group", "group_size": 32}),
    ),
    "modelopt-mxfp8": (mxfp8(), MODELOPT | {"quant_algo": "MXFP8"}),
    "mxfp4": (
        mxfp4(),
        tensors_config("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32}),
    ),
}


def every_linear(packer: Packer) -> Callable[[str], Packer | None]:
    return lambda module: packer if LINEARS.search(module) else None


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    config = read_model_config(directory)
    check_weights(config, directory, {}, dtype, with_mtp=True, free_bytes=2**40)
    parameters = allocate(config, dtype=dtype)
    load_weights(config, directory, parameters, with_mtp=True)
    return parameters


def assert_equal(some: dict[str, Any], others: dict[str, Any]) -> None:
    assert some.keys() == others.keys()
    for name, parameter in some.items():
        assert torch.equal(parameter, others[name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_fills_the_parameters_with_its_values(tmp_path: Path, name: str) -> None:
    """Equal to the bit; the 192 columns of down end inside a group of 128."""
    packer, config = FORMATS[name]
    directory = write_checkpoint(tmp_path / "model", **SMALL)
    twin = quantise(directory, every_linear(packer), config)
    assert_equal(load(directory), load(twin))
    described = describe_packed(read_stored(directory))
    assert bool(described) == (not name.endswith("fp8-block")), described


@pytest.mark.parametrize("name", ["gptq-g32-bf16", "awq", "nvfp4", "fp8-channel"])
def test_values_are_rounded_once(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    directory = write_checkpoint(tmp_path / "model", **SMALL)
    twin = quantise(directory, every_linear(packer), config)
    assert_equal(load(directory, torch.bfloat16), load(twin, torch.bfloat16))


FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3_5", "num_value_heads": 3, "sharded": True, "mtp_file": True},
    "moe": {"family": "qwen3_5_moe", "trunk_experts": "per_expert", "mtp_experts": "per_expert"},
    "next": {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4},
}
MIXED = (
    *(gptq(32), awq(32), pack_quantized(32), pack_quantized(-1, 8), fp8(), fp8("tensor")),
    *(nvfp4(), nvfp4(modelopt=True), mxfp4(), mxfp8(), int8()),
)


def mixed(module: str) -> Packer | None:
    """Return another format for each linear; some stay plain."""
    if not LINEARS.search(module):
        return None
    place = sum(map(ord, module)) % (len(MIXED) + 1)
    return MIXED[place] if place < len(MIXED) else None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_in_another_format(tmp_path: Path, family: str) -> None:
    """Parts of merged weights, experts, the MTP layer and the head, in shards and in a separate file."""
    directory = write_checkpoint(tmp_path / family, **FAMILIES[family])
    twin = quantise(directory, mixed)
    stored = read_stored(directory)
    assert len({weight.dtype for weight in stored.values()} - {"BF16", "F32"}) >= 8
    assert "MTP head: " in describe_packed(stored)
    assert_equal(load(directory), load(twin))


PARTS: tuple[tuple[slice, slice], ...] = (
    (slice(0, 192), slice(0, 256)),
    (slice(3, 4), slice(5, 6)),
    (slice(7, 177), slice(63, 129)),
    (slice(8, 16), slice(128, 256)),
    (slice(191, 192), slice(0, 256)),
)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith("fp8-block")])
def test_any_region_is_that_of_the_whole(tmp_path: Path, name: str) -> None:
    """Rows and columns that begin and end inside words and groups, as for ranks and merged parts."""
    packer, config = FORMATS[name]
    weight = torch.randn(192, 256, generator=torch.Generator().manual_seed(1))
    parts, values = packer(weight.numpy())
    save_file({f"model.layers.0.x.{s}": t for s, t in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    (stored,) = read_stored(tmp_path).values()
    assert stored.shape == (192, 256)
    for region in PARTS:
        part = stored.read(region)
        assert part.dtype == torch.float32
        assert torch.equal(part, values[region]), region


def test_few_values_are_in_float32_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path / "model", **SMALL)
    twin = quantise(directory, mixed)
    sizes, read = [], PackedWeight.read

    def counted(weight: PackedWeight, *arguments: Any) -> torch.Tensor:
        values = read(weight, *arguments)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(PackedWeight, "read", counted)
    monkeypatch.setattr("compiled_mtp.models.weights._VALUES_AT_ONCE", 5000)
    assert_equal(load(directory), load(twin))
    assert len(sizes) > 50
    assert max(sizes) <= 5000


def test_a_quantised_head_is_not_tied(tmp_path: Path) -> None:
    """A stored head that differs from the embedding is used, packed or not."""
    directory = write_checkpoint(tmp_path / "model", tied=True, **SMALL)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    twin = quantise(directory, lambda module: nvfp4() if module == "lm_head" else None)
    assert read_model_config(twin.with_name("model")).tie_word_embeddings is False
    assert_equal(load(directory), load(twin))


def test_embedding_and_gates_may_be_quantised(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen3_5_moe", **SMALL)
    chosen = re.compile(r"embed_tokens$|mlp\.gate$|shared_expert_gate$|in_proj_[ab]$")
    twin = quantise(directory, lambda module: pack_quantized(32) if chosen.search(module) else None)
    assert_equal(load(directory), load(twin))
