"""Every example of docs/serving.md runs unchanged, and so does the client of examples/."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.benchmarks import service_load
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.openai_models import Body, ChatBody, CompletionBody, Message, StreamOptions
from compiled_mtp.server.serve import make_parser
from tests.server.forced_calls import CALLS
from tests.server.serving import Running, ScriptedEngine, make_family, running

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ScriptedEngine]]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model) as server:
        yield server, engine


def test_every_example_is_run() -> None:
    assert [kind for kind, _ in BLOCKS] == ["bash", "bash", *["python"] * 4, "bash"]
    # tests/server/test_serve.py starts servers, tests/benchmarks sends loads.
    make_parser().parse_args(shlex.split(BLOCKS[0][1])[2:])
    service_load.make_parser().parse_args(shlex.split(BLOCKS[6][1].replace("\\\n", " "))[3:])


def test_curl(served: Any) -> None:
    server, engine = served
    engine.say("a text")
    assert shutil.which("curl")
    command = BLOCKS[1][1].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == "a text"
    assert engine.seen[-1][1].seed == 7


@pytest.mark.parametrize(
    ("number", "says", "prints"),
    [
        (2, "a text", "a text"),
        (3, "A tree.", "A tree.\n"),
        (5, "A tree.", "A tree.\n"),
        (4, CALLS["xml"], "get_weather {'city': 'Zürich', 'days': 3}\n"),
    ],
)
def test_python(served: Any, capsys: pytest.CaptureFixture[str], number: int, says: str, prints: str) -> None:
    server, engine = served
    engine.say(says)
    exec(compile(BLOCKS[number][1].replace("http://127.0.0.1:8000", server.url), "serving.md", "exec"), {})
    assert capsys.readouterr().out == prints


def test_the_client_of_the_examples(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server, engine = served
    engine.say("a text of it", chunk=4)
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "client.py"))["main"]
    main(["--url", f"{server.url}/v1", "--prompt", "def f("])
    text, counts = capsys.readouterr().out.splitlines()
    assert text == "a text of it"
    assert "'accepted_tokens': " in counts


def test_the_list_of_fields_without_effect() -> None:
    models: tuple[type[Body], ...] = (ChatBody, CompletionBody, Message, StreamOptions)
    ignored = {
        name
        for model in models
        for name, info in model.model_fields.items()
        if info.description == "accepted, changes nothing"
    }
    assert len(ignored) > 8
    assert [name for name in ignored if f"{name}`" not in TEXT] == []


def test_named_flags_exist() -> None:
    parsers = (make_parser(), service_load.make_parser())
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) - known == set()
