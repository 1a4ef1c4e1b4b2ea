"""From flags to a service: its model names, and the refusals before the weights are loaded."""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server import serve
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.interpreter import settle_interpreter
from tests.server.serving import ScriptedEngine, make_family, running

SHIPPED = Path(EngineConfig().model)


class FakeEngine:
    num_threads = None

    def __init__(self, config: EngineConfig, *, frontend: Any) -> None:
        self.runner = SimpleNamespace(memory=SimpleNamespace(max_model_len=99))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of services that would have been created."""
    calls: list[tuple[Any, ...]] = []

    def make(*arguments: Any) -> None:
        calls.append(arguments)
        raise ValueError("stopped here")

    monkeypatch.setattr("compiled_mtp.engine.Engine", FakeEngine)
    monkeypatch.setattr(serve, "make_service", make)
    return calls


@pytest.mark.parametrize("name", [(), ("own",)])
def test_a_repository_is_served_under_its_own_name(
    made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compiled_mtp.frontend.checkpoint.find_checkpoint", lambda model, is_offline: SHIPPED)
    warm: list[Any] = []
    method = "compiled_mtp.frontend.processor.RequestProcessor.warm_up_grammars"
    monkeypatch.setattr(method, lambda frontend: warm.append(frontend))
    config = ServerConfig(port=0, served_model_name=name)
    with pytest.raises(ValueError, match="stopped here"):
        serve.serve(config, EngineConfig(model="Acme/Tiny"))
    ((_, _, path, _, used, _),) = made
    assert path == SHIPPED
    assert len(warm) == 1, "before requests are accepted"
    assert used.served_model_name == (name or ("Acme/Tiny",))


def test_a_checkpoint_without_a_tokenizer(made: list[tuple[Any, ...]], tmp_path: Path) -> None:
    for file in SHIPPED.iterdir():
        if file.suffix in (".json", ".safetensors") and not file.name.startswith("tokenizer"):
            shutil.copy(file, tmp_path)
    with pytest.raises(ValueError, match=r"model must hold a tokenizer.json, got .*; download all its files"):
        serve.serve(ServerConfig(port=0), EngineConfig(model=tmp_path))
    assert made == []


def test_loaded_objects_are_not_scanned_by_the_garbage_collector() -> None:
    before, num_frozen = sys.getswitchinterval(), gc.get_freeze_count()
    try:
        settle_interpreter()
        assert gc.get_freeze_count() > num_frozen + 10_000
        assert sys.getswitchinterval() < before
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


def test_a_second_signal_ends_the_apps_processes(caplog: pytest.LogCaptureFixture) -> None:
    with running(ScriptedEngine(Tokenizer(SHIPPED)), SHIPPED) as served:
        served.server.force_exit = True
        served.stop()
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


def test_family_is_found(tmp_path: Path) -> None:
    assert serve.find_call_form(Tokenizer(make_family(tmp_path / "x", "xml"))) == "xml"
    assert serve.find_call_form(Tokenizer(make_family(tmp_path / "j", "json"))) == "json"
    assert serve.find_call_form(Tokenizer(SHIPPED)) is None
