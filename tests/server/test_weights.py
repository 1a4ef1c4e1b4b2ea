"""Weights that change over the service: only where they are allowed, and only with the key."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.server.config import ServerConfig
from tests.server.serving import CHECKPOINT, Running, running

KEY = {"Authorization": "Bearer secret"}
PROMPT = "def quicksort(items):"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that ships with other weights."""
    path = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(CHECKPOINT, path)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = tensors[name] * 0.5
    save_file(tensors, path / "model.safetensors")
    return path


def post(server: Running, to: str, key: dict[str, str] = KEY, /, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{to}", json=body, headers=key, timeout=120)


def text(server: Running, max_tokens: int = 20) -> str:
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens}
    answer = post(server, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def expected(path: Path, max_tokens: int = 20) -> str:
    with Engine(EngineConfig(model=path, device="cpu", mtp_step=0)) as engine:
        return engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=max_tokens))[0].new_text


def test_weights_change_and_sleep_over_the_service(other: Path) -> None:
    old, new = expected(CHECKPOINT), expected(other)
    assert old != new
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    options: dict[str, Any] = {"api_key": "secret", "allow_weight_updates": True}
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len, **options) as server:
        for path in ("/update_weights", "/sleep", "/wake_up"):
            assert post(server, path, {}, path=str(other)).status_code == 401
        assert text(server) == old
        assert post(server, "/update_weights", path=str(other)).json() == {"status": "ok"}
        assert text(server) == new
        wrong = post(server, "/update_weights", path=str(other / "nowhere"))
        assert wrong.status_code == 400
        assert "nowhere" in wrong.json()["error"]["message"]
        assert post(server, "/update_weights").json()["error"]["message"].startswith("path must be given")
        assert text(server) == new
        # A request that has begun keeps its weights, and its answer comes whole.
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(text(server, 200)))
        thread.start()
        while not server.service.engine.stats.running and thread.is_alive():
            pass
        assert post(server, "/update_weights", path=str(CHECKPOINT)).status_code == 200
        thread.join()
        assert answers == [expected(other, 200)]
        assert text(server) == old
        assert post(server, "/sleep", running="abort").status_code == 200
        body = {"model": "m", "prompt": PROMPT}
        refused = post(server, "/v1/completions", **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert post(server, "/wake_up", path=str(other)).status_code == 200
        assert text(server) == new


def test_a_failure_midway_is_a_500_that_says_why(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(update: Any) -> None:
        raise RuntimeError("no memory on the device")

    engine = Engine(EngineConfig(device="cpu", mtp_step=0, compile="off"))
    options: dict[str, Any] = {"api_key": "secret", "allow_weight_updates": True}
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len, **options) as server:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "replace_weights", fail)
            failed = post(server, "/update_weights", path=str(other))
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "RuntimeError: no memory on the device"
        # Without weights it can neither serve nor sleep, until an update succeeds.
        refused = post(server, "/sleep")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "an update of its weights has failed" in refused.json()["error"]["message"]
        assert post(server, "/update_weights", path=str(other)).status_code == 200
        assert text(server) == expected(other)


def test_they_need_to_be_allowed_with_a_key() -> None:
    with pytest.raises(ValueError, match="allow_weight_updates must come with a key, got none; set COMPILED"):
        ServerConfig(allow_weight_updates=True)
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, 512) as server:
        for path in ("/update_weights", "/sleep", "/wake_up"):
            assert post(server, path, path="x").status_code == 404
