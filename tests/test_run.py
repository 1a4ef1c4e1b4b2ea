"""The command line: what goes where, what it says about mistakes, and the whole way once."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.plan import RowLogprobs
from compiled_mtp.request import Request, RequestOutput, SamplingParams, derive_seed

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
        request.history.mtp_step = self.config.mtp_step
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
            num_drafts = len(window) - 1 if done else None
            rows = RowLogprobs([-1.0] * 9, [1] * 9, [[]] * 9, [[]] * 9)
            kept, text = request.append([ord(c) for c in window], num_drafts, time.monotonic(), logprobs=rows)
            error = None
            if self.fail == name:
                request.finish("error")
                error = "the device is on fire"
            reason, entries = request.finish_reason, request.take_logprobs()
            output = RequestOutput(name, kept, text, request.metrics, reason, error, entries)
            # Further choices say the same, and their numbers at the end.
            for index in range(request.params.n - 1, 0, -1):
                outputs.append(output._replace(index=index, new_text=text + str(index) * bool(reason)))
            outputs.append(output)
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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größe".encode()), encoding="latin-1"))
    assert run_main("--prompt-file", "-", "--max-tokens", 5) == 0
    assert capsys.readouterr().out == "GRÖSSE"[:5]


@pytest.mark.parametrize("is_stdin", [False, True])
def test_a_prompt_keeps_its_line_breaks_and_loses_its_byte_order_mark(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stdin: bool
) -> None:
    content, file = b"\xef\xbb\xbfa\r\nb\rc\nd\r\n", tmp_path / "prompt.txt"
    file.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    assert run_main("--prompt-file", "-" if is_stdin else file, "--max-tokens", 1) == 0
    assert made[0].answers["0"].rstrip(".") == "A\r\nB\rC\nD"


def test_lines_written_on_windows_are_read(engine: type[FakeEngine], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\r\\n"}\r\n{"prompt": "b"}\r\n')
    assert run_main("--prompt-file", file, "--max-tokens", 1) == 0
    assert [answer.rstrip(".") for answer in made[0].answers.values()] == ["A\r\n", "B"]


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


@pytest.mark.parametrize("flag", ["batch-sizes", "reference-ops"])
def test_a_list_is_separated_by_commas_or_flags(engine: type[FakeEngine], tmp_path: Path, flag: str) -> None:
    (tmp_path / "prompt.txt").write_text("x")
    names, wanted = ("rms_norm", "silu_mul", "sample"), ("rms_norm", "silu_mul", "sample")
    if flag == "batch-sizes":
        names, wanted = ("1", "2", "4"), (1, 2, 4)
    one, two, three = names
    for flags in ((f"--{flag}", ",".join(names)), (f"--{flag}", f"{one},{two}", f"--{flag}", three)):
        assert run_main("--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 1, *flags) == 0
        assert getattr(made[-1].config, flag.replace("-", "_")) == wanted


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
    first, second = ([request.history.seed for request in one.requests.values()] for one in made)
    assert first == second


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
    said = "the same again with mtp_step 0, without graph_cache, which is of mtp_step 2\n"
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
    assert capsys.readouterr() == ("", "interrupted: nothing more was decoded\n")


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
        ('{"prompt": "a", "self": 1}', "{file} line 1: self must be a sampling parameter"),
        ('{"prompt": "a", "max_tokens": true}', "{file} line 1: max_tokens must "),
        ('{"prompt": ' + "[" * 99999, "{file} line 1 must be a JSON object, got an error: maximum recursion"),
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
        (["--n", "17"], "error: n must be an integer from 1 to 16, got 17; send more requests"),
        (["--logit-bias", '{"5": 101}'], "error: logit_bias[5] must be a number from -100 to 100, got 101"),
        (["--logit-bias", "{"], "error: argument --logit-bias: invalid JSON value: '{'; --help"),
        (["--logit-bias", "[" * 9999], "error: argument --logit-bias: invalid JSON value: '[[["),
        (["--tools", "[5]"], "error: tools.0 must be a valid dictionary, got 5"),
        (["--tool-choice", "5", "--echo"], "error: unrecognized arguments: --echo"),
        (["--mtp-step", "9"], "error: mtp_step must be"),
        (["--prefix-cache"], "error: prefix_cache must be False, got True"),
        (["--device", "tpu"], "error: device must be"),
        (["--compare", "--mtp-step", "0"], "error: mtp_step must be at least 1 with --compare, got 0"),
        (
            ["--model", "/nowhere"],
            "error: model must be a directory with a config.json, got /nowhere; pass; a",
        ),
        (["--output", "/nowhere/out"], "error: output must be a file that can be written, got /nowhere/out;"),
        (["--output", "/"], "error: output must be a file that can be written, got /; choose"),
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


def test_each_choice_is_written_for_itself(engine: type[FakeEngine], tmp_path: Path) -> None:
    """The fake engine is asked once a request and answers for every choice, the last one first."""
    prompt, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompt.write_text('{"prompt": "ab", "n": 3, "max_tokens": 2}\n{"prompt": "cd", "max_tokens": 2}')
    assert run_main("--prompt-file", prompt, "--output", output, "--tool-choice", "auto") == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["index"], one["request"], one["choice"], one["text"]) for one in lines] == [
        (0, 0, 0, "AB"),
        (1, 0, 1, "AB1"),
        (2, 0, 2, "AB2"),
        (3, 1, 0, "CD"),
    ]
    assert [one.n for one in made[0].params] == [3, 1]
    assert made[0].params[0].tool_choice == "auto"
    first = lines[0]["logprobs"]
    assert first is None
    prompt.write_text('{"prompt": "ab", "logprobs": 0, "max_tokens": 2}')
    assert run_main("--prompt-file", prompt, "--output", output) == 0
    (line,) = map(json.loads, output.read_text().splitlines())
    assert line["logprobs"] == [{"id": i, "bytes": [], "logprob": -1.0, "rank": 1, "top": []} for i in b"AB"]


@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--top-p", "2"], []])
def test_a_mistake_leaves_the_output_of_an_earlier_run(
    engine: type[FakeEngine], tmp_path: Path, flags: list[str]
) -> None:
    prompt, output, new = tmp_path / "prompt.txt", tmp_path / "out.jsonl", tmp_path / "new.jsonl"
    prompt.write_text("x" if flags else "x" * 41)  # which the engine finds too long
    output.write_text("kept")
    for file in (output, new):
        assert run_main("--prompt-file", prompt, "--output", file, *flags) == 2
    assert output.read_text() == "kept"
    assert not new.exists()


def test_standard_input_and_an_output_that_exists(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").write_text("old\n" * 99)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab"), encoding="utf-8"))
    assert run_main("--prompt-file", "-", "--output", tmp_path / "out.jsonl", "--max-tokens", 2) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == "AB"


def pipe_without_a_reader() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_output_is_written_though_nobody_reads_the_rest(
    engine: type[FakeEngine],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_single: bool,
) -> None:
    if is_single:
        prompts = tmp_path / "prompt.txt"
        prompts.write_text("first one")
    output = tmp_path / "out.jsonl"
    with pipe_without_a_reader() as pipe:
        monkeypatch.setattr(sys, name, pipe)
        assert run_main("--prompt-file", prompts, "--output", output, "--max-tokens", 6) == 0
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert texts == (["FIRST "] if is_single else ["FIRST ONE", "CHAT..", "A"])
    if name == "stdout":
        said = f"standard output ended (Broken pipe): from here on only {output} is written\n"
        assert capsys.readouterr().err.count(said) == 1


def test_without_an_output_a_reader_that_left_ends_the_run_quietly(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pipe_without_a_reader() as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert run_main("--prompt-file", prompts, "--max-tokens", 6) == 1
    assert "output tokens" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("is_output", [False, True])
def test_what_cannot_be_written_is_named(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_output: bool,
) -> None:
    with open("/dev/full", "w") as full:
        if not is_output:
            monkeypatch.setattr("sys.stdout", full)
        flags = ("--output", "/dev/full") if is_output else ()
        assert run_main("--prompt-file", prompts, "--max-tokens", 6, *flags) == 2
    name = "/dev/full" if is_output else "standard output"
    assert capsys.readouterr().err.endswith(f"error: [Errno 28] No space left on device: '{name}'\n")


@pytest.mark.parametrize(
    "name, code, message",
    [
        ("stdin", 2, "error: prompt-file must not be - with standard input closed, got -; name a file\n"),
        ("stdout", 2, "error: standard output must be open, got a closed one; redirect it to /dev/null\n"),
        ("stderr", 0, ""),
    ],
)
def test_closed_streams(
    engine: type[FakeEngine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab"), encoding="utf-8"))
    monkeypatch.setattr(sys, name, None)
    assert run_main("--prompt-file", "-", "--max-tokens", 2) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("" if code else "AB", message)


def test_missing_and_unreadable_files_are_named(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("--prompt-file", tmp_path / "none.txt") == 2
    assert "prompt-file must be readable, got" in capsys.readouterr().err
    assert run_main("--prompt-file", tmp_path) == 2
    assert f"prompt-file must be readable, got {tmp_path}: Is a directory" in capsys.readouterr().err
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


def test_a_bar_in_a_terminal_and_a_line_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr("sys.stderr", stream)
        progress = run._Progress()
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


def test_a_line_may_have_a_priority(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "priority": -3, "max_tokens": 2}\n{"prompt": "b"}\n')
    jobs = run.read_jobs(str(file), {})
    assert [job.prompt for job in jobs] == [{"prompt": "a", "priority": -3}, {"prompt": "b"}]
    assert jobs[0].params.max_tokens == 2


def test_one_seed_gives_every_line_its_own_and_an_error_is_printable(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "c", "seed": 5}\n')
    jobs = run.read_jobs(str(file), {"seed": 9})
    assert [job.params.seed for job in jobs] == [9, derive_seed(9, 1), 5]
    file.write_text('{"prompt": "a", "stop": "' + "\\u001b" * 500_000 + '"}')
    assert run_main("--prompt-file", file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line) < 1000
