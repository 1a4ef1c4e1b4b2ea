"""The tool that times steps with grammars, log probabilities and penalties: one line, or no output."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.sampling.grammar_source import from_schema

TOOL = "engine_scenarios.guided"
SHAPE = ["guided", "--shape=tiny", "--num-threads=1", "--device=cpu", "--batch=2", "--guided=0,1"]
FLAGS = [*SHAPE, "--context=16", "--rounds=3", "--turns=1"]


@pytest.fixture(autouse=True)
def few_rounds(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "WARM_UP_ROUNDS", 1)


def test_the_line_has_every_way_over_plain(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(FLAGS)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shape"], line["device"], line["rounds"]) == ("tiny", "cpu", 3)
    rows = {row["way"]: row for row in line["rows"]}
    assert list(rows) == ["plain", "1 records", "1 text", "1 logprobs", "2 logprobs", "2 penalties"]
    for row in rows.values():
        assert row["step_ms"] > 0
        assert row["over_plain"] > 0
        assert 1 <= row["new_tokens_per_round"] <= 4


def test_drafts_of_records_are_kept(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device=cpu", "--num-threads=1", "--batch=1", "--guided=1", "--context=120"]
    bench_engine.main(["guided", *flags, "--rounds=6", "--turns=1", "--temperature=0"])
    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert min(rows[way]["new_tokens_per_round"] for way in ("plain", "1 records")) > 1.3


def test_prompts_hold_records_of_the_schema(tool: Any) -> None:
    for number in range(20):
        *lines, end, last = tool.make_prompt(number, 400).splitlines()[1:]
        assert (end, last) == ("]", "records = ")
        assert len(lines) > 2
        for line in lines:
            jsonschema.validate(json.loads(line.strip().removesuffix(",")), tool.RECORD)


def test_nothing_is_printed_for_tokens_that_depend_on_other_requests(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool.EXTRAS, "logprobs", {"logit_bias": {5: 100.0}})
    with pytest.raises(SystemExit, match="error: tokens of request 0 changed: batch 2, 1 logprobs"):
        bench_engine.main(FLAGS)
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_for_tokens_that_the_grammar_forbids(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = from_schema("schema", {"type": "boolean"})
    monkeypatch.setattr(tool, "from_response_format", lambda _: other)
    with pytest.raises(SystemExit, match="error: records of request 0: token 0 is forbidden"):
        bench_engine.main(FLAGS)
    assert capsys.readouterr().out == ""


def test_the_tokenizer_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    tool = importlib.import_module("synthetic_tokenizer")
    tool.write_tokenizer(tmp_path, 3000)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.num_ids == 3000
    assert tokenizer.eos_token_ids == (2999,)
    assert len({tokenizer.token_bytes(token_id) for token_id in range(2999)}) == 2999
    assert tokenizer.decode(tokenizer.encode("naïve text\n")) == "naïve text\n"
    with pytest.raises(ValueError, match="num_ids must be at least 257, got 256"):
        tool.write_tokenizer(tmp_path, 256)
