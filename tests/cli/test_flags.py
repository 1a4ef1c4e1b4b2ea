"""Flags: the settings that they set, and errors for mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import quantize, run
from compiled_mtp.config import EngineConfig
from compiled_mtp.request import SamplingParams
from tests.cli.fakes import FakeEngine, made, run_main


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "error: one of the arguments --prompt --prompt-file is required; --help lists"),
        (["--mtpstep", "3"], "error: unrecognized arguments: --mtpstep 3; did you mean --mtp-step?"),
        (["--swiftness", "3"], "error: unrecognized arguments: --swiftness 3; --help lists the flags"),
        (
            ["--max-num-seqs", "4"],
            "error: unrecognized arguments: --max-num-seqs 4; --max-num-seqs is --max-batch",
        ),
        (["--echo", " "], "error: unrecognized arguments: --echo  ; --help lists the flags"),
        (["--top-k=-1", " "], "error: unrecognized arguments:  ; --help lists the flags"),
        (["--stop", "a", "b"], "error: unrecognized arguments: b; put quotes around a value of several"),
        (["-hf", "a/b"], "error: unrecognized arguments: -hf; -hf is --model here"),
        (
            ["--top-k=-1", "Qwen/Qwen3.5-4B"],
            "error: unrecognized arguments: Qwen/Qwen3.5-4B; pass the model as",
        ),
        (["--temperature", "hot"], "error: temperature must be a valid number"),
        (["--top-p", "2"], "error: top_p must be above 0 and at most 1, got 2.0"),
        (["--n", "17"], "error: n must be an integer from 1 to 16, got 17; send more requests"),
        (["--logit-bias", '{"5": 101}'], "error: logit_bias[5] must be a number from -100 to 100, got 101"),
        (["--logit-bias", "{"], "error: argument --logit-bias: invalid JSON value: '{'; --help"),
        (["--logit-bias", "[" * 9999], "error: argument --logit-bias: invalid JSON value: '[[["),
        (["--tools", "[5]"], "error: tools.0 must be a valid dictionary, got 5"),
        (["--tool-choice", "5", "--echo"], "error: unrecognized arguments: --echo"),
        (["--mtp-step", "9"], "error: mtp_step must be"),
        (["--prefix-cache-gb", "0"], "error: prefix_cache_gb must be greater than 0, got '0'"),
        (
            ["--cache-salt", "x" * 257],
            "error: cache_salt must be Unicode text of at most 256 characters, got",
        ),
        (["--device", "tpu"], "error: device must be"),
        (["--compare", "--mtp-step", "0"], "error: mtp_step must be at least 1 with --compare, got 0"),
        (
            ["--model", "/nowhere"],
            "error: model must be a directory with a config.json, got /nowhere; pass; a",
        ),
        (["--prompt", "y"], "error: argument --prompt: not allowed with argument --prompt-file; --help"),
        (["--num-threads", "99999"], "error: num_threads must be at most"),
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


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (run, ["--promt", "x"], "error: unrecognized arguments: --promt; did you mean --prompt?"),
        (
            run,
            ["--promt=x", "--temprature", "2"],
            "error: unrecognized arguments: --promt --temprature; did you mean --prompt?",
        ),
        (quantize, ["--modle", "x"], "error: unrecognized arguments: --modle; --help"),
        (run, ["--max-tokens", "3"], "error: one of the arguments --prompt --prompt-file is required"),
        (
            run,
            ["--max-tokens", "3", "--", "--promt"],
            "error: one of the arguments --prompt --prompt-file is",
        ),
    ],
)
def test_a_misspelt_flag_is_reported_before_a_missing_one(
    capsys: pytest.CaptureFixture[str], command: Any, argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        command.make_parser().parse_args(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


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


def test_mistakes_and_help_do_not_wait_for_torch() -> None:
    code = """if True:
        import contextlib, sys
        from compiled_mtp.cli import main, run
        with contextlib.suppress(SystemExit):
            run.main(["--help"])
        with contextlib.suppress(SystemExit):
            main.main(["--version"])
        assert main.main(["run", "--prompt-file", "/nowhere"]) == 2
        assert run.main(["--prompt-file", "/nowhere"]) == 2
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_writes_defaults_as_a_flag_takes_them() -> None:
    text = " ".join(run.make_parser().format_all().split())
    assert "0 is plain decode; default: auto, which chooses from mtp_depths, round by round" in text
    assert "sets the size of buffers (default: 0,1,2,3,5); repeat the flag for more" in text
