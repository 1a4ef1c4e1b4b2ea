"""tools/bench_prompts.py: the line that it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from bench_prompts import main


def test_it_measures_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts=3", "--prompt-tokens=5", "--max-batch=4", "--repeats=1"]
    main(["--device=cpu", "--compile=off", *sizes])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shared"]["launches"], line["one_each"]["launches"]) == (1, 3)
    assert 0 < line["shared"]["mean_first_token_s"] <= line["shared"]["last_first_token_s"]
    assert line["times_sooner"] > 0
