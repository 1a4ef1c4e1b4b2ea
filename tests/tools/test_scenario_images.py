"""The tool that times images: one line with a row for each, or no output for wrong tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOL = "engine_scenarios.images"
FLAGS = ["images", "--shape=tiny", "--num-threads=1", "--device=cpu", "--streams=2", "--max-tokens=6"]


def test_a_row_for_each_image(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main([*FLAGS, "--repeats=1", "--image=96x64,320x320"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shape"], line["streams"]) == ("tiny", 2)
    assert [(row["image"], row["image_tokens"]) for row in line["rows"]] == [("96x64", 6), ("320x320", 100)]
    for row in line["rows"]:
        assert row["slices"] >= 1
        assert row["tower_s"] > 0
        assert 0 < row["longest_slice_s"] <= row["tower_s"] <= row["first_token_s"] + 1
        assert 0 < row["round_s"] <= row["longest_wait_s"] + 1
        assert row["longest_wait_as_text_s"] > 0
        assert row["round_after_image_s"] > 0
        assert row["round_after_text_s"] > 0


def test_wrong_tokens_print_nothing(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = tool.decode, []

    def wrong(*given: Any) -> Any:
        calls.append(decode(*given))
        return calls[-1] | {"tokens": [len(calls)]}

    monkeypatch.setattr(tool, "decode", wrong)
    with pytest.raises(SystemExit, match="tokens after"):
        bench_engine.main([*FLAGS, "--repeats=1", "--image=64x64"])
    assert capsys.readouterr().out == ""
