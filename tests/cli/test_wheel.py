"""A new user's installation: the wheel in its own environment, the console script outside of the tree."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import compiled_mtp

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.soak


def call(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `compiled-mtp` that pip installs; its dependencies are those of this environment."""
    tree, place = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("place")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("compiled_mtp", "ops", "graphs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", place, tree]
    done = call(*build, cwd=place)
    assert done.returncode == 0, done.stderr
    environment = place / "environment"
    assert call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=place).returncode == 0
    python = environment / "bin" / "python"
    (wheel,) = place.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    done = call(*pip, cwd=place)
    assert done.returncode == 0, done.stderr
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "compiled-mtp"


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_first_run(script: Path, tmp_path: Path) -> None:
    done = call(script, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"compiled-mtp {compiled_mtp.__version__}\n")
    flags = ["--temperature", 0, "--max-tokens", 16]
    done = call(script, "run", "--prompt", "def f(", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("self):\n")
    assert "output tokens" in done.stderr
    door = [script.parent / "python", "-m", "compiled_mtp", "run", "--prompt", "def f("]
    module = call(*door, *flags, cwd=tmp_path)
    assert (module.returncode, module.stdout) == (0, done.stdout)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["run", "--prompt", "x", "--model", "/no/such"],
            "model must be a directory with a config.json, got",
        ),
        (
            ["run", "--prompt", "x", "--model", "No/Such", "--offline"],
            "model must be a directory, or complete in",
        ),
        (
            ["run", "--prompt", "x", "--mtpstep", "3"],
            "unrecognized arguments: --mtpstep 3; did you mean --mtp-step?",
        ),
        (
            ["run", "--prompt-file", "none.jsonl"],
            "prompt-file must be readable, got none.jsonl: No such file",
        ),
        (["chat", "--system"], "argument --system: expected one argument; --help lists the flags"),
        (["export"], "the following arguments are required: --output; --help lists the flags"),
    ],
)
def test_mistakes_are_one_line(script: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    done = call(script, *flags, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_busy_port(script: Path, tmp_path: Path, busy_port: int) -> None:
    done = call(script, "serve", "--port", busy_port, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        f"error: port must be free at 127.0.0.1, got {busy_port}: Address already in use; take another"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_decoded_texts(script: Path, tmp_path: Path, number: int, code: int) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "def f(", "id": "long", "max_tokens": 4000}, {"prompt": "x", "id": "short"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--prompt-file", prompts, "--output", output, "--max-tokens", 5, "--ignore-eos"]
    command = [str(word) for word in (script, "run", *flags)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not output.exists() or not output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == code
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["id"], one["finish_reason"]) for one in found] == [("short", "length"), ("long", "abort")]
    assert len(found[1]["token_ids"]) >= 5
