"""The auth middleware's rules: access, time limits and size limits, each with a test over a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server import config as config_module
from compiled_mtp.server.config import LOOPBACK_NAMES, ServerConfig
from compiled_mtp.server.errors import bounded
from compiled_mtp.server.serve import HttpProtocol
from compiled_mtp.server.sse import EventStream
from tests.server.serving import Running, ScriptedEngine, make_family, running, wait_for_none_open

ROOT = Path(__file__).parents[2]
BODY: Any = {"model": "m", "prompt": "x", "max_tokens": 8}
KEY = "a-long-secret-key"
UMLAUT_KEY = "schlüssel"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    scripted = ScriptedEngine(Tokenizer(model))
    scripted.model = model  # type: ignore[attr-defined]
    scripted.say("one two three")
    return scripted


@pytest.fixture(scope="module")
def guarded(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"first\n{KEY}\n{UMLAUT_KEY}\n", encoding="utf-8")
    with running(
        engine,
        engine.model,
        api_key_file=keys,
        max_body_bytes=20_000,
        header_timeout_s=0.4,
        body_timeout_s=0.4,
        write_timeout_s=0.4,
        stream_buffer=64,
        max_stops=2,
        max_stop_chars=10,
        max_bias=2,
        max_schema_bytes=100,
        max_tools_bytes=100,
        max_choices=3,
        max_prompt_chars=10_000,
    ) as server:
        yield server


def post(guarded: Running, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"} | options.pop("headers", {})
    options.setdefault("json", BODY) if "content" not in options else None
    return httpx.post(guarded.url + path, headers=headers, timeout=20, **options)


def raw(guarded: Running, data: bytes, wait_s: float = 5.0) -> tuple[bytes, float]:
    """Return the server's answer to bytes until it closes, and the seconds until then."""
    start = time.monotonic()
    with socket.create_connection((guarded.host, guarded.port)) as connection:
        connection.settimeout(wait_s)
        connection.sendall(data)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
    return found, time.monotonic() - start


def test_keys(guarded: Running) -> None:
    assert post(guarded).status_code == 200
    assert post(guarded, headers={"authorization": "", "x-api-key": "first"}).status_code == 200
    for headers in (
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": "", "x-api-key": "wrong"},
    ):
        answer = post(guarded, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/metrics", "/v1/models", "/openapi.json"):
        assert httpx.get(guarded.url + path).status_code == 401
    assert httpx.get(guarded.url + "/health").status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_keys_beyond_ascii(guarded: Running, encoding: str) -> None:
    for key, status in ((UMLAUT_KEY, 200), (UMLAUT_KEY + "ü", 401)):
        headers = {b"x-api-key": key.encode(encoding)}
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == status


def test_no_key_and_no_prompt_is_logged(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        post(guarded, json=BODY | {"prompt": "private words"})
        post(guarded, headers={"authorization": "Bearer nearly-a-key"})
        deadline = time.monotonic() + 5
        lines: list[Any] = []
        # The client may log its answer before the server logs the request.
        while time.monotonic() < deadline and len(lines) < 2:
            time.sleep(0.01)
            lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "compiled_mtp.server"]
    assert {line["status"] for line in lines} == {200, 401}
    assert all(line["request_id"].startswith("req_") for line in lines)
    for secret in (KEY, "private words", "nearly-a-key"):
        assert not any(secret in r.getMessage() for r in caplog.records if r.name.startswith("compiled_mtp"))


def test_good_answers_to_supervisors_are_logged_for_debugging_only(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "compiled_mtp.server")
    for path, headers in (
        ("/health", {}),
        ("/metrics", {"x-api-key": KEY}),
        ("/metrics", {}),
        ("/nowhere", {}),
    ):
        httpx.get(guarded.url + path, headers=headers)
    deadline = time.monotonic() + 5
    lines: list[Any] = []
    while time.monotonic() < deadline and len(lines) < 4:
        time.sleep(0.01)
        records = [one for one in caplog.records if one.name == "compiled_mtp.server"]
        lines = [(one.levelname, json.loads(one.getMessage())) for one in records]
    assert [(level, line["path"], line["status"]) for level, line in lines] == [
        ("DEBUG", "/health", 200),
        ("DEBUG", "/metrics", 200),
        ("INFO", "/metrics", 401),
        ("INFO", "/nowhere", 401),
    ]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost, evil"])
def test_other_hosts_are_refused(guarded: Running, host: str) -> None:
    answer = post(guarded, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:80", "[::1]:80"])
def test_own_names_are_accepted(guarded: Running, host: str) -> None:
    assert post(guarded, headers={"host": host}).status_code == 200


def test_pages_of_other_hosts_get_no_answer(guarded: Running) -> None:
    origin = {"origin": "https://evil.example"}
    asked = origin | {"access-control-request-method": "POST", "authorization": f"Bearer {KEY}"}
    preflight = httpx.options(guarded.url + "/v1/completions", headers=asked)
    assert preflight.status_code == 405
    for answer in (preflight, post(guarded, headers=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonp"])
def test_json_has_its_content_type(guarded: Running, kind: str) -> None:
    content = json.dumps(BODY).encode()
    assert post(guarded, content=content, headers={"content-type": kind}).status_code == 415
    good = {"content-type": "application/json; charset=utf-8"}
    assert post(guarded, content=content, headers=good).status_code == 200
    assert post(guarded, content=content, headers=good | {"content-encoding": "gzip"}).status_code == 415


def test_large_bodies(guarded: Running) -> None:
    large = json.dumps(BODY | {"prompt": "x" * 30_000}).encode()
    kind = {"content-type": "application/json"}
    assert post(guarded, content=large, headers=kind).status_code == 413
    # Without a Content-Length.
    assert post(guarded, content=iter([large[:9000]] * 3), headers=kind).status_code == 413
    answer = post(guarded, path="/v1/messages", content=large, headers=kind)
    assert answer.json()["error"]["type"] == "request_too_large"


def head(length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_slow_senders(guarded: Running) -> None:
    for data in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: lo"):
        found, seconds = raw(guarded, data)
        assert found == b""
        assert seconds < 3
    found, seconds = raw(guarded, head(100) + b'{"model"')
    assert found.startswith(b"HTTP/1.1 408 ")
    assert seconds < 3
    # A byte now and then stops no timer, on a used connection either.
    whole = json.dumps(BODY).encode()
    with socket.create_connection((guarded.host, guarded.port)) as connection:
        connection.settimeout(5)
        connection.sendall(head(len(whole)) + whole)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        start = time.monotonic()
        try:
            while time.monotonic() - start < 5:
                connection.sendall(b"G")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - start < 3


def test_a_sender_that_leaves_is_no_server_error(guarded: Running) -> None:
    def counts() -> dict[int, int]:
        return {status: n for (_, status), n in guarded.service.metrics._responses.items() if status > 498}

    before = counts()
    with socket.create_connection((guarded.host, guarded.port)) as connection:
        connection.sendall(head(100) + b'{"model"')
    deadline = time.monotonic() + 5
    while counts() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counts() == {**before, 499: before.get(499, 0) + 1}


def test_a_stream_is_chunked_except_for_old_clients(guarded: Running) -> None:
    whole = json.dumps(BODY | {"stream": True}).encode()
    request = head(len(whole)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + whole
    answer, body = raw(guarded, request)[0].split(b"\r\n\r\n", 1)
    assert b"transfer-encoding: chunked" in answer.lower()
    plain = b""
    while not body.startswith(b"0\r\n"):
        size, body = body.split(b"\r\n", 1)
        plain += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    answer, body = raw(guarded, request.replace(b"HTTP/1.1", b"HTTP/1.0"))[0].split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in answer.lower()
    for found in (plain, body):
        events = found.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
        assert "".join(texts) == "one two three"


def test_a_slow_reader_is_cut_off(guarded: Running, engine: ScriptedEngine) -> None:
    script, engine.script = engine.script, engine.tokenizer.encode("word " * 40) * 20_000
    engine.chunk = 4000
    try:
        body = json.dumps(BODY | {"stream": True, "max_tokens": 10**7, "return_token_ids": True}).encode()
        with socket.create_connection((guarded.host, guarded.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head(len(body)) + body)
            engine.aborted.clear()
            deadline = time.monotonic() + 10
            # The server still answers others.
            while not engine.aborted and time.monotonic() < deadline:
                assert post(guarded).status_code == 200
            assert engine.aborted
            wait_for_none_open(guarded)
            # The slow reader has not read, and its connection closes all the same.
            deadline = time.monotonic() + 10
            while (connections := guarded.server.server_state.connections) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not connections
    finally:
        engine.script, engine.chunk = script, 1


def test_an_answer_cut_by_a_closing_connection_does_not_look_complete() -> None:
    """A client reads slowly and closes its side: asyncio closes ours, but keeps the buffered data."""

    class Closing:
        is_aborted = False

        def is_closing(self) -> bool:
            return True

        def abort(self) -> None:
            self.is_aborted = True

    guarded, transport = HttpProtocol.__new__(HttpProtocol), Closing()
    guarded.transport = transport  # type: ignore[assignment]
    assert not guarded.write(b"data: lost\n\n")
    assert transport.is_aborted


@pytest.mark.parametrize(("version", "is_chunked"), [("0.9", False), ("1.0", False), ("1.1", True)])
def test_parts_have_the_framing_of_the_header(version: str, is_chunked: bool) -> None:
    class Open:
        written = b""

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.written += data

    guarded, transport = HttpProtocol.__new__(HttpProtocol), Open()
    guarded.transport, guarded.scope = transport, {"http_version": version}  # type: ignore[assignment, typeddict-item]
    guarded.flow = FlowControl(transport)  # type: ignore[arg-type]
    assert guarded.write(b"data: a\n\n")
    assert transport.written == (b"9\r\ndata: a\n\n\r\n" if is_chunked else b"data: a\n\n")


def test_pings_go_on_once_a_reader_has_caught_up() -> None:
    class Connection:
        is_full = False

        def __init__(self) -> None:
            self.written: list[bytes] = []

        def write(self, body: bytes) -> bool:
            assert not self.is_full, "pings would pile up"
            self.written.append(body)
            self.is_full = body == b"large"
            return not self.is_full

        async def wait_for_room(self) -> None:
            await asyncio.sleep(0.3)
            self.is_full = False

        def abort(self) -> None:
            raise AssertionError("it reads")

    async def events() -> AsyncIterator[bytes]:
        yield b"large"
        await asyncio.sleep(0.4)
        yield b"end"

    async def nothing(message: Any = None) -> Any:
        if message is None:
            await asyncio.sleep(60)

    connection = Connection()
    stream = EventStream(events(), 5.0, lambda: None, b"ping", 0.05)
    scope: Any = {"type": "http", "state": {"connection": connection}}
    asyncio.run(stream(scope, nothing, nothing))
    assert connection.written[0] == b"large"
    assert connection.written[-1] == b"end"
    assert connection.written.count(b"ping") >= 2


@pytest.mark.parametrize(("stream", "prompts"), [(False, ["a"]), (True, ["a"]), (True, ["a", "b"])])
def test_a_client_that_leaves_aborts(
    guarded: Running, engine: ScriptedEngine, stream: bool, prompts: list[str]
) -> None:
    script, engine.script = engine.script, engine.script * 10_000
    engine.step_s = 0.005
    engine.aborted.clear()
    try:
        body = json.dumps(BODY | {"prompt": prompts, "stream": stream, "max_tokens": 10**6}).encode()
        with socket.create_connection((guarded.host, guarded.port)) as connection:
            connection.sendall(head(len(body)) + body)
            deadline = time.monotonic() + 5
            while not guarded.service.engine.num_open and time.monotonic() < deadline:
                time.sleep(0.01)
        wait_for_none_open(guarded)
        assert len(engine.aborted) == len(prompts)
    finally:
        engine.script, engine.step_s = script, 0.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": "x" * 11}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(3)}}, "logit_bias"),
        ({"logit_bias": {"y" * 5000: "x"}}, bounded("logit_bias." + "y" * 5000)),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
        ({"response_format": {"type": "x" * 100}}, "response_format"),
        ({"n": 4}, "n"),
        ({"n": 2, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": "x" * 10_001}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
    ],
)
def test_request_limits(guarded: Running, fields: Any, param: str) -> None:
    answer = post(guarded, json=BODY | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 3000


@pytest.mark.parametrize("kwargs", [{"self": 1}, {"messages": []}, {"tools": []}, {"enable_thinking": [1]}])
def test_template_kwargs_are_listed(guarded: Running, kwargs: Any) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = post(guarded, path=path, json=chat)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"chat_template_kwargs.{next(iter(kwargs))}"
    large = {"type": "function", "function": {"name": "f", "description": "x" * 200}}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = post(guarded, path=path, json=chat | {"chat_template_kwargs": None, "tools": [large]})
        assert answer.json()["error"]["param"] == "tools"


def test_addresses_that_other_machines_reach_need_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServerConfig().host == "127.0.0.1"
    # Both that is missing is said at once.
    also = r"allow_anyone, and list the server's names in allowed_hosts$"
    with pytest.raises(ValueError, match=f"host must be this machine's own without a key.*{also}"):
        ServerConfig(host="0.0.0.0")
    with pytest.raises(ValueError, match=r"host must be this machine's own without a key.*allow_anyone$"):
        ServerConfig(host="192.0.2.1")
    with pytest.raises(ValueError, match="allowed_hosts must name"):
        ServerConfig(host="0.0.0.0", allow_anyone=True)
    # A client that sends no key counts as sending the empty key.
    for key in ("", " "):
        with pytest.raises(ValueError, match="api_key must hold a key, got an empty one"):
            ServerConfig(api_key=key).read_keys()
    assert ServerConfig(api_key="a\n").read_keys() == ("a",)
    monkeypatch.setenv("COMPILED_MTP_SERVER_API_KEY", "from-environment")
    config = ServerConfig(host="0.0.0.0", allowed_hosts="a.example")
    assert config.read_keys() == ("from-environment",)
    assert config.hosts() == {"a.example", *LOOPBACK_NAMES}
    assert "from-environment" not in repr(config)
    EngineConfig()  # The engine ignores the server's variables.
    monkeypatch.setenv("COMPILED_MTP_SERVER_WHAT", "1")
    with pytest.raises(ValueError, match="COMPILED_MTP_SERVER_WHAT"):
        ServerConfig()
    monkeypatch.delenv("COMPILED_MTP_SERVER_WHAT")
    (tmp_path / "keys").write_text("three words long\r\n\n second \n")
    config = ServerConfig(api_key_file=tmp_path / "keys")
    assert config.read_keys() == ("from-environment", "three words long", "second")
    (tmp_path / "empty").write_text("\n")
    for name, message in (("empty", "must hold a key"), ("none", "must be readable")):
        with pytest.raises(ValueError, match=message):
            ServerConfig(api_key_file=tmp_path / name).read_keys()
    with pytest.raises(ValueError, match="port must be less than or equal to 65535, got 99999; lower it"):
        ServerConfig(port=99999)


def test_texts_of_errors_are_short_and_printable() -> None:
    assert bounded("a\nb\x1b[0m\ud800") == "a\\nb\\u001b[0m\\ud800"
    assert len(bounded("x" * 10**6)) < 1100


def test_a_key_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_MOST_KEY_CHARACTERS", 8, raising=False)
    (tmp_path / "keys").write_text("123456789")
    with pytest.raises(ValueError, match="api_key_file must hold at most 8 characters, got more in"):
        ServerConfig(api_key_file=tmp_path / "keys").read_keys()
    (tmp_path / "keys").write_text("1234567\n")
    assert ServerConfig(api_key_file=tmp_path / "keys").read_keys() == ("1234567",)
