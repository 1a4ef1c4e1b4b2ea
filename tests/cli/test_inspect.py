"""`compiled-mtp inspect` of plain, FP8, quantised and damaged checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.cli.main import main
from compiled_mtp.config import defaults
from compiled_mtp.models import weight_format
from tests.adapters import write_adapter
from tests.checkpoints import YARN, write_checkpoint
from tests.gguf_files import write_gguf
from tests.models.stored_files import rewrite
from tests.quantised import gptq, quantise

SIZES = {"num_layers": 2, "interval": 2, "vocab_size": 64}


def lines(capsys: pytest.CaptureFixture[str], directory: Path) -> list[str]:
    assert main(["inspect", str(directory), "--device", "cpu"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_quantised_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(
        tmp_path / "model", "qwen3_5_moe", mtp_experts="per_expert", rope=YARN, **SIZES
    )
    quantise(directory, lambda name: gptq(32) if "shared_expert." in name or "q_proj" in name else None)
    said = lines(capsys, directory)
    assert said[0] == "family      qwen3_5_moe, stored as bfloat16"
    assert "layers      2: 1 of attention, 1 of GDN" in said
    assert "context     4096 tokens, with rope scaling yarn, 4 times 64" in said
    assert "experts     8 experts of 64, 4 per token" in said
    assert "MTP head    stored" in said
    int4 = "GPTQ int4 (version 1), groups of 32"
    assert any(line.startswith(f"stored      experts: 6 in {int4}, ") for line in said)
    assert any(line.startswith(f"stored      attention: 1 in {int4}, ") for line in said)
    assert any(line.startswith(f"stored      MTP head: 4 in {int4}, ") for line in said)
    assert any(line.startswith("multiplied  11 weights of ") for line in said)
    assert [line.split()[0] for line in said[-3:]] == ["memory", "caches", "request"]
    # As much memory as the same checkpoint without codes.
    assert said[-3].split(",")[0] == lines(capsys, directory.with_name("model-plain"))[-3].split(",")[0]


def test_a_gguf_file_that_stays_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256}
    path = write_gguf(write_checkpoint(tmp_path, **sizes), tmp_path / "model.gguf", lambda _: Type.Q8_0)
    out = lines(capsys, path)
    assert any(line.startswith("multiplied  ") for line in out)
    monkeypatch.setattr(weight_format, "reads_codes", lambda device: True)
    monkeypatch.setattr(defaults, "resolve_dtype", lambda *_: "bfloat16")
    packed = lines(capsys, path)
    assert "kept        15 matrices in Q8_0" in packed
    assert "runs        on cpu, in bfloat16 (15 matrices in Q8_0)" in packed
    assert any(line.startswith("multiplied  2 weights of ") for line in packed)


def test_fp8_and_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path, mtp=False, fp8_scale=torch.bfloat16, **SIZES)
    said = lines(capsys, directory)
    assert "MTP head    none: it decodes without drafts" in said
    assert any(line.startswith("stored      FFN: 6 in fp8 in blocks of 128, ") for line in said)
    assert "runs        on cpu, in float32 (FP8 as w8a8, multiplied out)" in said
    (line,) = [line for line in said if line.startswith("multiplied ")]
    stored = sum(int(one.split(": ")[1].split()[0]) for one in said if "in fp8 in blocks" in one)
    assert line.startswith(f"multiplied  {stored} weights of ")
    # On a GPU gate and up do not begin at a block, so that only the FFN's weights are multiplied out.
    assert main(["inspect", str(directory), "--memory-gib", "8", "--compute-capability", "9.0"]) == 0
    assert "multiplied  4 weights of " in capsys.readouterr().out


def test_drafts_in_fp8_count_their_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, **SIZES | {"vocab_size": 8192})
    plain = lines(capsys, directory)
    assert not any(line.startswith("drafts") for line in plain)
    monkeypatch.setenv("COMPILED_MTP_DRAFT_DTYPE", "float8_e4m3fn")
    said = lines(capsys, directory)
    assert "drafts      in FP8, multiplied out (the MTP layer and a head of 4.0 MiB)" in said
    needed = [float(one[-3].split()[1]) for one in (said, plain)]
    assert needed[0] - needed[1] == pytest.approx(4.0, abs=0.11)


def test_a_refusal_is_one_line_after_the_known_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path, **SIZES)
    rewrite(directory, {"mtp.norm.weight": None})
    assert main(["inspect", str(directory), "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "family      qwen3_5" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: model must hold exactly the tensors")
    assert "mtp.norm.weight" in line


def test_the_default_checkpoint_is_inspected_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("family      qwen3_5, ")


def test_an_adapter_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "model", **SIZES)
    adapter = write_adapter(tmp_path / "lora", directory)
    assert main(["inspect", str(directory), "--device", "cpu", "--lora", str(adapter)]) == 0
    line = f"adapter     {adapter}, merged into 15 weights, the MTP head stays the base model's"
    assert line in capsys.readouterr().out.splitlines()
