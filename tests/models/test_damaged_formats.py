"""Damaged and unsupported quantised checkpoints: one line names the tensor, before memory is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.cli.main import main
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import check_weights
from tests.checkpoints import write_checkpoint
from tests.quantised import Packer, awq, fp8, gptq, mxfp4, mxfp8, nvfp4, pack_quantized, quantise

TINY: dict[str, Any] = {"num_layers": 1, "interval": 1, "vocab_size": 64, "hidden_size": 128}
X = "mtp.layers.0.mlp.up_proj"
FULL = "model.language_model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], None]
GPTQ_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def check(directory: Path, **options: Any) -> None:
    config = read_model_config(directory)
    given: dict[str, Any] = {"with_mtp": True, "free_bytes": 2**40} | options
    check_weights(config, directory, {}, torch.float32, **given)


def make(
    directory: Path,
    packer: Packer,
    config: dict[str, Any] | None = None,
    modules: tuple[str, ...] = (X,),
) -> Path:
    write_checkpoint(directory / "model", **TINY)
    quantise(directory / "model", lambda module: packer if module in modules else None, config)
    return directory / "model"


def damage(directory: Path, change: Damage) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")


def drop(suffix: str, module: str = X) -> Damage:
    def change(tensors: Tensors) -> None:
        del tensors[f"{module}.{suffix}"]

    return change


def put(suffix: str, index: tuple[int, ...], value: float, module: str = X) -> Damage:
    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{module}.{suffix}"]
        (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)[index] = value

    return change


def cut(suffix: str, rows: int | None, columns: int | None = None, module: str = X) -> Damage:
    def change(tensors: Tensors) -> None:
        tensors[f"{module}.{suffix}"] = tensors[f"{module}.{suffix}"][:rows, :columns].clone()

    return change


def cast(suffix: str, dtype: torch.dtype) -> Damage:
    return lambda tensors: tensors.update({f"{X}.{suffix}": tensors[f"{X}.{suffix}"].to(dtype)})


def shuffled(tensors: Tensors) -> None:
    """Reorder by activation: columns of a group are scattered."""
    tensors[f"{X}.g_idx"] = torch.arange(128, dtype=torch.int32) % 4


def both(tensors: Tensors) -> None:
    tensors[f"{X}.weight"] = torch.zeros(192, 128, dtype=torch.bfloat16)


def ask(suffix: str, tensor: torch.Tensor, module: str = X) -> Damage:
    return lambda tensors: tensors.update({f"{module}.{suffix}": tensor})


ASYM: dict[str, Any] = GPTQ_INT4 | {"sym": False, "group_size": 32}
PACK = pack_quantized(32, symmetric=False)
CASES: dict[str, tuple[Packer, dict[str, Any] | None, Damage, str]] = {
    "gptq no scales": (gptq(), GPTQ_INT4, drop("scales"), "scales must be stored beside mtp"),
    "gptq no zeros": (gptq(), GPTQ_INT4, drop("qzeros"), "qzeros must be stored beside mtp"),
    "gptq no codes": (gptq(), GPTQ_INT4, drop("qweight"), "missing tensors: mtp.layers.0.mlp.up_proj.weight"),
    "gptq short codes": (gptq(32), ASYM, cut("qweight", 12), "as many groups of 96 columns as a group_size"),
    "gptq narrow codes": (gptq(32), ASYM, cut("qweight", None, 184), "qweight must be packed as GPTQ or AWQ"),
    "gptq short scales": (gptq(32), ASYM, cut("scales", 3), "qweight must be packed as GPTQ or AWQ"),
    "gptq short indices": (
        gptq(32),
        ASYM,
        ask("g_idx", torch.zeros(64, dtype=torch.int32)),
        "g_idx must have the shape [128], got [64]",
    ),
    "gptq other group": (gptq(64), GPTQ_INT4, lambda _: None, "as a group_size of [128] gives, got 2"),
    "gptq act-order that config.json does not name": (
        gptq(32),
        ASYM,
        shuffled,
        "g_idx must put column k into group k // 32, got another order; if that is right, config.json must",
    ),
    "gptq index past the groups": (
        gptq(32),
        ASYM | {"desc_act": True},
        put("g_idx", (77,), 4),
        "g_idx must lie in 0 to 3, got [4]; download",
    ),
    "gptq negative index": (
        gptq(32),
        ASYM | {"desc_act": True},
        put("g_idx", (5,), -1),
        "g_idx must lie in 0 to 3, got [-1]; download",
    ),
    "gptq 3 bits": (
        gptq(32),
        ASYM,
        ask("qzeros", torch.zeros(4, 18, dtype=torch.int32)),
        "qweight must have 4 or 8 bits, got 3; other packings",
    ),
    "gptq NaN scale": (gptq(32), ASYM, put("scales", (1, 5), float("nan")), "scales must be finite, got NaN"),
    "gptq scale of integers": (
        gptq(),
        GPTQ_INT4,
        cast("scales", torch.int32),
        "scales must be of dtype BF16",
    ),
    "gptq marlin": (
        gptq(),
        GPTQ_INT4,
        ask("qweight", torch.zeros(8, 384, dtype=torch.int32)),
        "other packings (gemv, gemv_fast, marlin)",
    ),
    "gptq not symmetric": (gptq(), GPTQ_INT4, put("qzeros", (0, 3), 0), "qzeros must hold 7 alone"),
    "gptq version": (
        gptq(version=2),
        GPTQ_INT4 | {"checkpoint_format": "gptq"},
        lambda _: None,
        "qzeros must hold 7 alone, as symmetric weights of this version do, got [8]; correct sym or",
    ),
    "awq gemv": (
        awq(32),
        None,
        ask("qweight", torch.zeros(192, 16, dtype=torch.int32)),
        "other packings (gemv, gemv_fast, marlin)",
    ),
    "awq gemv_fast": (
        awq(32),
        None,
        ask("qweight", torch.zeros(48, 128, dtype=torch.int16)),
        "other packings (gemv, gemv_fast, marlin)",
    ),
    "awq short zeros": (awq(32), None, cut("qzeros", 3), "qzeros must have the shape [4, 24], got [3, 24]"),
    "awq infinite scale": (awq(32), None, put("scales", (0, 0), float("inf")), "scales must be finite"),
    "stored twice": (
        awq(32),
        None,
        both,
        "must be stored in one format, got mtp.layers.0.mlp.up_proj.weight",
    ),
    "pack no shape": (PACK, None, drop("weight_shape"), "weight_shape must be stored beside mtp"),
    "pack no scale": (PACK, None, drop("weight_scale"), "weight_scale must be stored beside mtp"),
    "pack other rows": (PACK, None, put("weight_shape", (0,), 96), "must begin with 192 rows, got 96"),
    "pack 2 bits": (PACK, None, put("weight_shape", (1,), 256), "4 or 8 bits in 16 words a row"),
    "pack vast": (PACK, None, put("weight_shape", (1,), 10**15), "4 or 8 bits in 16 words a row"),
    "pack short scale": (PACK, None, cut("weight_scale", 100), "weight_scale must have the shape [192, 4]"),
    "pack short zeros": (
        PACK,
        None,
        cut("weight_zero_point", 23),
        "weight_zero_point must have the shape [24,",
    ),
    "pack act-order": (
        PACK,
        None,
        ask("weight_g_idx", torch.arange(128, dtype=torch.int32).flip(0) // 32),
        "weight_g_idx must put column k into group k // 32",
    ),
    "pack odd groups": (
        pack_quantized(48),
        None,
        lambda _: None,
        "must hold the groups of 128 columns, got 3",
    ),
    "fp8 no scale": (
        fp8(),
        None,
        drop("weight_scale"),
        "missing tensors: mtp.layers.0.mlp.up_proj.weight_sc",
    ),
    "fp8 short scale": (
        fp8(),
        None,
        cut("weight_scale", 100),
        "one for each of 192 rows, or one for each bl",
    ),
    "fp8 NaN scale": (fp8(), None, put("weight_scale", (3, 0), float("nan")), "weight_scale must be finite"),
    "nvfp4 no scale": (nvfp4(), None, drop("weight_scale"), "weight_scale must be stored beside mtp"),
    "nvfp4 no factor": (nvfp4(), None, drop("weight_global_scale"), "weight_global_scale must be stored"),
    "nvfp4 zero factor": (nvfp4(), None, put("weight_global_scale", (0,), 0.0), "must be positive, got 0.0"),
    "nvfp4 NaN scale": (nvfp4(), None, put("weight_scale", (3, 1), 0x7F), "weight_scale must be finite"),
    "nvfp4 short codes": (nvfp4(), None, cut("weight_packed", None, 56), "weight_scale must have the shape"),
    "modelopt no factor": (
        nvfp4(modelopt=True),
        None,
        drop("weight_scale_2"),
        "weight_scale_2 must be stored",
    ),
    "modelopt no scale": (nvfp4(modelopt=True), None, drop("weight_scale"), "weight_scale must be stored be"),
    "mxfp8 NaN": (mxfp8(), None, put("weight_scale", (2, 2), 255), "must be at most 254, got 255; download"),
    "mxfp8 short scale": (
        mxfp8(),
        None,
        cut("weight_scale", None, 3),
        "must have the shape [192, 4], got [192,",
    ),
    "mxfp4 small": (
        mxfp4(),
        None,
        put("weight_scale", (2, 2), 1),
        "weight_scale must lie in 2 to 252, got [1",
    ),
    "mxfp4 NaN": (mxfp4(), None, put("weight_scale", (2, 2), 255), "must lie in 2 to 252, got [255]"),
    "other columns": (
        nvfp4(),
        None,
        lambda tensors: tensors.update(
            {f"{X}.{s}": t for s, t in nvfp4()(torch.randn(192, 64).numpy())[0].items()}
        ),
        "mtp.layers.0.mlp.up_proj.weight_packed of shape [192, 64] for [192, 128]",
    ),
    "other part": (
        nvfp4(),
        None,
        ask("weight_zero_point", torch.zeros(1)),
        "unused tensors: mtp.layers.0.mlp",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_in_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    packer, config, change, message = CASES[name]
    directory = make(tmp_path, packer, config)
    damage(directory, change)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check(directory)
    assert X in str(error.value)
    assert "\n" not in str(error.value)
    assert main(["inspect", str(directory), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"error: {error.value}\n"


def test_an_incomplete_head_is_named(tmp_path: Path) -> None:
    directory = make(tmp_path, gptq(), GPTQ_INT4)
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        damage(directory, drop(suffix))
    with pytest.raises(ValueError, match=rf"missing tensors: {X}.weight in "):
        check(directory)


def test_memory_is_that_of_the_dequantised_weights(tmp_path: Path) -> None:
    directory = make(tmp_path, gptq(), GPTQ_INT4, (X, FULL))
    needed = re.compile(r"^free memory must hold (\S+ GiB of weights)( \(.*\))?, got 0.0 GiB for ")
    found = []
    for each in (directory, directory.with_name("model-plain")):
        with pytest.raises(ValueError, match=needed) as error:
            check(each, free_bytes=1)
        match = needed.match(str(error.value))
        assert match is not None
        found.append(match.groups())
    assert found[0][0] == found[1][0]
    text = "1 in GPTQ int4 (version 1), groups of 128"
    assert [words for _, words in found] == [f" ({text}; MTP head: {text}, multiplied out)", None]


def test_scales_of_keys_and_values_are_skipped(tmp_path: Path) -> None:
    directory = make(tmp_path, fp8("tensor", static=True))
    attention = "model.language_model.layers.0.self_attn"
    names = [f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"]
    damage(directory, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in names}))
    tensors = load_file(directory / "model.safetensors")
    assert {f"{X}.input_scale", *names} <= tensors.keys()
    check(directory)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"bits": 4, "group_size": 64, "mode": "affine"},
        "quantization_config.quant_method must be fp8 or gptq o",
    ),
    ({"quant_method": "gptq", "bits": "4"}, "quantization_config.bits must be 4 or 8, got '4'; use the bf16"),
    ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits must be 4 or 8, got 3; use the bf16"),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*lm_head$": {"bits": 2}}},
        "quantization_config.bits must be 4 or 8, got 2;",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        'quantization_config.checkpoint_format must be "gptq" or "gptq_v2", got "marlin";',
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": "128"},
        "quantization_config.group_size must be -1 or a positive integer, got '128'; fix config.json",
    ),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:awq:marlin"},
        'quantization_config.packing_format must be "auto_round:auto_gptq" or "auto_round:auto_awq" or ',
    ),
    (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 2}}},
        "quantization_config.bits must be 4 or 8, got 2;",
    ),
    *(
        (
            {"quant_method": "awq", "bits": 4, "version": version},
            f"quantization_config.version must be gemm, got {version}; ",
        )
        for version in ("gemv", "gemv_fast", "marlin")
    ),
    ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "quantization_config.bits must be 4, got 8;"),
    (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        'quantization_config.format must be "pack-quantized" or ',
    ),
    (
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
        "quantization_config.transform_config must be {}, got ",
    ),
    (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "quantization_config.sparsity_config must be {}, got ",
    ),
    *(
        (
            {"quant_method": "auto-round", "bits": 4, key: {"hadamard_type": "random_hadamard"}},
            f"quantization_config.{key} must be {{}}, got ",
        )
        for key in ("rotation_config", "spinquant_config")
    ),
    (
        {"quant_method": "auto-round", "bits": 4, "data_type": "mx_int", "packing_format": "auto_round"},
        'quantization_config.data_type must be "int" or "fp" or ',
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}},
        },
        "quantization_config.num_bits must be 4 or 8, got 3;",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quantization_config.quant_algo must be FP8 or FP8_PER_CHANNEL_PER_TOKEN or FP8_PB_WO or ",
    ),
    (
        {"quant_method": "modelopt", "quantized_layers": {"lm_head": {"quant_algo": "INT8"}}},
        "quantization_config.quant_algo must be FP8 or ",
    ),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), **TINY)


@pytest.mark.parametrize(("section", "message"), CONFIGS)
def test_a_config_of_an_unsupported_computation_is_refused(
    plain: Path, section: dict[str, Any], message: str
) -> None:
    file = plain / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"quantization_config": section}))
    try:
        with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
            read_model_config(plain)
        assert "\n" not in str(error.value)
    finally:
        file.write_text(before)


@pytest.mark.parametrize(
    "section",
    [
        {"producer": {"name": "modelopt", "version": "0.27.1"}, "quant_algo": "NVFP4"},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": None, "sym": None}}},
        {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen"},
    ],
)
def test_a_config_that_leaves_much_out_is_read(plain: Path, section: dict[str, Any]) -> None:
    file = plain / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"quantization_config": section}))
    try:
        assert read_model_config(plain).mtp_num_layers == 1
    finally:
        file.write_text(before)


def test_modelopts_own_file_is_read(plain: Path) -> None:
    own = plain / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    read_model_config(plain)
    own.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ValueError, match=r"^hf_quant_config.json: quant_algo must be FP8 or .*W4A8_AWQ;"):
        read_model_config(plain)
    own.unlink()
