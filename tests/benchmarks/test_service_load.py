"""The load generator: its arithmetic, and each of its runs against a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp.benchmarks import service_load as tool
from compiled_mtp.benchmarks.serving_rows import FIGURES, MeanLengths, percentile
from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.server.serving import Running, ScriptedEngine, make_family, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("forty two and more of it", chunk=4)
    with running(engine, model, max_open=4) as found:
        yield found


def output_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    code = tool.main(list(flags))
    return code, json.loads(capsys.readouterr().out or "null")


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 90) == 9.0
    assert percentile([], 99) == 0.0


def test_drawn_lengths_have_their_means_and_bounds() -> None:
    lengths = MeanLengths(200, 20)
    drawn = lengths.draw(4000, seed=1)
    assert drawn[:100] == lengths.draw(100, seed=1) != lengths.draw(100, seed=2)
    for index, mean in enumerate(lengths):
        one = [each[index] for each in drawn]
        assert sum(one) / len(one) == pytest.approx(mean, rel=0.05)
        assert 1 <= min(one) < mean / 3
        assert 3 * mean < max(one) <= 8 * mean
    assert max(sum(each) for each in drawn) <= lengths.longest


def test_a_load_of_drawn_lengths_is_a_row_beside_saved_ones(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--url", server.url, "--num-requests", "5", "--concurrency", "2", "--lengths", "9:4"]
    names = {"engine": "ours", "device": "cpu", "shape": "script", "weights": "none"}
    row = ",".join(f"{name}={value}" for name, value in names.items())
    code, found = output_of(capsys, *flags, "--row", row)
    assert (code, found["failed"], found["beside"]) == (0, 0, [])
    assert {name: found[name] for name in names} == names
    assert (found["streams"], found["mean_prompt"], found["mean_output"]) == (2, 9, 4)
    saved = tmp_path / "rows"
    other = found | {"engine": "another", "tokens_per_s": 7.0}
    saved.write_text(json.dumps(other))
    code, found = output_of(capsys, *flags, "--row", row, "--beside", str(saved))
    assert code == 0
    assert found["beside"] == [{name: other[name] for name in ("engine", *FIGURES)}]


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "200")])
def test_load(server: Running, capsys: pytest.CaptureFixture[str], load: Any) -> None:
    flags = ("--url", server.url, "--num-requests", "3", "--seed", "1", "--ttft-slo-ms", "0", *load)
    code, found = output_of(capsys, *flags)
    assert (code, found["failed"], found["requests"], found["goodput_per_s"]) == (0, 0, 3, 0.0)
    assert found["mean_new_tokens"] > 1
    assert found["acceptance_rate"] > 0.3
    assert found["total_ms"]["p99"] >= found["ttft_ms"]["p50"] > 0


def test_failures_are_counted(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = output_of(capsys, "--url", server.url, "--num-requests", "9", "--concurrency", "9")
    assert code == bool(found["failed"])
    code, found = output_of(capsys, "--url", server.url, "--num-requests", "2", "--model", "none")
    assert (code, found["failed"]) == (1, 2)
    assert found["first_error"].startswith("404")


@pytest.mark.parametrize(
    ("url", "got"),
    [
        (
            "http://127.0.0.1:1",
            "got http://127.0.0.1:1: ConnectError('All connection attempts failed'); start it",
        ),
        ("localhost:8000", "got localhost:8000: UnsupportedProtocol("),
        ("http://a:b", "got http://a:b: InvalidURL("),
    ],
)
def test_a_server_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], url: str, got: str
) -> None:
    assert tool.main(["--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: url must name a server that answers, {got}")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "[Errno 2] No such file or directory: "),
        ("", "prompts must have a prompt or messages per line, got "),
        ('{"prompt": "a"}\n{"prompt"', "prompts must be JSON, one object per line, got "),
        ('{"prompt": "a"}\n"prompt"', "prompts must have a prompt or messages per line, got "),
        ("5", "prompts must have a prompt or messages per line, got "),
    ],
)
def test_a_wrong_file_of_prompts_is_named(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, got: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert tool.main(["--url", server.url, "--prompts", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {got}")
    assert str(file) in line


def test_sweep(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--url", server.url, "--num-requests", "4", "--sweep", "1,2")
    code, found = output_of(capsys, *flags)
    assert code == 0
    assert [point["concurrency"] for point in found["sweep"]] == [1, 2]


def test_exact_match(server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions = tmp_path / "qa.jsonl"
    lines = [{"prompt": "6 * 7?", "answer": "forty two"}, {"prompt": "1 + 1?", "answer": "two"}]
    questions.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--url", server.url, "--against", server.url, "--exact-match", str(questions))
    code, found = output_of(capsys, *flags)
    assert (code, found) == (0, {"questions": 2, "exact_match": [1, 1], "different": []})
    lines[1].pop("answer")
    questions.write_text("\n".join(map(json.dumps, lines)))
    assert tool.main(list(flags)) == 2
    assert "every question must have an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--concurrency", "0"), "argument --concurrency: must be an integer from 1 on, got '0'"),
        (("--sweep", "2,0"), "argument --sweep: must be an integer from 1 on, got '0'"),
        (("--rate", "0"), "rate must be a number above 0, got 0.0"),
        (("--rate", "inf"), "argument --rate: must be a number from 0 on, got 'inf'"),
        (("--max-tokens", "0"), "argument --max-tokens: must be an integer from 1 on, got '0'"),
        (("--temperature", "nan"), "argument --temperature: must be a number from 0 on, got 'nan'"),
        (("--ttft-slo-ms", "-1"), "argument --ttft-slo-ms: must be a number from 0 on, got '-1'"),
        (("--num-requests", "0"), "argument --num-requests: must be an integer from 1 on, got '0'"),
        (("--against", "http://x"), "against must come with exact_match"),
        (
            ("--lengths", "2"),
            "argument --lengths: must be two integers from 1 on, PROMPT:OUTPUT, got '2'",
        ),
        (("--row", "engine"), "argument --row: must be NAME=VALUE, separated by commas, got 'engine'"),
        (("--beside", "x"), "beside must come with lengths and a row of ['device', 'engine', "),
    ],
)
def test_flags_of_a_run_that_would_not_end_or_measure(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    try:
        code: object = tool.main(list(flags))
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def answered(handle: Any) -> Any:
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handle))


def test_a_stream_that_is_cut_off_counts_as_a_failure() -> None:
    chunk = {"choices": [{"text": "half of it"}]}
    client = answered(lambda request: httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\n"))
    sample = asyncio.run(tool.ask(client, {"prompt": "x"}))
    assert sample.error.startswith("the stream ended without usage")


def test_the_load_does_not_wait_after_the_last_arrival() -> None:
    client = answered(lambda request: httpx.Response(400))
    load = tool.run_load(client, [{"prompt": "x"}], concurrency=1, rate=0.01, seed=0)
    _, seconds = asyncio.run(asyncio.wait_for(load, timeout=5))
    assert seconds < 5


def test_a_server_that_lists_no_model_is_quoted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"error": {"message": "the key is wrong"}}
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json=refusal))
    make = httpx.AsyncClient
    monkeypatch.setattr(tool.httpx, "AsyncClient", lambda **given: make(transport=transport, **given))
    assert tool.main(["--url", "http://server"]) == 2
    assert "must list a model, got 401" in capsys.readouterr().err
    # Not this service: an answer of another form.
    for content in ("<html>", "[]", '{"data": []}', '{"data": [{}]}'):
        transport.handler = lambda request, content=content: httpx.Response(200, text=content)
        assert tool.main(["--url", "http://server"]) == 2
        assert f"error: http://server must list a model, got 200: {content}" in capsys.readouterr().err
