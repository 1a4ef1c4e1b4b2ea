"""Commands in sentences and tables of README.md and docs/ name commands, flags, targets, extras that exist.

tests/docs/test_blocks.py runs or reads the commands of fenced blocks.
"""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from compiled_mtp.cli.bench import BENCHMARKS
from compiled_mtp.cli.main import COMMANDS
from compiled_mtp.config import EngineConfig
from tests.docs.error_texts import ROOT
from tests.docs.test_blocks import CARD, DOCUMENTS

# The changelog names what is gone.
PAGES = [page for page in (*DOCUMENTS, CARD) if page.name != "CHANGELOG.md"]
FLAG = re.compile(r"^--[a-z][a-z0-9-]*")


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words of each inline code that is a command of this repository."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        try:
            words = shlex.split(code)
        except ValueError:
            continue
        if words[:1] == ["python"]:
            words = words[1:]
        if (words and words[0] in ("compiled-mtp", "make", "pip") and len(words) > 1) or (
            words and re.fullmatch(r"(tools/)?\w+\.py", words[0])
        ):
            yield words


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return the flags of one of our commands; `bench step` and `bench serving` have their own."""
    modules = {f"bench {name}": f"benchmarks.{module}" for name, module in BENCHMARKS.items()}
    modules["serve"] = "server.serve"
    module = modules.get(command, f"cli.{command.replace('-', '_')}")
    parser = importlib.import_module(f"compiled_mtp.{module}").make_parser()
    return frozenset(parser._option_string_actions)


@cache
def flags_of_tools() -> frozenset[str]:
    """Return every flag that a tool declares, and those of EngineConfig, which some tools take."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tools").rglob("*.py")]
    declared = {flag for text in texts for flag in re.findall(r'"(--[a-z][a-z0-9-]*)"', text)}
    return frozenset(declared | {"--" + name.replace("_", "-") for name in EngineConfig.model_fields})


def unknown_names(words: list[str]) -> list[str]:
    """Return the names in a command that do not exist."""
    flags = [found[0] for word in words[1:] if (found := FLAG.match(word))]
    if words[0] == "compiled-mtp":
        if words[1] not in COMMANDS:
            return [] if words[1].isupper() else [words[1]]
        command = " ".join(words[1:3]) if words[1] == "bench" else words[1]
        if words[1] == "bench" and words[2] not in BENCHMARKS:
            return [words[2]]
        return [flag for flag in flags if flag not in flags_of(command)]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words[1:2] if word not in targets]
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {name for word in words for one in re.findall(r"\[(.*)\]", word) for name in one.split(",")}
        return sorted(extras - project["optional-dependencies"].keys())
    script = ROOT / "tools" / words[0].removeprefix("tools/")
    if not script.exists():
        # A module of the package, or another program's.
        return [] if not words[0].startswith("tools/") and not flags else [words[0]]
    return [flag for flag in flags if flag not in flags_of_tools()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_sentences_name_what_exists(page: Path) -> None:
    wrong = {shlex.join(words): unknown for words in commands_of(page) if (unknown := unknown_names(words))}
    assert wrong == {}


def test_there_are_such_commands_and_wrong_ones_are_noticed() -> None:
    assert sum(len(list(commands_of(page))) for page in PAGES) > 60
    assert unknown_names(["compiled-mtp", "run", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_names(["compiled-mtp", "walk"]) == ["walk"]
    assert unknown_names(["make", "coffee"]) == ["coffee"]
    assert unknown_names(["compiled-mtp", "bench", "step", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_names(["compiled-mtp", "bench", "walk"]) == ["walk"]
    assert unknown_names(["tools/bench_op.py", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_names(["tools/no_such_tool.py"]) == ["tools/no_such_tool.py"]
    assert unknown_names(["pip", "install", ".[no-such-extra]"]) == ["no-such-extra"]
