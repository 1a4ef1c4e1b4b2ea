"""The endpoints that no API describes, CORS, idle connections, and the forms of the log."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import compiled_mtp
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.log import JsonLog, TextLog, start_log
from tests.server.serving import Running, ScriptedEngine, make_family, running

ORIGIN = "https://app.example.org"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ScriptedEngine]]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("one two three")
    with running(engine, model, api_key="secret", allowed_origins=(ORIGIN,)) as server:
        yield server, engine


def client_of(server: Running, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"} | headers)


def test_version_and_detokenize(served: Any) -> None:
    server, engine = served
    client = client_of(server)
    assert client.get("/version").json() == {"version": compiled_mtp.__version__}
    ids = engine.tokenizer.encode("Zürich é")
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Zürich é"}
    for tokens, says in (
        ([-1], "tokens must lie in 0..4104, got -1"),
        ([4105], "tokens must lie in 0..4104, got 4105"),
        ([1] * 513, "tokens must be at most 512, got 513"),
        (["1"], "tokens.0 must be a valid integer"),
    ):
        answer = client.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(says)


def test_embeddings_are_refused_by_name(served: Any) -> None:
    client = openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="secret", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings must not be called") as error:
        client.embeddings.create(model="m", input="x")
    assert error.value.code == "unsupported_endpoint"


def test_only_listed_origins_may_call(served: Any) -> None:
    server, _ = served
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    path, body = "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2}
    with client_of(server, origin=ORIGIN) as client:
        before = httpx.options(f"{server.url}{path}", headers=asks | {"origin": ORIGIN})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in before.headers["access-control-allow-headers"]
        for stream in (False, True):
            answer = client.post(path, json=body | {"stream": stream})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert httpx.post(f"{server.url}{path}", json=body, headers={"origin": ORIGIN}).status_code == 401
    with client_of(server, origin="https://other.example.org") as client:
        assert "access-control-allow-origin" not in client.post(path, json=body).headers
        assert client.options(path, headers=asks).status_code == 400


def test_without_origins_there_are_no_cors_headers(tmp_path: Any) -> None:
    model = make_family(tmp_path / "m", "xml")
    with running(ScriptedEngine(Tokenizer(model)), model) as server:
        answer = httpx.get(f"{server.url}/health", headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["app.example.org", f"{ORIGIN}/", "https://"])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValueError, match=r"^allowed_origins must be \* or origins such as .*, got '"):
        ServerConfig(allowed_origins=f"*,{origin}")


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    one = logging.LogRecord("compiled_mtp.server", level, "", 0, message, (), None)
    one.created = 0.5
    return one


def test_forms_of_a_line() -> None:
    line = {"request_id": "req_1", "method": "GET", "path": "/x", "status": 200, "seconds": 0.25, "body": "b"}
    assert json.loads(JsonLog().format(record(json.dumps(line)))) == {
        "time": 0.5,
        "level": "INFO",
        "logger": "compiled_mtp.server",
        **line,
    }
    assert json.loads(JsonLog().format(record("{no json")))["message"] == "{no json"
    text = TextLog().format(record(json.dumps(line)))
    assert text[8:] == ' GET /x 200 in 0.25 s (req_1) {"body": "b"}'
    assert TextLog().format(record("hot", logging.WARNING))[8:] == " warning: hot"
    failed = record("failed", logging.ERROR)
    try:
        raise ValueError("why")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert TextLog().format(failed).endswith("ValueError: why")
    assert "ValueError: why" in json.loads(JsonLog().format(failed))["traceback"]


@pytest.mark.parametrize(
    ("given", "is_terminal", "form"),
    [("auto", True, TextLog), ("auto", False, JsonLog), ("text", False, TextLog), ("json", True, JsonLog)],
)
def test_text_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, given: Any, is_terminal: bool, form: type[logging.Handler]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    root = logging.getLogger()
    own = [logging.getLogger(name) for name in ("compiled_mtp", "uvicorn")]
    levels = [(logger, logger.level) for logger in (root, *own)]
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", Terminal())
    try:
        start_log(ServerConfig(log_format=given, log_level="error"))
        assert [type(one) for one in root.handlers] == [form]
        assert [logger.level for logger in own] == [logging.ERROR] * 2
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def test_an_idle_connection_is_kept_for_longer_than_proxies_keep_theirs(served: Any) -> None:
    server, _ = served
    assert server.service.config.keep_alive_s > 60
    assert server.server.config.timeout_keep_alive == server.service.config.keep_alive_s


def test_an_idle_connection_is_closed_after_its_timeout(tmp_path: Path) -> None:
    model = make_family(tmp_path / "m", "xml")
    limits = httpx.Limits(keepalive_expiry=60)
    with (
        running(ScriptedEngine(Tokenizer(model)), model, keep_alive_s=1) as server,
        httpx.Client(base_url=server.url, limits=limits) as client,
    ):
        first = client.get("/health").extensions["network_stream"]
        time.sleep(0.3)
        assert client.get("/health").extensions["network_stream"] is first
        time.sleep(1.5)
        assert client.get("/health").extensions["network_stream"] is not first
