"""`compiled-mtp quantize` writes the tensors of the FP8 releases, and the engine reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from compiled_mtp.cli import quantize
from compiled_mtp.cli.main import main
from compiled_mtp.cli.quantize import quantize_checkpoint
from compiled_mtp.models.headers import read_headers
from compiled_mtp.request import SamplingParams
from tests.adapters import ALPHA, RANK, merge_by_formula, write_adapter
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.quantised import gptq, quantise


def stored(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("name", "options"), FP8_FAMILIES, ids=[name for name, _ in FP8_FAMILIES])
def test_writes_the_tensors_of_a_release(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Other code quantises the tiny FP8 checkpoints from the same numbers."""
    released = write_checkpoint(tmp_path / "released", **options)
    plain = write_checkpoint(tmp_path / "plain", **(options | {"fp8_scale": None, "sharded": True}))
    counts = quantize_checkpoint(plain, tmp_path / "out", options["fp8_scale"])
    got, wanted = stored(tmp_path / "out"), stored(released)
    assert got.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert got[tensor].dtype == value.dtype, tensor
        assert torch.equal(got[tensor].float(), value.float()), tensor
    assert counts.converted == sum(name.endswith("_scale_inv") for name in wanted)
    assert 0 < counts.error < 0.03**2 * counts.size
    assert counts.bytes_after < 0.7 * counts.bytes_before
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = json.loads((released / "config.json").read_text())["quantization_config"]
    kept = config.pop("quantization_config")
    names = kept.pop("modules_to_not_convert")
    assert kept == quantization
    assert config == json.loads((plain / "config.json").read_text())
    modules = {tensor.removesuffix(".weight") for tensor in wanted if tensor.endswith(".weight")}
    assert set(names) == {m for m in modules if m + ".weight_scale_inv" not in wanted} | {"lm_head"}
    assert len(read_headers(tmp_path / "out")) == len(wanted) - sum("visual" in n for n in wanted)


def test_an_adapter_is_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, options = FP8_FAMILIES[1]
    assert name == "dense"
    plain = write_checkpoint(tmp_path / "plain", **(options | {"fp8_scale": None}))
    adapter = write_adapter(tmp_path / "lora", plain)
    pairs = load_file(adapter / "adapter_model.safetensors")
    merged = merge_by_formula(plain, pairs, lambda module: ALPHA / RANK)
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "config.json").write_text((plain / "config.json").read_text())
    rounded = {name: merged[name].float().to(w.dtype) for name, w in stored(plain).items()}
    save_file(rounded, tuned / "model.safetensors")
    quantize_checkpoint(tuned, tmp_path / "wanted")
    assert main(["quantize", str(plain), "--lora", str(adapter), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    got, wanted = stored(tmp_path / "out"), stored(tmp_path / "wanted")
    assert got.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(got[tensor].float(), value.float()), tensor


def test_matrices_of_other_sizes_stay_plain_and_the_engine_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_checkpoint(tmp_path / "plain", intermediate_size=192, tokenizer=True)
    assert main(["quantize", str(plain), "--output", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    out = Path(told["output"])
    config = json.loads((out / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert told["kept"] == len(kept)
    assert told["converted"] == sum(n.endswith("_scale_inv") for n in stored(out)) == 3 * 3 + 2 * 4
    assert sum(".mlp." in name for name in kept) == 15
    assert (out / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    engine = make_engine(out, mtp_step=2)
    formats = engine.runner.spec.weight_formats
    assert {n.split(".")[-2] for n in formats} == {
        "qkv",
        "o_proj",
        "in_proj",
        "out_proj",
    }
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    assert len(engine.generate([prompt_of(9, 1, 256)], params)[0].new_token_ids) == 5


def test_refused_by_name(tmp_path: Path) -> None:
    quantized = write_checkpoint(tmp_path / "fp8", fp8_scale=torch.float32)
    with pytest.raises(ValueError, match=r"checkpoint must be in bfloat16, got .*fp8; give the checkpoint"):
        quantize_checkpoint(quantized, tmp_path / "out")
    plain = write_checkpoint(tmp_path / "plain")
    with pytest.raises(ValueError, match="output must be a new directory, got"):
        quantize_checkpoint(plain, quantized)
    assert not (tmp_path / "out").exists()
    # Fine-tunes lose the entry in config.json, but their weights are FP8.
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"checkpoint must be in bfloat16, got .*fp8; give the checkpoint"):
        quantize_checkpoint(quantized, tmp_path / "out")
    packed = write_checkpoint(tmp_path / "int4")
    quantise(packed, lambda module: gptq(32) if module.endswith("q_proj") else None)
    with pytest.raises(ValueError, match=r"checkpoint must be in bfloat16, got .*int4; give the checkpoint"):
        quantize_checkpoint(packed, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="output must be a new directory, got"):
        quantize_checkpoint(plain, tmp_path / "link")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    """An infinite weight would turn its block's 16,384 weights into NaN and zeros."""
    plain = write_checkpoint(tmp_path / "plain")
    file = plain / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name][0, 0] = value
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"^{name} must be finite to be quantised, got NaN or infinity;"):
        quantize_checkpoint(plain, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_full_disk_is_an_error_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_checkpoint(tmp_path / "plain")

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(quantize, "save_file", fail)
    assert main(["quantize", str(plain), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: output must have room for the weights, got {tmp_path}/out ("
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_the_weights_are_as_readable_as_the_config(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(write_checkpoint(tmp_path / "plain", sharded=True), out)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


def test_a_repository_of_the_hub_is_a_checkpoint_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = write_checkpoint(tmp_path / "plain"), []

    def find(model: Path, *, is_offline: bool) -> Path:
        asked.append((model, is_offline))
        return plain

    monkeypatch.setattr(quantize, "find_checkpoint", find)
    monkeypatch.setenv("COMPILED_MTP_OFFLINE", "1")
    assert main(["quantize", "Acme/Tiny-1.0", "--output", str(tmp_path / "made")]) == 0
    assert asked == [(Path("Acme/Tiny-1.0"), True)]
    assert (tmp_path / "made" / "config.json").is_file()


def test_without_numpy_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["quantize", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    said = "error: numpy must be installed to write a checkpoint, got none; pip install numpy\n"
    assert capsys.readouterr().err == said
