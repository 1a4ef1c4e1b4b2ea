"""Every ```bash and ```python block of README.md and docs/ is run, or listed below with the reason.

A line of a bash block is run in this process, in a folder with the examples, with few tokens and the default
checkpoint instead of released ones. For lines that are only read, flags, extras and targets are compared with
those that exist. Any other line fails.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from compiled_mtp.cli.main import main
from tests.adapters import write_adapter
from tests.docs.error_texts import ROOT
from tools import plot

CARD = ROOT / "compiled_mtp" / "default_model" / "README.md"
# Every page of the tree but the card, whose blocks are what the model wrote.
DOCUMENTS = tuple(
    page
    for page in sorted(ROOT.rglob("*.md"))
    if page != CARD
    and not {"build", "dist"} & set(page.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
# Languages of blocks that are not run: output, and contents of files.
LANGUAGES = {"bash", "python", "json", "yaml", ""}
RUN_ELSEWHERE = {
    "docs/serving.md": "tests/server/test_docs.py, against a server",
    "docs/images.md": "tests/vision/test_cli.py, with a checkpoint that has a vision tower",
}
# Beginnings of lines that are not run, with the reason. Each is read: see `read_line`.
NOT_RUN = {
    "make ": "what CI runs, or needs minutes, a GPU, Chromium or Ray",
    "pip install ": "reaches package registries",
    "python3 -m venv ": "an environment is no part of this one",
    "source ": "an environment is no part of this one",
    "compiled-mtp export ": "compiles for minutes; tests/graphs/test_artifacts.py exports and loads",
    "compiled-mtp serve ": "runs until it is stopped; tests/server/test_serve.py starts and stops it",
    "compiled-mtp run --prompt-file examples/quicksort.txt --max-batch 2 --graph-cache ": "needs the export",
    'compiled-mtp run --prompt "def f(" --max-batch 2 --graph-cache ': "needs the export",
    "python examples/client.py ": "tests/server/test_docs.py runs it against a server",
    "lm_eval ": "needs lm-eval; tests/lm_eval/test_lm_eval.py (make lm-eval)",
    "torchrun ": "has processes of its own; tests/parallel/test_torchrun.py starts it",
    "docker ": "needs Docker's daemon; tests/docs/test_deploy.py reads the files",
    "cd examples/deploy && openssl ": "makes a key",
    "/opt/compiled-mtp/bin/pip install ": "reaches package registries",
    "install -D --mode 600 keys ": "needs root",
    "cp examples/deploy/compiled-mtp.service ": "needs root; tests/docs/test_deploy.py reads the unit",
    "systemctl ": "needs systemd; tests/docs/test_deploy.py reads the unit",
    "serve run ": "needs Ray; tests/replicas/test_ray.py (make replicas)",
}
FEW = 4
CHECKPOINT = str(ROOT / "compiled_mtp" / "default_model")
FENCED = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RELEASED = re.compile(r"^(Qwen|/data)/")


def blocks(document: Path) -> list[tuple[str, str]]:
    """Return (language, text) of each fenced block."""
    return FENCED.findall(document.read_text(encoding="utf-8"))


BLOCKS = [
    pytest.param(language, text, id=f"{document.relative_to(ROOT)}-{number}")
    for document in DOCUMENTS
    if document.relative_to(ROOT).as_posix() not in RUN_ELSEWHERE
    for number, (language, text) in enumerate(blocks(document))
]


def lines_of(text: str) -> Iterator[str]:
    """Return the commands of a bash block: comments left out, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run: it holds their inputs and keeps their outputs."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "examples").mkdir()
    for path in (path for path in (ROOT / "examples").iterdir() if path.is_file()):
        # A line's own max_tokens would be decoded to the end.
        text = re.sub(r'"max_tokens": \d+', f'"max_tokens": {FEW}', path.read_text(encoding="utf-8"))
        (tmp_path / "examples" / path.name).write_text(text, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "data").symlink_to(ROOT / "docs" / "data")
    # Between them the head of docs/command-line.md moves.
    (tmp_path / "base-model").symlink_to(CHECKPOINT)
    (tmp_path / "fine-tune").mkdir()
    write_adapter(tmp_path / "my-adapter", Path(CHECKPOINT), targets=re.compile(r"layers\.0\..*down_proj"))
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "one.txt").write_text("def f(x):\n    return x\n" * 9)
    requests = dict(blocks(ROOT / "docs" / "command-line.md"))["json"]
    (tmp_path / "prompts.jsonl").write_text(requests.replace('"max_tokens": 64', f'"max_tokens": {FEW}'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n/exit\n"))
    return tmp_path


def marks_of(picture: Path) -> list[float]:
    """Return x and y, in points, of every mark of a picture of tools/plot.py."""
    found = re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', picture.read_text(encoding="utf-8"))
    return [float(number) for pair in found for number in pair]


def run_line(words: list[str]) -> None:
    """Run one command."""
    words = [CHECKPOINT if RELEASED.match(word) else word for word in words]
    if words[0] == "compiled-mtp":
        few = ["--max-tokens", str(FEW)] if words[1] in ("run", "chat") else []
        assert main([*words[1:], *few]) == 0
    elif words[:2] == ["python", "tools/plot.py"]:
        assert plot.main(words[2:]) == 0
        name = words[words.index("--output") + 1]
        drawn, committed = marks_of(Path(name)), marks_of(ROOT / name)
        assert len(drawn) == len(committed) > 0
        # Releases of matplotlib may move a point slightly.
        assert all(abs(one - other) < 2 for one, other in zip(drawn, committed, strict=True))
    elif words[0] == "python" and words[1].startswith("examples/"):
        few = ["--max-tokens", str(FEW)] if words[1].endswith("stream.py") else []
        runpy.run_path(words[1])["main"]([*words[2:], *few])
    else:
        raise AssertionError(f"{shlex.join(words)} is neither run nor listed in NOT_RUN")


def read_line(words: list[str]) -> None:
    """Compare the names in a command that is not run with those that exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "pip":
        extras = [name for word in words for name in re.findall(r"\[(.*)\]", word)]
        assert set(extras) <= set(project["optional-dependencies"])
    elif words[0] == "compiled-mtp":
        module = "server.serve" if words[1] == "serve" else f"cli.{words[1]}"
        make_parser: Callable[[], Any] = importlib.import_module(f"compiled_mtp.{module}").make_parser
        make_parser().parse_args(words[2:])
    elif words[0] == "torchrun" and "-m" in words:
        at = words.index("-m") + 1
        command = {"compiled_mtp.run": "run", "compiled_mtp.server": "serve"}[words[at]]
        read_line(["compiled-mtp", command, *words[at + 1 :]])
    elif words[0] == "docker":
        named = [words[at + 1] for at, word in enumerate(words) if word == "--file"]
        assert all((ROOT / file).is_file() or (ROOT / "examples/deploy" / file).is_file() for file in named)
        if words[1] == "run":
            read_line(["compiled-mtp", "serve", *words[words.index("compiled-mtp") + 1 :]])
    elif words[0] == "cp":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "serve":
        assert words[2] == "compiled_mtp.ray_serve:app"


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_a_block(folder: Path, language: str, text: str) -> None:
    assert language in LANGUAGES, f"say what the block is: {sorted(LANGUAGES)}"
    if language == "bash":
        for line in lines_of(text):
            words = shlex.split(line, comments=True)
            if any(line.startswith(begin) for begin in NOT_RUN):
                read_line(words)
            else:
                run_line(words)
    elif language == "python" and not text.startswith("    "):  # Otherwise it is a command's output.
        exec(compile(text, "block", "exec"), {"__name__": "block"})
    elif language == "json":
        assert all(json.loads(line) for line in text.splitlines())
    elif language == "yaml":
        assert yaml.safe_load(text)
    else:
        commands = re.findall(r"^(?:\$|compiled-mtp|pip|python3?|make|curl|serve|git) .*", text, re.MULTILINE)
        assert commands == [], "commands stand in ```bash blocks"


def test_every_reason_is_needed() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document)]
    said = [line for language, text in found if language == "bash" for line in lines_of(text)]
    assert [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in said)] == []


def test_a_new_command_is_noticed() -> None:
    with pytest.raises(AssertionError, match="is neither run nor listed"):
        run_line(["python", "tools/bench_op.py"])


def test_no_page_is_left_out() -> None:
    assert {ROOT / "README.md", ROOT / "tools" / "README.md", ROOT / "docs" / "serving.md"} <= set(DOCUMENTS)
    for page, where in RUN_ELSEWHERE.items():
        # The test reads the page itself, and counts its blocks.
        assert f'/ "{Path(page).name}"' in (ROOT / where.partition(",")[0]).read_text(encoding="utf-8")
    ((_, command),) = [(kind, text) for kind, text in blocks(CARD) if kind != "python"]
    assert (ROOT / shlex.split(command)[1]).is_file()


@pytest.mark.parametrize("document", [*DOCUMENTS, CARD], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: dict[Path, set[str]] = {}
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = Path(os.path.normpath(document.parent / name)) if name else document
        assert file.exists(), target
        if anchor:
            anchors.setdefault(file, set(map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE))))
            assert anchor in anchors[file], target


def slug(heading: str) -> str:
    """Return a heading's anchor, as Markdown viewers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
