"""Fixtures of the command line's tests."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from tests.cli.fakes import FakeEngine, made, open_frontend


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    made.clear()
    fake = type("Fake", (FakeEngine,), {})
    monkeypatch.setitem(sys.modules, "compiled_mtp.engine", types.SimpleNamespace(Engine=fake))
    frontend = types.SimpleNamespace(open_frontend=open_frontend)
    monkeypatch.setitem(sys.modules, "compiled_mtp.frontend.checkpoint", frontend)
    return fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        {"prompt": "first one", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "id": "chat-7"},
        {"prompt_token_ids": [97, 98], "seed": 5, "stop": "B.", "id": 12},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file
