"""`compiled-mtp run`: one prompt, comparisons, interrupts, and one run of the real engine."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.fakes import FakeEngine, made, run_main, without_labels


def test_a_single_prompt_streams_and_standard_output_holds_nothing_else(
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("def f():\n")
    parts: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", parts.append)
    assert run_main("--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 10, "--seed", 3) == 0
    assert parts == ["DEF", " F(", "):.", "."]
    summary = capsys.readouterr().err
    assert "weights: done\n" in summary
    for line in (
        "compiled no",
        "requests 1",
        "output tokens 10",
        "new tokens per round (mean) 3.00",
        "seed 3",
    ):
        assert line in " ".join(summary.split())
    assert made[0].closed


def test_the_recipe_of_fp8_weights_is_printed(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_main("--prompt-file", prompts) == 0
    assert "weight_recipe" not in capsys.readouterr().err
    monkeypatch.setattr(FakeEngine, "weight_recipe", "w8a8")
    assert run_main("--prompt-file", prompts, "--weight-recipe", "w8a8") == 0
    assert "FP8 weights: w8a8 (weight_recipe)\n" in capsys.readouterr().err
    assert made[-1].config.weight_recipe == "w8a8"


def test_compare_repeats_with_the_same_seeds_and_says_that_the_tokens_are_identical(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("--prompt-file", prompts, "--compare", "--mtp-step", 2) == 0
    printed = capsys.readouterr()
    assert "identical tokens: yes" in printed.err
    assert "mtp_step 2 decodes at " in printed.err
    assert without_labels(printed.out).count("\n") == 3
    assert [one.config.mtp_step for one in made] == [2, 0]
    first, second = ([request.history.seed for request in one.requests.values()] for one in made)
    assert first == second


def test_the_summary_says_which_depths_ran_and_why(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = {"best": 0, "probe": 0, "retry": 0, "only": 0}
    rounds = {0: none | {"best": 7}, 1: none | {"best": 1, "probe": 2, "retry": 3}}
    monkeypatch.setattr(FakeEngine, "rounds_by_depth", rounds | {2: none})
    assert run_main("--prompt-file", prompts, "--mtp-step", "auto", "--mtp-depths", "0,1,2") == 0
    printed = capsys.readouterr().err
    assert re.search(r"^rounds by depth +0:7 1:6 \(2 to probe, 3 to retry\)$", printed, re.MULTILINE)
    assert re.search(r"^ +mtp_step auto$", printed, re.MULTILINE)
    assert [(one.config.mtp_step, one.config.depths) for one in made] == [("auto", (0, 1, 2))]


@pytest.mark.parametrize("is_variable", [False, True])
def test_compare_drops_the_graph_cache_of_the_other_mtp_step_and_says_so(
    engine: type[FakeEngine],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_variable: bool,
) -> None:
    flags: tuple[object, ...] = ("--mtp-step", 2, "--graph-cache", tmp_path / "graphs.zip")
    if is_variable:
        flags = ()
        monkeypatch.setenv("COMPILED_MTP_MTP_STEP", "2")
        monkeypatch.setenv("COMPILED_MTP_GRAPH_CACHE", str(tmp_path / "graphs.zip"))
    assert run_main("--prompt-file", prompts, "--compare", *flags) == 0
    assert [(one.config.mtp_step, one.config.graph_cache) for one in made] == [
        (2, tmp_path / "graphs.zip"),
        (0, None),
    ]
    said = "the same again with mtp_step 0, without graph_cache, which is for mtp_step 2\n"
    assert said in capsys.readouterr().err


def test_compare_that_finds_other_tokens_says_where_and_fails(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.wrong_with_mtp_step_0 = True
    assert run_main("--prompt-file", prompts, "--compare") == 1
    assert f"identical tokens: NO, {prompts} line 1 differs from token 2 on" in capsys.readouterr().err


def test_an_interrupt_prints_and_writes_what_was_decoded(
    engine: type[FakeEngine], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_after = 3
    output = tmp_path / "out.jsonl"
    assert run_main("--prompt-file", prompts, "--output", output, "--in-order", "--compare") == 130
    printed = capsys.readouterr()
    assert without_labels(printed.out) == "FIRST \nCHAT..\nA\n"
    assert "interrupted: this is what was decoded until then" in printed.err
    reasons = [json.loads(line)["finish_reason"] for line in output.read_text().splitlines()]
    assert reasons == ["abort", "abort", "stop"]
    assert len(made) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_what_runs_and_keeps_what_has_ended(
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    """The third request ends after one step, the second has begun, the first waits."""
    lines = [{"prompt": "one"}, {"prompt": "two", "id": "b"}, {"prompt": "three", "max_tokens": 2}]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    advance = engine.advance
    monkeypatch.setattr(engine, "advance", lambda self, *one: [] if one[0] == "0" else advance(self, *one))

    def interfere(self: FakeEngine) -> None:
        if self.steps == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(engine, "before_step", interfere)
    assert run_main("--prompt-file", file, "--output", output) == code
    printed = capsys.readouterr()
    found = [json.loads(line) for line in output.read_text().splitlines()]
    # The step in which the signal came is counted.
    assert [(one["id"], one["text"], one["finish_reason"]) for one in found] == [
        (None, "TH", "length"),
        ("b", "TWO......", "abort"),
    ]
    assert without_labels(printed.out) == "TH\nTWO......\n"
    assert "interrupted: this is what was decoded until then; 1 requests had not begun" in printed.err
    assert made[0].aborted == {"0", "1"}


def test_a_lost_engine_keeps_what_has_ended(
    engine: type[FakeEngine], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third request have ended, and wait for the first to be written."""
    advance, output = engine.advance, tmp_path / "out.jsonl"
    monkeypatch.setattr(engine, "advance", lambda self, *one: [] if one[0] == "0" else advance(self, *one))

    def interfere(self: FakeEngine) -> None:
        if self.steps == 4:
            # What a lost rank raises.
            raise ChildProcessError("rank 1 has ended")

    monkeypatch.setattr(engine, "before_step", interfere)
    flags = ("--prompt-file", prompts, "--output", output, "--max-tokens", 6, "--in-order")
    assert run_main(*flags) == 2
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["id"], one["finish_reason"]) for one in found] == [("chat-7", "length"), (12, "stop")]


def test_an_interrupt_while_loading_ends_cleanly(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_after = 0
    assert run_main("--prompt-file", prompts) == 130
    assert capsys.readouterr() == ("", "interrupted: nothing more was done\n")


def test_a_request_that_fails_leaves_the_others_and_fails_the_run(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fail = "1"
    assert run_main("--prompt-file", prompts, "--max-tokens", 6, "--in-order") == 1
    printed = capsys.readouterr()
    assert without_labels(printed.out) == "FIRST ONE\nCHA\nA\n"
    assert f"error: {prompts} line 2: the device is on fire" in printed.err


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float) -> None:
    from tests.checkpoints import write_checkpoint

    write_checkpoint(tmp_path, tokenizer=True)
    lines = [{"prompt": "def quicksort("}, {"prompt_token_ids": list(range(5, 75)), "max_tokens": 5}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--device", "cpu", "--prefill-chunk", 64, "--max-model-len", 256, "--temperature", temperature)
    files = (
        "--model",
        tmp_path,
        "--prompt-file",
        tmp_path / "prompts.jsonl",
        "--output",
        tmp_path / "out.jsonl",
    )
    assert run_main(*files, *flags, "--ignore-eos", "--max-tokens", 20, "--compare", "--in-order") == 0
    printed = capsys.readouterr()
    assert "identical tokens: yes" in printed.err
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line["token_ids"]) for line in written] == [20, 5]
    assert without_labels(printed.out) == "".join(line["text"] + "\n" for line in written)
