"""What `inspect` predicts of slots, tokens and memory is what an engine has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.benchmarks.released_shapes import model_config
from compiled_mtp.cli.main import main
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.ops.device import GPU, assume
from compiled_mtp.runner import assemble
from compiled_mtp.runner.forecast import forecast, free_beside, parameter_bytes
from compiled_mtp.runner.spec import resolve
from tests.checkpoints import write_checkpoint
from tests.gguf_files import write_gguf

GIB = 1 << 30
RTX_4090 = GPU((8, 9), 24 * GIB)


@pytest.mark.parametrize("options", [{}, {"mtp_step": 0}, {"max_batch": 3}, {"lookup": "auto"}])
def test_an_engine_has_what_was_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    directory = write_checkpoint(tmp_path)
    model = read_model_config(directory)
    config = EngineConfig(model=directory, device="cpu", **options)
    spec = resolve(config, model, model.vocab_size)
    monkeypatch.setattr(assemble, "available_bytes", lambda: 8 * GIB)
    engine = Engine(config)
    parameters = sum(p.nbytes for p in engine.runner.step.target.parameters())
    if engine.runner.step.draft is not None:
        parameters += sum(p.nbytes for p in engine.runner.step.draft.parameters())
    assert parameter_bytes(spec) == parameters
    assert forecast(spec, free_bytes=8 * GIB + parameters, host_bytes=8 * GIB) == engine.runner.memory
    engine.close()


def test_weights_of_a_gpu_take_whole_units() -> None:
    def layer(*sizes: int) -> torch.nn.Module:
        module = torch.nn.Module()
        for number, size in enumerate(sizes):
            tensor = torch.empty(size, dtype=torch.uint8, device="meta")
            module.register_parameter(f"p{number}", torch.nn.Parameter(tensor, requires_grad=False))
        return module

    mib = 1 << 20
    left = free_beside([], GIB)
    assert GIB - left == 64 * mib
    assert left - free_beside([layer(11 * mib)], GIB) == 12 * mib
    assert left - free_beside([layer(11 * mib), layer(12 * mib)], GIB) == 24 * mib
    assert left - free_beside([layer(1, 5 * mib)], GIB) == 40 * mib
    assert free_beside([layer(2 * GIB)], GIB) == 0


@pytest.mark.parametrize(
    ("options", "draft_dtype", "slots", "least", "most"),
    [
        ({"four_bit_group": 128}, "auto", 8, 28_000, 36_000),
        ({"four_bit_group": 128}, "weights", 8, 35_000, 45_000),
        ({"scaled_codes": "Q4_K_M"}, "auto", 8, 40_000, 50_000),
    ],
)
def test_27b_fits_a_card_of_24_gib(
    options: dict[str, Any], draft_dtype: Literal["auto", "weights"], slots: int, least: int, most: int
) -> None:
    model = model_config("27b", **options)
    with assume(RTX_4090):
        config = EngineConfig(draft_dtype=draft_dtype)
        spec = resolve(config, model, model.vocab_size, is_checkpoint=False)
        plan = forecast(spec, free_bytes=RTX_4090.total_bytes, host_bytes=32 * GIB)
        needed = parameter_bytes(spec)
    assert plan.max_batch == slots
    assert least < plan.max_model_len < most
    assert needed + plan.total_bytes < 24 * GIB


def test_bfloat16_of_27b_does_not_fit() -> None:
    model = model_config("27b")
    with assume(RTX_4090):
        spec = resolve(EngineConfig(), model, model.vocab_size, is_checkpoint=False)
        with pytest.raises(ValueError, match="free memory must hold"):
            forecast(spec, free_bytes=RTX_4090.total_bytes, host_bytes=32 * GIB)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    sizes = {"num_layers": 2, "interval": 2, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}
    return write_gguf(write_checkpoint(tmp_path, **sizes), tmp_path / "model.gguf", lambda _: Type.Q8_0)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_flags_describe_another_gpu(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["inspect", str(file), "--memory-gib", "0.5", "--max-batch", "5", "--block-size", "32"]
    assert main(flags) == 0
    out = said(capsys)
    assert out["runs"].startswith("on cuda, in bfloat16 (")
    assert out["memory"].endswith(" of weights, 512.0 MiB free")
    caches = re.fullmatch(r"5 slots, (\d+) tokens in (\d+) blocks, \d+ state snapshots: .*", out["caches"])
    assert caches is not None
    assert int(caches[1]) == 32 * int(caches[2])
    assert main([*flags[:3], "0.16", *flags[4:]]) == 0
    assert int(said(capsys)["caches"].split()[2]) < int(caches[1])
    # Products of a Turing GPU read no codes.
    assert main([*flags, "--compute-capability", "7.5"]) == 0
    assert said(capsys)["runs"] == "on cuda, in bfloat16"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--memory-gib", "0.01"], "free memory must hold "),
        (["--memory-gib", "-1"], "argument --memory-gib: invalid GiB value: '-1'"),
        (["--memory-gib", "2", "--compute-capability", "nine"], "invalid compute capability value: 'nine'"),
        (["--compute-capability", "9.0"], "compute-capability must come with --memory-gib"),
        (["--memory-gib", "2", "--device", "cpu"], "device must be cuda, or left out, beside --memory-gib"),
    ],
)
def test_flags_that_cannot_be_used(
    file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], error: str
) -> None:
    try:
        code = main(["inspect", str(file), *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
