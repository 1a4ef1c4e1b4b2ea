"""The tool that compares acceptance with a grammar and without."""

from __future__ import annotations

import json

import jsonschema
import pytest

from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput
from tools.bench_guided import RECORDS, SCHEMA, check, main, make_prompt


def test_prompts_hold_records_of_the_schema() -> None:
    for number in range(20):
        lines = make_prompt(number).splitlines()[1:-1]
        assert len(lines) == RECORDS
        for line in lines:
            jsonschema.validate(json.loads(line.strip().removesuffix(",")), SCHEMA)


def test_the_line_says_what_a_grammar_costs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prompts", "2", "--device", "cpu"])
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


def test_nothing_is_printed_without_prompts_or_of_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prompts", "0"])
    assert "--prompts must be at least 1, got 0" in capsys.readouterr().err
    output = RequestOutput("x", [1], '{"name": "a"}', RequestMetrics(RequestHistory(1, 1), 0, 1, 0.1), "stop")
    for wrong in (output, output._replace(finish_reason="error", error="not finite")):
        with pytest.raises(AssertionError, match=r"the grammar let through|not finite"):
            check([wrong])
    check([output._replace(finish_reason="length")])
