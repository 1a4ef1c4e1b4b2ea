"""The command line: what goes where, what it says about mistakes, and the whole way once."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.request import Request, RequestOutput, SamplingParams

# What the fake engine decodes: the prompt in capitals, then full stops.
WIDTH = 3


class Letters:
    """Token i is the character chr(i)."""

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class FakeEngine:
    """Everything but the model: each request answers with its prompt in capitals, a window a step."""

    is_compiled = False
    interrupt_after: int | None = None
    wrong_with_mtp_step_0 = False
    fail: str | None = None

    def __init__(self, config: EngineConfig, *, progress: Any = None) -> None:
        if config.model == Path("/nowhere"):
            raise ValueError("model must be a directory with a config.json, got /nowhere; pass\na checkpoint")
        self.config = config
        self.steps = 0
        self.closed = False
        self.answers: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.params: list[SamplingParams] = []
        made.append(self)
        if self.interrupt_after == 0:
            raise KeyboardInterrupt
        progress("weights", 1, 2)
        progress("weights", 2, 2)

    def add_request(self, params: SamplingParams, request_id: str, **prompt: Any) -> str:
        ((kind, value),) = prompt.items()
        text = (
            value if kind == "prompt" else "".join(map(chr, value)) if kind == "prompt_token_ids" else "chat"
        )
        if len(text) > 40:
            raise ValueError(
                "prompt must be shorter than max_model_len=40 tokens, got a long one; shorten it"
            )
        request = Request(request_id, [1] * len(text), params, detokenizer=Letters())
        request.metrics.rounds_by_accepted = [0] * (self.config.mtp_step + 1)
        self.requests[request_id], self.answers[request_id] = request, text.upper() + "." * 200
        self.params.append(params)
        return request_id

    def has_unfinished_requests(self) -> bool:
        return any(request.finish_reason is None for request in self.requests.values())

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps == self.interrupt_after:
            raise KeyboardInterrupt
        outputs = []
        # Backwards, so that the last request is finished first.
        for name, request in reversed(self.requests.items()):
            if request.finish_reason is not None:
                continue
            done = len(request.output_token_ids)
            window = self.answers[name][done : done + (WIDTH if self.config.mtp_step else 1)]
            if self.wrong_with_mtp_step_0 and not self.config.mtp_step and done == 2:
                window = "?"
            kept, text = request.append([ord(c) for c in window], is_round=done > 0, now_s=time.monotonic())
            error = None
            if self.fail == name:
                request.finish("error")
                error = "the device is on fire"
            outputs.append(RequestOutput(name, kept, text, request.metrics, request.finish_reason, error))
        return outputs

    def close(self) -> None:
        self.closed = True


made: list[FakeEngine] = []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    made.clear()
    fake = type("Fake", (FakeEngine,), {})
    monkeypatch.setitem(sys.modules, "compiled_mtp.engine", types.SimpleNamespace(Engine=fake))
    return fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        {"prompt": "first one", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5},
        {"prompt_token_ids": [97, 98], "seed": 5, "stop": "B."},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def run_main(*flags: object) -> int:
    try:
        return run.main([str(flag) for flag in flags])
    except SystemExit as error:
        return int(error.code or 0)


def test_a_single_prompt_streams_and_standard_output_holds_nothing_else(
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("def f():\n")
    pieces: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    assert run_main("--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 10, "--seed", 3) == 0
    assert pieces == ["DEF", " F(", "):.", "."]
    summary = capsys.readouterr().err
    assert "weights: done\n" in summary
    for line in ("compiled no", "requests 1", "output tokens 10", "new tokens a round (mean) 3.00", "seed 3"):
        assert line in " ".join(summary.split())
    assert made[0].closed


def test_standard_input_is_a_prompt(
    engine: type[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("größe"))
    assert run_main("--prompt-file", "-", "--max-tokens", 5) == 0
    assert capsys.readouterr().out == "GRÖSSE"[:5]


def test_several_prompts_are_printed_in_order_and_written(
    engine: type[FakeEngine], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert run_main("--prompt-file", prompts, "--output", output, "--max-tokens", 6, "--top-k", 4) == 0
    printed = capsys.readouterr()
    assert printed.out == "FIRST ONE\nCHAT..\nA\n"
    headers = [line for line in printed.err.splitlines() if line.startswith("---")]
    assert headers == [
        f"--- {i} ({prompts} line {i + 1}): {r}" for i, r in enumerate(["length", "length", "stop"])
    ]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["text"] for line in lines] == ["FIRST ONE", "CHAT..", "A"]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[2]["token_ids"] == [ord(c) for c in "AB."]
    assert lines[2]["metrics"]["seed"] == 5
    assert lines[2]["metrics"]["output_tokens"] == 3
    assert lines[0]["metrics"]["rounds_by_accepted"] == [0, 0, 2, 0]
    assert (lines[0]["metrics"]["rounds"], lines[0]["metrics"]["accepted_by_index"]) == (2, [2, 2, 0])
    assert [(p.max_tokens, p.top_k, p.temperature) for p in made[0].params] == [
        (9, 4, 1),
        (6, 4, 0.5),
        (6, 4, 1),
    ]


def test_only_the_flags_given_are_set(engine: type[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("x")
    flags = (
        "--stop",
        "a",
        "--stop",
        "b",
        "--ignore-eos",
        "--mtp-step",
        2,
        "--num-blocks",
        50,
        "--max-tokens",
        1,
    )
    assert run_main("--prompt-file", tmp_path / "prompt.txt", *flags) == 0
    assert made[0].params[0] == SamplingParams(stop=("a", "b"), ignore_eos=True, max_tokens=1)
    assert made[0].params[0].model_fields_set == {"stop", "ignore_eos", "max_tokens"}
    assert (made[0].config.mtp_step, made[0].config.num_blocks) == (2, 50)


def test_every_field_has_a_flag() -> None:
    flags = {action.dest for action in run.make_parser()._actions}
    assert set(SamplingParams.model_fields) | set(EngineConfig.model_fields) <= flags


def test_compare_repeats_with_the_same_seeds_and_says_that_the_tokens_are_identical(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("--prompt-file", prompts, "--compare", "--mtp-step", 2) == 0
    printed = capsys.readouterr()
    assert "identical tokens: yes" in printed.err
    assert "mtp_step 2 decodes at " in printed.err
    assert printed.out.count("\n") == 3
    assert [one.config.mtp_step for one in made] == [2, 0]
    first, second = ([request.seed for request in one.requests.values()] for one in made)
    assert first == second


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
    assert run_main("--prompt-file", prompts, "--output", output, "--compare") == 130
    printed = capsys.readouterr()
    assert printed.out == "FIRST \nCHAT..\nA\n"
    assert "interrupted: this is what was decoded until then" in printed.err
    reasons = [json.loads(line)["finish_reason"] for line in output.read_text().splitlines()]
    assert reasons == ["abort", "abort", "stop"]
    assert len(made) == 1


def test_an_interrupt_while_loading_ends_cleanly(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_after = 0
    assert run_main("--prompt-file", prompts) == 130
    assert capsys.readouterr() == ("", "interrupted: nothing was decoded yet\n")


def test_a_request_that_fails_leaves_the_others_and_fails_the_run(
    engine: type[FakeEngine], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fail = "1"
    assert run_main("--prompt-file", prompts, "--max-tokens", 6) == 1
    printed = capsys.readouterr()
    assert printed.out == "FIRST ONE\nCHA\nA\n"
    assert f"error: {prompts} line 2: the device is on fire" in printed.err


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "prompt-file must hold a prompt, got {file}, which is empty"),
        ("{", "{file} line 1 must be a JSON object, got an error: Expecting"),
        ('{"prompt": "a"}\n[1]', "{file} line 2 must be a JSON object, got [1]"),
        ('{"max_tokens": 1}', "{file} line 1 must have one of prompt, messages, prompt_token_ids, got 0"),
        ('{"prompt": "a", "messages": []}', "{file} line 1 must have one of prompt, messages"),
        ('\n{"prompt": 3}', "{file} line 2: prompt must be a string, got '3'"),
        ('{"messages": "hi"}', "{file} line 1: messages must be a list of messages, got 'hi'"),
        ('{"prompt_token_ids": [1, 2.5]}', "{file} line 1: prompt_token_ids must be a list of integers"),
        ('{"prompt": "a", "top_p": 2}', "{file} line 1: top_p must be above 0 and at most 1, got 2.0"),
        ('{"prompt": "a", "topp": 2}', "{file} line 1: topp must be a sampling parameter"),
        ('{"prompt": "' + "a" * 41 + '"}', "{file} line 1: prompt must be shorter than max_model_len=40"),
    ],
)
def test_a_bad_line_is_named_in_one_line(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert run_main("--prompt-file", file) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("weights")]
    assert len(errors) == 1
    assert errors[0].startswith("error: " + message.replace("{file}", str(file)))


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "error: the following arguments are required: --prompt-file; --help lists"),
        (["--mtpstep", "3"], "error: unrecognized arguments: --mtpstep 3; --help lists the flags"),
        (["--temperature", "hot"], "error: temperature must be a valid number"),
        (["--top-p", "2"], "error: top_p must be above 0 and at most 1, got 2.0"),
        (["--n", "2"], "error: n must be 1, got 2; n is not in this version"),
        (
            ["--logit-bias", '{"5": 1}'],
            "error: logit_bias must be None, got {5: 1.0}; logit_bias is not in this",
        ),
        (["--logit-bias", "{"], "error: argument --logit-bias: invalid"),
        (["--mtp-step", "9"], "error: mtp_step must be"),
        (["--prefix-cache"], "error: prefix_cache must be False, got True"),
        (["--device", "tpu"], "error: device must be"),
        (["--compare", "--mtp-step", "0"], "error: mtp_step must be at least 1 with --compare, got 0"),
        (
            ["--model", "/nowhere"],
            "error: model must be a directory with a config.json, got /nowhere; pass; a",
        ),
        (["--output", "/nowhere/out"], "error: output must be writable, got /nowhere/out: No such file"),
        (["--output", "{file}"], "error: output must not be the prompt file"),
    ],
)
def test_a_bad_flag_is_named_in_one_line(
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("x")
    flags = [flag.replace("{file}", str(file)) for flag in flags]
    assert run_main(*(["--prompt-file", file] if flags else []), *flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith(message)
    assert file.read_text() == "x"


def test_missing_and_unreadable_files_are_named(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("--prompt-file", tmp_path / "none.txt") == 2
    assert "prompt-file must be readable, got" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe")
    assert run_main("--prompt-file", tmp_path / "latin.txt") == 2
    assert "prompt-file must be UTF-8 text" in capsys.readouterr().err


def test_mistakes_and_help_do_not_wait_for_torch() -> None:
    code = """if True:
        import contextlib, sys
        from compiled_mtp import run
        with contextlib.suppress(SystemExit):
            run.main(["--help"])
        assert run.main(["--prompt-file", "/nowhere"]) == 2
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_bar_in_a_terminal_and_a_line_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = run._Progress(stream)
        for done in range(1, 4):
            progress("weights", done, 3)
    assert "weights:" in terminal.getvalue()
    assert "\r" in terminal.getvalue()
    assert pipe.getvalue() == "weights: done\n"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float) -> None:
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
    assert run_main(*files, *flags, "--ignore-eos", "--max-tokens", 20, "--compare") == 0
    printed = capsys.readouterr()
    assert "identical tokens: yes" in printed.err
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line["token_ids"]) for line in written] == [20, 5]
    assert printed.out == "".join(line["text"] + "\n" for line in written)
