"""The benchmark of the service: every way gives the same tokens, and wrong tokens are not timed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.models.hf_config import read_model_config
from tests.checkpoints import write_checkpoint

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool with a tiny model for a released shape; its flags are set."""
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_overhead")
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    monkeypatch.setattr(tool, "model_config", lambda name: read_model_config(tmp_path))
    for name, value in (("TIMED_STEPS", 6), ("WARM_UP_STEPS", 1), ("LEAST_ROUNDS", 3)):
        monkeypatch.setattr(tool, name, value)
    monkeypatch.setenv("COMPILED_MTP_NUM_THREADS", "1")
    # As on a GPU.
    monkeypatch.setenv("COMPILED_MTP_MAX_IN_FLIGHT", "1")
    flags = ["--shape=4b", "--streams=2", "--context=5", "--max-tokens=32", "--seconds=0", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["bench_overhead", *flags])
    return tool


def test_the_run_ends_in_one_line(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = last["rows"]
    assert (row["streams"], row["turns"], row["tokens"]) == (2, 1, 64)
    assert min(row["throughput_ratio"], row["cpu_ratio"]) > 0
    assert 0 < row["loop_share"] < 1
    assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"]
    for name, times in (("round", "bare_round_ms"), ("step", "step_ms")):
        expected = row["chunk_ms"]["p50"] / row[times]["p50"]
        assert row[f"chunk_over_{name}"]["p50"] == pytest.approx(expected, rel=0.01)


def test_nothing_is_printed_for_tokens_that_the_service_changed(
    tool: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tool.Client.stream

    def wrong(self: Any, bodies: Any) -> Any:
        found = stream(self, bodies)
        found["streams"][0]["token_ids"][-1][-1] ^= 1
        return found

    monkeypatch.setattr(tool.Client, "stream", wrong)
    with pytest.raises(AssertionError, match="other tokens than the engine"):
        tool.main()
    assert capsys.readouterr().out == ""


def test_every_id_of_the_synthetic_tokenizer_has_a_text(tool: Any, tmp_path: Path) -> None:
    tool.write_tokenizer(tmp_path, 1000)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.num_ids == 1000
    assert all(tokenizer.token_bytes(index) for index in range(1000))
    assert len({tokenizer.token_bytes(index) for index in range(1000)}) == 1000
    assert len(tokenizer.encode("shrdlu etaoin")) == len("shrdlu etaoin")
