"""The loader: every layout fills the right parameters; missing, unused and misshapen tensors are refused."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.engine import Engine
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import FP8
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from compiled_mtp.request import SamplingParams
from tests.checkpoints import FAMILIES, FP8_FAMILIES, allocate, read_stored, write_checkpoint
from tests.models.stored_files import layout_of, rewrite

CPU = torch.device("cpu")


def expected_layer(config: ModelConfig, s: dict[str, torch.Tensor], p: str, full: bool) -> dict[str, Any]:
    """Return a layer's parameters, made from the stored tensors by whole-tensor operations."""
    c, want = config, {}
    want["input_norm.weight"] = s[p + "input_layernorm.weight"]
    want["post_norm.weight"] = s[p + "post_attention_layernorm.weight"]
    if full:
        a = p + "self_attn."
        want["mixer.qkv.weight"] = torch.cat([s[f"{a}{n}_proj.weight"] for n in "qkv"])
        want["mixer.q_norm"], want["mixer.k_norm"] = s[a + "q_norm.weight"], s[a + "k_norm.weight"]
        want["mixer.o_proj.weight"] = s[a + "o_proj.weight"]
    else:
        a = p + "linear_attn."
        if c.family == "qwen3_next":
            nk, r = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
            sizes = [c.linear_key_head_dim] * 2 + [r * c.linear_value_head_dim] * 2
            groups = s[a + "in_proj_qkvz.weight"].unflatten(0, (nk, -1)).split(sizes, dim=1)
            gates = s[a + "in_proj_ba.weight"].unflatten(0, (nk, -1)).split([r, r], dim=1)
            want["mixer.in_proj.weight"] = torch.cat([g.flatten(0, 1) for g in (*groups, *gates)])
        else:
            want["mixer.in_proj.weight"] = torch.cat(
                [s[f"{a}in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a")]
            )
        want["mixer.conv_weight"] = s[a + "conv1d.weight"].squeeze(1)
        want["mixer.a_log"], want["mixer.dt_bias"] = s[a + "A_log"], s[a + "dt_bias"]
        want["mixer.norm_weight"], want["mixer.out_proj.weight"] = (
            s[a + "norm.weight"],
            s[a + "out_proj.weight"],
        )
    m = p + "mlp."
    if c.is_moe:
        want["ffn.router.weight"] = torch.cat([s[m + "gate.weight"], s[m + "shared_expert_gate.weight"]])
        if m + "experts.down_proj" in s:
            gate_up, down = s[m + "experts.gate_up_proj"], s[m + "experts.down_proj"]
        else:
            one = [m + f"experts.{e}." for e in range(c.num_experts)]
            gate_up = torch.stack(
                [torch.cat([s[n + "gate_proj.weight"], s[n + "up_proj.weight"]]) for n in one]
            )
            down = torch.stack([s[n + "down_proj.weight"] for n in one])
        shared = [s[m + f"shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down")]
        want["ffn.gate_up"] = torch.cat([gate_up, torch.cat(shared[:2])[None]])
        want["ffn.down"] = torch.cat([down, shared[2][None]])
    else:
        want["ffn.gate_up.weight"] = torch.cat([s[m + "gate_proj.weight"], s[m + "up_proj.weight"]])
        want["ffn.down.weight"] = s[m + "down_proj.weight"]
    return want


def expected(config: ModelConfig, directory: Path) -> dict[str, torch.Tensor]:
    stored = {}
    for name, w in read_stored(directory).items():
        stored[re.sub(r"^model\.(language_model\.)?", "", name)] = w.float()
    want = {"embed.weight": stored["embed_tokens.weight"], "norm.weight": stored["norm.weight"]}
    if not config.tie_word_embeddings:
        want["lm_head.weight"] = stored["lm_head.weight"]
    for i, full in enumerate(config.is_full_attention):
        p = f"layers.{i}."
        want |= {p + n: w for n, w in expected_layer(config, stored, p, full).items()}
    if "mtp.fc.weight" in stored:
        want["mtp.fc.weight"], want["mtp.norm.weight"] = stored["mtp.fc.weight"], stored["mtp.norm.weight"]
        want["mtp.norm_embedding.weight"] = stored["mtp.pre_fc_norm_embedding.weight"]
        want["mtp.norm_hidden.weight"] = stored["mtp.pre_fc_norm_hidden.weight"]
        layer = expected_layer(config, stored, "mtp.layers.0.", True)
        want |= {"mtp.layer." + n: w for n, w in layer.items()}
    return want


def check_loads(directory: Path, dtype: torch.dtype = torch.float32) -> None:
    config = read_model_config(directory)
    parameters = allocate(config, dtype=dtype)
    load_weights(config, directory, parameters, with_mtp=True)
    want = expected(config, directory)
    assert parameters.keys() == want.keys()
    for name, w in want.items():
        assert torch.equal(parameters[name], w.to(parameters[name].dtype)), name


LAYOUTS = [
    *FAMILIES,
    ("flat", {"family": "qwen3_5", "flat": True}),
    ("flat-moe", {"family": "qwen3_5_moe", "flat": True, "trunk_experts": "per_expert"}),
    ("moe-mixed-2", {"family": "qwen3_5_moe", "trunk_experts": "per_expert", "mtp_experts": "stacked"}),
    ("sharded-mtp", {"family": "qwen3_5", "sharded": True, "mtp_file": True}),
    ("dense-fp8", {"family": "qwen3_5", "fp8_scale": torch.bfloat16, "sharded": True}),
]


@pytest.mark.parametrize("kwargs", [k for _, k in LAYOUTS], ids=[n for n, _ in LAYOUTS])
def test_every_layout_fills_every_parameter(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    check_loads(write_checkpoint(tmp_path, **kwargs))


def test_fp8_rounds_once_to_bfloat16(tmp_path: Path) -> None:
    check_loads(write_checkpoint(tmp_path, "qwen3_next", fp8_scale=torch.float32), torch.bfloat16)


def kept_in_layer(config: ModelConfig, full: bool) -> set[str]:
    mixer = ("qkv.weight", "o_proj.weight") if full else ("in_proj.weight", "out_proj.weight")
    ffn = ("gate_up", "down") if config.is_moe else ("gate_up.weight", "down.weight")
    return {f"mixer.{name}" for name in mixer} | {f"ffn.{name}" for name in ffn}


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("kwargs", [k for _, k in FP8_FAMILIES], ids=[n for n, _ in FP8_FAMILIES])
def test_kept_fp8_is_the_stored_fp8(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    directory = write_checkpoint(tmp_path, **kwargs)
    config = read_model_config(directory)
    formats = read_formats(config, directory, CPU, "w8a16")
    layers = [(f"layers.{i}.", full) for i, full in enumerate(config.is_full_attention)]
    layers.append(("mtp.layer.", True))
    assert formats.keys() == {
        prefix + name for prefix, full in layers for name in kept_in_layer(config, full)
    }
    assert formats == read_formats(config, None, CPU, "w8a16")
    parameters = allocate(config, dtype=torch.bfloat16, formats=formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats)
    assert {n for n, p in parameters.items() if p.dtype == torch.float8_e4m3fn} == formats.keys()
    assert {n for n, p in parameters.items() if n.endswith("_scale")} == {n + "_scale" for n in formats}
    want = expected(config, directory)
    for name in formats:
        weight, scale = parameters.pop(name), parameters.pop(name + "_scale")
        assert scale.dtype == torch.float32
        if weight.dim() == 2:
            whole = FP8.dequantize(weight, scale, torch.float32)
        else:
            pairs = zip(weight, scale, strict=True)
            whole = torch.stack([FP8.dequantize(*pair, torch.float32) for pair in pairs])
        gates = parameters.pop(name.replace("in_proj", "ba_proj"), None) if "in_proj" in name else None
        if gates is not None:
            assert gates.dtype == torch.bfloat16
            whole = torch.cat((whole, gates.float()))
        assert torch.equal(whole, want.pop(name)), name
    assert parameters.keys() == want.keys()
    for name, w in want.items():
        assert torch.equal(parameters[name], w.to(parameters[name].dtype)), name


@pytest.mark.usefixtures("keeps")
def test_parts_that_cannot_be_merged_in_fp8_are_dequantised(tmp_path: Path) -> None:
    """Parts that do not begin at a block of 128 rows, and merged weights with a part that is not FP8."""
    directory = write_checkpoint(tmp_path / "dense", fp8_scale=torch.bfloat16)
    rewrite(directory, dequantized(directory, "mtp.layers.0.self_attn.k_proj.weight"))
    config = read_model_config(directory)
    formats = read_formats(config, directory, CPU, "w8a16")
    layers = {f"layers.{i}": kept_in_layer(config, full) for i, full in enumerate(config.is_full_attention)}
    layers["mtp.layer"] = kept_in_layer(config, True) - {"mixer.qkv.weight"}
    # Gate and up have 192 rows.
    assert formats.keys() == {
        f"{p}.{n}" for p, names in layers.items() for n in names - {"ffn.gate_up.weight"}
    }
    parameters = allocate(config, formats=formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats)
    want = expected(config, directory)
    for name in ("layers.0.ffn.gate_up.weight", "mtp.layer.mixer.qkv.weight"):
        assert torch.equal(parameters[name], want[name])

    # Experts of 64 rows: neither stack is kept, since the operator takes both in FP8 or none.
    directory = write_checkpoint(tmp_path / "moe", "qwen3_5_moe", fp8_scale=torch.bfloat16)
    assert not any("ffn" in n for n in read_formats(read_model_config(directory), directory, CPU, "w8a16"))
    # One expert of one layer is in bfloat16.
    directory = write_checkpoint(tmp_path / "one", **dict(FP8_FAMILIES)["moe"])
    prefix = "model.language_model.layers.1."
    rewrite(directory, dequantized(directory, prefix + "mlp.experts.3.down_proj.weight"))
    rewrite(directory, dequantized(directory, prefix + "linear_attn.in_proj_z.weight"))
    config = read_model_config(directory)
    formats = read_formats(config, directory, CPU, "w8a16")
    assert {n for n in formats if n.startswith("layers.1.")} == {"layers.1.mixer.out_proj.weight"}
    parameters = allocate(config, formats=formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats)
    want = expected(config, directory)
    for name in ("ffn.gate_up", "ffn.down", "mixer.in_proj.weight"):
        assert torch.equal(parameters["layers.1." + name], want["layers.1." + name])


def test_nothing_is_kept_on_a_cpu_or_of_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = write_checkpoint(tmp_path / "fp8", fp8_scale=torch.float32)
    assert not read_formats(read_model_config(quantized), quantized, CPU, "w8a16")
    cuda = torch.device("cuda", 0)
    for capability, is_kept in (((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert bool(read_formats(read_model_config(quantized), quantized, cuda, "w8a16")) == is_kept
    plain = write_checkpoint(tmp_path / "plain")
    assert not read_formats(read_model_config(plain), plain, cuda, "w8a16")
    assert not read_formats(read_model_config(plain), None, cuda, "w8a16")


def test_a_missing_or_misshapen_scale_of_a_kept_weight_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, **dict(FP8_FAMILIES)["dense"])
    config = read_model_config(directory)
    formats = read_formats(config, None, CPU, "w8a16")
    name = "mtp.layers.0.self_attn.k_proj.weight_scale_inv"
    rewrite(directory, {name: torch.ones(1, 1)})
    with pytest.raises(ValueError, match=r"k_proj.weight_scale_inv of shape \[1, 1\] for \[2, 2\] in"):
        load_weights(config, directory, allocate(config, formats=formats), with_mtp=True, formats=formats)
    rewrite(directory, {name: None})
    with pytest.raises(ValueError, match=f"missing tensors: {name} in"):
        load_weights(config, directory, allocate(config, formats=formats), with_mtp=True, formats=formats)


def test_stacked_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5_moe")
    name = "mtp.layers.0.mlp.experts.down_proj"
    weight = load_file(directory / "model.safetensors")[name].to(torch.float8_e4m3fn)
    rewrite(directory, {name: weight, name + "_scale_inv": torch.ones(8, 1, 1)})
    assert f"{name} of dtype F8_E4M3 for BF16 or F16 or F32" in load_error(directory)


def test_dequantize_partial_blocks() -> None:
    weight = torch.ones(130, 300).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    out = FP8.dequantize(weight, scale, torch.float32)
    for (row, column), value in {
        (0, 0): 1,
        (127, 128): 2,
        (127, 299): 3,
        (128, 127): 4,
        (129, 256): 6,
    }.items():
        assert out[row, column] == value


def test_pieces_of_a_layout_do_not_overlap(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_next", num_key_heads=2, num_value_heads=4)
    layout = layout_of(read_model_config(directory))
    seen = set()
    for stored in layout.values():
        rows = sorted((p.source, p.source + p.rows) for p in stored.shards)
        assert [a for a, _ in rows] == [0, *(b for _, b in rows[:-1])]
        assert rows[-1][1] == stored.shape[0]
        for p in stored.shards:
            for row in range(p.start, p.start + p.rows):
                assert (p.parameter, p.expert, row) not in seen
                seen.add((p.parameter, p.expert, row))


def test_progress_counts_bytes(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    calls: list[tuple[int, int]] = []
    load_weights(
        config,
        directory,
        allocate(config),
        with_mtp=True,
        progress=lambda done, total: calls.append((done, total)),
    )
    text = {n: w for n, w in load_file(directory / "model.safetensors").items() if "visual" not in n}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (sum(w.nbytes for w in text.values()),) * 2


def test_without_mtp_head(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, mtp=False)
    config = read_model_config(directory)
    assert config.mtp_num_layers == 0
    load_weights(config, directory, allocate(config, with_mtp=False), with_mtp=False)
    with pytest.raises(ValueError, match=r"must store an MTP head .* pass mtp_step=0"):
        load_weights(config, directory, allocate(config), with_mtp=True)


def test_head_is_left_out_for_plain_decode(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    assert config.mtp_num_layers == 1
    parameters = allocate(config, with_mtp=False)
    load_weights(config, directory, parameters, with_mtp=False)
    assert all(p.isfinite().all() for p in parameters.values())


def dequantized(directory: Path, name: str) -> dict[str, torch.Tensor | None]:
    """Return the tensors that make `rewrite` store one FP8 weight of model.safetensors in bfloat16."""
    return {name: read_stored(directory)[name].to(torch.bfloat16), name + "_scale_inv": None}


def load_error(directory: Path) -> str:
    """Return the message of the one error, which must come before any tensor is copied."""
    config = read_model_config(directory)
    parameters = allocate(config)
    with pytest.raises(ValueError, match=r"must hold exactly") as error:
        load_weights(config, directory, parameters, with_mtp=True)
    assert all(p.isnan().all() for p in parameters.values())
    return str(error.value)


def test_an_extra_tensor_is_named_and_skipped_if_told_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path)
    extra = ["model.language_model.layers.0.mlp.gate_proj.bias", "value_head.weight"]
    rewrite(directory, {name: torch.zeros(3) for name in extra})
    message = load_error(directory)
    assert all(name in message for name in extra)
    assert message.endswith("; remove them, or pass allow_extra_tensors to skip them")
    config = read_model_config(directory)
    parameters = allocate(config)
    check_weights(config, directory, {}, torch.float32, with_mtp=True, free_bytes=2**40, allow_extra=True)
    (record,) = caplog.records
    assert "skipped tensors" in record.getMessage()
    assert all(name in record.getMessage() for name in extra)
    load_weights(config, directory, parameters, with_mtp=True, allow_extra=True)
    assert all(p.isfinite().all() for p in parameters.values())
    # Tensors that the model needs are still required.
    rewrite(directory, {"mtp.norm.weight": None})
    with pytest.raises(ValueError, match=r"got missing tensors: mtp\.norm\.weight in "):
        load_weights(config, directory, parameters, with_mtp=True, allow_extra=True)


def test_an_engine_skips_extra_tensors_if_told_to(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    options: dict[str, Any] = {"model": directory, "device": "cpu", "max_model_len": 64, "mtp_step": 0}
    params = SamplingParams(max_tokens=3, temperature=0.0)
    with Engine(**options) as engine:
        (before,) = engine.generate([[1, 2, 3]], params)
    rewrite(directory, {"value_head.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"unused tensors: value_head\.weight in "):
        Engine(**options)
    with Engine(**options, allow_extra_tensors=True) as engine:
        (after,) = engine.generate([[1, 2, 3]], params)
    assert after.new_token_ids == before.new_token_ids


def test_an_extra_layer_is_always_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    rewrite(directory, {"model.language_model.layers.99.input_layernorm.weight": torch.zeros(128)})
    config = read_model_config(directory)
    message = (
        rf"^num_hidden_layers must be the number of stored layers \({config.num_layers + 1}\), got "
        rf"{config.num_layers}; fix config.json or remove the other layers: allow_extra_tensors skips no "
        r"layer$"
    )
    for allow_extra in (False, True):
        with pytest.raises(ValueError, match=message):
            load_weights(config, directory, allocate(config), with_mtp=True, allow_extra=allow_extra)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_a_missing_tensor_has_its_name_in_the_files(tmp_path: Path, prefix: str) -> None:
    directory = write_checkpoint(tmp_path)
    own = "model.language_model."
    stored = read_stored(directory)
    renamed = {name: prefix + name.removeprefix(own) for name in stored if name.startswith(own)}
    change: dict[str, torch.Tensor | None] = dict.fromkeys(renamed)
    rewrite(directory, change | {new: stored[name] for name, new in renamed.items()})
    rewrite(directory, {f"{prefix}layers.1.input_layernorm.weight": None, "mtp.norm.weight": None})
    names = f"{prefix}layers.1.input_layernorm.weight, mtp.norm.weight in "
    assert f"got missing tensors: {names}" in load_error(directory)


def test_one_error_names_everything_wrong(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    p = "model.language_model.layers.0."
    change: dict[str, torch.Tensor | None] = {
        p + "mlp.gate_proj.weight": None,
        "mtp.norm.weight": None,
        p + "mlp.gate_proj.bias": torch.zeros(3),
        "mtp.layers.1.input_layernorm.weight": torch.zeros(128),
        p + "input_layernorm.weight": torch.zeros(127),
        p + "linear_attn.A_log": torch.zeros(2, dtype=torch.int32),
    }
    rewrite(directory, change)
    message = load_error(directory)
    assert f"missing tensors: {p}mlp.gate_proj.weight, mtp.norm.weight;" in message
    unused = re.search(r"unused tensors: ([^;]*);", message)
    assert unused is not None
    assert set(unused[1].split(", ")) == {p + "mlp.gate_proj.bias", "mtp.layers.1.input_layernorm.weight"}
    assert p + "input_layernorm.weight of shape [127] for [128]" in message
    assert p + "linear_attn.A_log of dtype I32 for BF16 or F16 or F32" in message
    assert message.endswith("download the checkpoint again or use one of a supported family")


def test_fp8_without_its_scale(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, fp8_scale=torch.bfloat16)
    rewrite(directory, {"mtp.layers.0.self_attn.k_proj.weight_scale_inv": None})
    assert "missing tensors: mtp.layers.0.self_attn.k_proj.weight_scale_inv in" in load_error(directory)


def test_scale_without_fp8(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    rewrite(directory, {"mtp.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(2, 1)})
    assert "k_proj.weight of dtype BF16 for F8_E4M3" in load_error(directory)


def test_scale_of_another_block_size(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, fp8_scale=torch.bfloat16)
    rewrite(directory, {"mtp.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(4, 2)})
    assert "k_proj.weight_scale_inv of shape [4, 2] for [2, 1]" in load_error(directory)


def test_parameters_that_no_tensor_fills(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    parameters = allocate(config) | {"layers.0.extra": torch.zeros(3)}
    parameters["layers.1.mixer.qkv.bias"] = torch.zeros(3)
    del parameters["norm.weight"]
    with pytest.raises(ValueError, match="parameters that do not fit: ") as error:
        load_weights(config, directory, parameters, with_mtp=True)
    for name in ("norm.weight", "layers.0.extra", "layers.1.mixer.qkv.bias"):
        assert name in str(error.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_under_the_prefix_of_the_trunk_counts(tmp_path: Path, sharded: bool) -> None:
    directory = write_checkpoint(tmp_path, mtp_file=True, sharded=sharded)
    config = read_model_config(directory)
    want = expected(config, directory)
    file = directory / "mtp.safetensors"
    save_file({f"model.{name}": w for name, w in load_file(file).items()}, file)
    assert config.mtp_num_layers == 1
    parameters = allocate(config)
    load_weights(config, directory, parameters, with_mtp=True)
    for name, w in want.items():
        assert torch.equal(parameters[name], w.to(parameters[name].dtype)), name


def released(family: str, **changes: Any) -> ModelConfig:
    """The sizes of a released model; three GDN layers alternate with one attention layer."""
    sizes: dict[str, Any] = dict.fromkeys((f.name for f in fields(ModelConfig)), 0)
    sizes |= {"family": family, "head_dim": 256, "conv_kernel": 4, "mtp_num_layers": 1}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
    sizes |= {"tie_word_embeddings": False, "num_layers": changes["num_layers"]}
    sizes["is_full_attention"] = tuple(i % 4 == 3 for i in range(changes["num_layers"]))
    return ModelConfig(**(sizes | changes))


STACKED_TRUNK = ("layers.0.mlp.experts.gate_up_proj",)
MOE = {"hidden_size": 2048, "num_q_heads": 16, "num_kv_heads": 2, "linear_num_value_heads": 32}
MOE |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
A3B = {"family": "qwen3_5_moe", "num_layers": 40, "num_experts": 256, "vocab_size": 248320, **MOE}
DENSE = {"family": "qwen3_5", "vocab_size": 248320, "num_kv_heads": 4}
SIZE_4B = {"num_layers": 32, "hidden_size": 2560, "num_q_heads": 16, "linear_num_value_heads": 32}
SIZE_27B = {"num_layers": 64, "hidden_size": 5120, "num_q_heads": 24, "linear_num_value_heads": 48}


@pytest.mark.parametrize(
    ("sizes", "names", "published", "vision_depth"),
    [
        ({**DENSE, **SIZE_4B, "intermediate_size": 9216, "tie_word_embeddings": True}, (), 738, 24),
        ({**DENSE, **SIZE_27B, "intermediate_size": 17408}, (), 1199, 27),
        (A3B, STACKED_TRUNK, 1811, 27),
        (A3B, (*STACKED_TRUNK, "mtp.layers.0.mlp.experts.gate_up_proj"), 1045, 27),
    ],
    ids=["Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"],
)
def test_as_many_tensors_as_published(
    sizes: dict[str, Any], names: tuple[str, ...], published: int, vision_depth: int
) -> None:
    vision_tensors = 9 + 12 * vision_depth
    assert len(layout_of(released(**sizes), names)) == published - vision_tensors


def test_as_many_parameters_as_published() -> None:
    config = released("qwen3_next", num_layers=48, num_experts=512, vocab_size=151936, **MOE)
    layout = layout_of(config)
    assert len(layout) == 75_944
    assert sum(math.prod(stored.shape) for stored in layout.values()) == 81_324_862_720
