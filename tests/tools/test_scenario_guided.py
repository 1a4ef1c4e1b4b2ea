"""The tool that compares acceptance with a grammar and without."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput

TOOL = "engine_scenarios.guided"


def test_prompts_hold_records_of_the_schema(tool: Any) -> None:
    for number in range(20):
        lines = tool.make_prompt(number).splitlines()[1:-1]
        assert len(lines) == tool.RECORDS
        for line in lines:
            jsonschema.validate(json.loads(line.strip().removesuffix(",")), tool.SCHEMA)


def test_the_line_says_what_a_grammar_costs(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(["guided", "--prompts", "2", "--device", "cpu"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["mtp_step"], line["prompts"]) == (3, 2)
    for one, temperature in zip(line["by_temperature"], (0.0, 1.0), strict=True):
        assert one["temperature"] == temperature
        assert one["ended_by_grammar"] == 2
        assert 0 < one["acceptance"]["plain"] < 1
        assert one["ratio"] == pytest.approx(
            one["acceptance"]["guided"] / one["acceptance"]["plain"], abs=0.01
        )
        assert 1 < one["mean_new_tokens"]["guided"] <= 4
        assert one["tokens"] > 2 * 20


def test_nothing_is_printed_without_prompts_or_of_what_failed(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main(["guided", "--prompts", "0"])
    assert "--prompts: must be an integer from 1 on, got '0'" in capsys.readouterr().err
    output = RequestOutput("x", [1], '{"name": "a"}', RequestMetrics(RequestHistory(1, 1), 0, 1, 0.1), "stop")
    for wrong in (output, output._replace(finish_reason="error", error="not finite")):
        with pytest.raises(AssertionError, match=r"the grammar let through|not finite"):
            tool.check([wrong])
    tool.check([output._replace(finish_reason="length")])
