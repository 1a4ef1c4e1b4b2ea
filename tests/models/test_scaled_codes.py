"""Scaled codes of GGUF and FP4 checkpoints that stay packed: their values are the stored ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.engine import Engine
from compiled_mtp.models import weight_format
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import Formats, WeightFormat, coded_part
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from compiled_mtp.ops.blocks import KINDS, values
from compiled_mtp.request import SamplingParams
from tests.checkpoints import allocate, count_weights, write_checkpoint
from tests.gguf.test_tensors import SHAPES
from tests.gguf_files import write_gguf
from tests.models.test_quantised import FORMATS, SMALL, every_linear
from tests.quantised import quantise

CPU = torch.device("cpu")
# Dense models whose products are as wide as a super-block.
SIZES: dict[str, Any] = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_q_heads": 4}
GGUF_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep codes on every device, as on a GPU."""
    monkeypatch.setattr(weight_format, "reads_codes", lambda device: True)


def medium(name: str) -> Type:
    """The type of a tensor in a file of Q4_K_M, with v wider than q and k."""
    kinds = {"token_embd": Type.Q6_K, "output.": Type.Q6_K, "attn_v.": Type.Q6_K, "attn_qkv": Type.Q5_K}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q4_K)


def loaded(path: Path, formats: Formats) -> dict[str, torch.Tensor]:
    config, dtype = read_model_config(path), torch.bfloat16
    check_weights(config, path, formats, dtype, with_mtp=True, free_bytes=2**40)
    parameters = allocate(config, True, dtype, formats)
    load_weights(config, path, parameters, with_mtp=True, formats=formats, is_checked=True)
    return parameters


def values_of(form: WeightFormat, words: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The float32 values of a parameter."""
    found, first = [], 0
    for part in form.parts:
        found.append(values(*coded_part(form, words, scales, first, columns), part.kind))
        first += part.rows
    return torch.cat(found)


def check_values(path: Path, most: float = 0.0) -> Formats:
    """Compare the packed weights with those that are multiplied out; return the packed ones' formats."""
    config = read_model_config(path)
    formats = read_formats(config, path, CPU, None)
    kept = {parameter: form for parameter, form in formats.items() if form.parts}
    # Without codes, in_proj is also q|k|v|z alone, in the activations' dtype.
    plain = {p: replace(weight_format.PLAIN, name="as it is", block=1) for p in kept if "in_proj" in p}
    codes, plain_values = loaded(path, formats), loaded(path, plain)
    for parameter, form in kept.items():
        wanted = plain_values[parameter]
        got = values_of(form, codes[parameter], codes[f"{parameter}_scale"], wanted.shape[1]).bfloat16()
        if most:
            torch.testing.assert_close(got, wanted, rtol=most, atol=0)
        else:
            assert torch.equal(got, wanted), parameter
    for parameter in plain_values.keys() - kept.keys():
        assert torch.equal(codes[parameter], plain_values[parameter]), parameter
    taken = sum(codes[name].nbytes for name in codes)
    assert count_weights(config, read_stored(path), formats, torch.bfloat16) <= taken
    return kept


@pytest.mark.parametrize("name", ["dense-r1-tied", "dense-r3"])
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_a_gguf_file_keeps_its_codes(tmp_path: Path, name: str, kind: str) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES[name] | SIZES))
    kept = check_values(write_gguf(source, tmp_path / "model.gguf", lambda _: Type[kind]))
    assert {form.parts[0].name for form in kept.values()} == {kind}
    own = {"qkv", "o_proj", "in_proj", "out_proj", "gate_up", "down", "fc"}
    assert own <= {parameter.split(".")[-2] for parameter in kept}
    assert "embed.weight" in kept
    assert ("lm_head.weight" in kept) == (name == "dense-r3")


def test_parts_of_other_kinds_stay_packed_apart(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES["dense-r3"] | SIZES))
    kept = check_values(write_gguf(source, tmp_path / "model.gguf", medium))
    assert [part.name for part in kept["layers.1.mixer.qkv.weight"].parts] == ["Q4_K", "Q6_K"]
    # Codes of four bits are codes of five.
    assert [part.name for part in kept["layers.0.mixer.in_proj.weight"].parts] == ["Q5_K"]


def test_a_part_that_no_product_reads_multiplies_the_whole_out(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES["dense-r3"] | SIZES))
    types = {"attn_k.": Type.Q5_0, "ffn_up": Type.BF16}
    path = write_gguf(
        source,
        tmp_path / "model.gguf",
        lambda name: next((kind for part, kind in types.items() if part in name), Type.Q4_K),
    )
    kept = check_values(path)
    assert not {parameter for parameter in kept if "qkv" in parameter or "gate_up" in parameter}
    assert any("down" in parameter for parameter in kept)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt-nvfp4", "mxfp4"])
def test_fp4_keeps_its_codes(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    # Dividing by a factor rounds in another way than multiplying by its inverse.
    kept = check_values(tmp_path, most=2**-7 if name == "nvfp4" else 0.0)
    assert {parameter.split(".")[-2] for parameter in kept} >= {
        *("qkv", "o_proj", "in_proj", "out_proj", "gate_up", "down")
    }


def test_several_ranks_and_float32_multiply_out(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES["dense-r3"] | SIZES))
    path = write_gguf(source, tmp_path / "model.gguf", medium)
    config = read_model_config(path)
    assert not read_formats(config, path, CPU, None, torch.bfloat16, 2)
    assert not read_formats(config, path, CPU, None, torch.float32)


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    settings = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 128, "max_batch": 2, "compile": "off"}
    engine = Engine(path, **(settings | options))
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
    return [output.new_token_ids for output in engine.generate([[1, 2, 3, 4], list(range(20))], params)]


@pytest.mark.parametrize("name", ["dense-r1-tied", "dense-r3"])
def test_tokens_do_not_depend_on_depth_with_packed_embedding_and_head(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES[name] | SIZES))
    path = write_gguf(source, tmp_path / "model.gguf", medium)
    plainly = tokens_of(path, mtp_step=0)
    assert tokens_of(path, mtp_step=2) == plainly
    assert tokens_of(path, mtp_step=2, draft_vocab=64) == plainly
    assert tokens_of(path, mtp_step=2, draft_dtype="float8_e4m3fn") == plainly


# Mixtures whose experts are as wide as a super-block.
EXPERTS: dict[str, Any] = SIZES | {"moe_intermediate_size": 256, "num_experts": 4}


@pytest.mark.parametrize("name", ["moe", "next"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_of_a_gguf_file_stay_packed(tmp_path: Path, name: str, is_fused: bool) -> None:
    source = write_checkpoint(tmp_path / "source", **(EXPERTS | SHAPES[name]))
    types = {"ffn_down_exps": Type.Q6_K, "_shexp": Type.Q8_0, "token_embd": Type.Q6_K}

    def chosen(tensor: str) -> Type:
        return next((kind for part, kind in types.items() if part in tensor), Type.Q4_K)

    path = write_gguf(source, tmp_path / "model.gguf", chosen, fused_experts=is_fused)
    config = read_model_config(path)
    formats = read_formats(config, path, CPU, None)
    stacks = {name: form.parts[0].name for name, form in formats.items() if form.parts and ".ffn." in name}
    layers = ("layers.0", "layers.1", "mtp.layer")
    wanted = {f"{layer}.ffn.gate_up": "Q4_K" for layer in layers}
    assert stacks == wanted | {f"{layer}.ffn.down": "Q6_K" for layer in layers}
    codes = loaded(path, formats)
    plain = loaded(path, {name: form for name, form in formats.items() if name not in stacks})
    for stack, kind in stacks.items():
        words, scales = codes[stack], codes[f"{stack}_scale"]
        assert words.dim() == 3
        for expert in range(config.num_experts):
            got = values(words[expert], scales[expert], KINDS[kind]).bfloat16()
            assert torch.equal(got, plain[stack][expert]), (stack, expert)
    needed = count_weights(config, read_stored(path), formats, torch.bfloat16)
    assert needed <= sum(one.nbytes for one in codes.values())


def test_experts_of_several_kinds_are_multiplied_out(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **(EXPERTS | SHAPES["moe"]))
    types = {"blk.0.ffn_up_exps": Type.Q6_K, "blk.1.ffn_down_exps": Type.Q5_0}

    def chosen(tensor: str) -> Type:
        return next((kind for part, kind in types.items() if part in tensor), Type.Q4_K)

    path = write_gguf(source, tmp_path / "model.gguf", chosen)
    formats = read_formats(read_model_config(path), path, CPU, None)
    assert {name for name in formats if ".ffn." in name} == {
        f"mtp.layer.ffn.{end}" for end in ("gate_up", "down", "shared_gate_up", "shared_down")
    }


@pytest.mark.parametrize("name", ["moe", "next"])
def test_tokens_do_not_depend_on_depth_with_packed_experts(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", **(EXPERTS | SHAPES[name]))
    path = write_gguf(source, tmp_path / "model.gguf", medium)
    plainly = tokens_of(path, mtp_step=0)
    assert tokens_of(path, mtp_step=2) == plainly
    assert tokens_of(path, mtp_step=2, draft_dtype="float8_e4m3fn") == plainly
