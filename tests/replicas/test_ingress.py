"""The ingress's service over replicas, without Ray: one of two engines in one process dies."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.replicas.connection import BufferedConnection, WithConnection
from compiled_mtp.replicas.decoding import decode
from compiled_mtp.replicas.engine import ReplicatedEngine
from compiled_mtp.replicas.messages import Call, Message, Refused
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.replicas.relay import RelayLimits
from compiled_mtp.request import SamplingParams
from compiled_mtp.server.app import create_app
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.serve import assemble_service, make_service
from tests.server.serving import CHECKPOINT, ScriptedEngine

TEXT = "forty two, and more of it; a text of some length"


def scripted(chunk: int, dies_after: int | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(Tokenizer(CHECKPOINT))
    engine.say(TEXT, chunk=chunk)
    num_steps = 0

    def before_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if dies_after is not None and num_steps > dies_after:
            raise RuntimeError("the device fell off")

    engine.before_step = before_step
    return engine


class Replicas:
    """Two engines in one process; a call goes to the first that it does not avoid."""

    def __init__(
        self, *engines: ScriptedEngine, step_timeout_s: float = 300.0, silence_timeout_s: float = 30.0
    ) -> None:
        self.engines = {
            f"r{i}": AsyncEngine(engine, step_timeout_s=step_timeout_s) for i, engine in enumerate(engines)
        }
        self.metrics = ReplicaMetrics()
        self.engine = ReplicatedEngine(
            self.open,
            self.metrics,
            RelayLimits(2, 30.0, silence_timeout_s),
            seed=5,
            chunk=64,
            num_chunks=1,
            max_open=8,
            stream_buffer=64,
        )

    async def open(self, call: Call) -> AsyncIterator[Message]:
        name = next(one for one in self.engines if one not in call.avoid)
        async for message in decode(self.engines[name], call, name, "same"):
            yield message

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


async def ask(app: Any, path: str, body: Any = None) -> tuple[int, bytes, bool]:
    """Return an answer's status and body, and whether it ended properly."""
    content, sent = json.dumps(body).encode(), []
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop()

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    await app(scope, receive, send)
    data = b"".join(one.get("body", b"") for one in sent)
    return sent[0]["status"], data, not sent[-1].get("more_body", False)


def test_a_streaming_client_does_not_notice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    replicas = Replicas(scripted(2, dies_after=3), scripted(3))

    async def run() -> None:
        config = ServerConfig(prompt_workers=1, served_model_name=("m",))
        service = assemble_service(
            replicas.engine, replicas.metrics, Tokenizer(CHECKPOINT), Path(CHECKPOINT), 512, config
        )
        app = create_app(service)
        app.add_middleware(WithConnection)
        base = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 100, "return_token_ids": True}
        status, body, is_whole = await ask(app, "/v1/completions", base | {"stream": True})
        assert (status, is_whole) == (200, True)
        events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert "".join(one["text"] for one in choices) == TEXT
        ids = [i for one in choices for i in one.get("token_ids", ())]
        assert ids == Tokenizer(CHECKPOINT).encode(TEXT)
        assert body.endswith(b"data: [DONE]\n\n")
        _, said, _ = await ask(app, "/metrics")
        assert b"compiled_mtp_failovers_total 1.0" in said
        # A running request gets no answer from an engine that has ended.
        replicas.engines["r1"].close()
        status, body, _ = await ask(app, "/v1/completions", base)
        assert status == 503
        assert json.loads(body)["error"]["code"] == "replicas_lost"

    try:
        asyncio.run(run())
    finally:
        replicas.close()


def test_a_replica_whose_step_hangs_loses_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.decoding._HEARTBEAT_S", 0.05)
    may_step = threading.Event()
    hanging, other = scripted(2), scripted(3)
    num_steps = 0

    def hang() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 4:
            may_step.wait()

    hanging.before_step = hang
    replicas = Replicas(hanging, other, step_timeout_s=0.3, silence_timeout_s=20.0)

    async def run() -> list[int]:
        (stream,) = await replicas.engine.add_all([{"prompt_token_ids": [1, 2, 3]}])
        found: list[int] = []
        async with asyncio.timeout(15):
            async for output in stream:
                found += output.new_token_ids
        assert replicas.engines["r0"].status == "hung"
        # The relay sends it no further calls, and it refuses calls that reach it.
        said = [
            one async for one in decode(replicas.engines["r0"], Call([1], SamplingParams(seed=1)), "r", "")
        ]
        assert isinstance(said[0], Refused)
        assert (said[0].kind, len(said)) == ("stopped", 1)
        return found

    try:
        assert asyncio.run(run()) == Tokenizer(CHECKPOINT).encode(TEXT)
        assert "compiled_mtp_failovers_total 1.0" in replicas.metrics.text().decode()
    finally:
        may_step.set()
        replicas.close()


def test_a_slow_step_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.decoding._HEARTBEAT_S", 0.02)
    slow = scripted(8)
    slow.step_s = 0.6
    replicas = Replicas(slow, silence_timeout_s=0.3)

    async def run() -> list[int]:
        (stream,) = await replicas.engine.add_all([{"prompt_token_ids": [1, 2, 3]}])
        return [i for one in [one async for one in stream] for i in one.new_token_ids]

    try:
        assert asyncio.run(run()) == Tokenizer(CHECKPOINT).encode(TEXT)
        assert "compiled_mtp_failovers_total 0.0" in replicas.metrics.text().decode()
    finally:
        replicas.close()


def test_what_a_replica_refuses() -> None:
    async def first(engine: AsyncEngine, ids: list[int]) -> Message:
        params = SamplingParams(seed=1, n=1)
        said = [one async for one in decode(engine, Call(ids, params), "r", "same")]
        return said[0]

    async def run() -> None:
        slow = scripted(1)
        # The taken request must not end before the next is refused.
        slow.step_s = 0.05
        engine = AsyncEngine(slow, max_open=1)
        invalid = await first(engine, [])
        assert isinstance(invalid, Refused)
        assert (invalid.kind, invalid.replica_id) == ("invalid", "r")
        taken = await engine.add(prompt_token_ids=[1])
        full = await first(engine, [1])
        assert isinstance(full, Refused)
        assert full.kind == "full"
        taken.abort()
        engine.close()
        stopped = await first(engine, [1])
        assert isinstance(stopped, Refused)
        assert stopped.kind == "stopped"

    asyncio.run(run())


def test_gauges_are_there_before_the_first_request() -> None:
    first_look = ReplicaMetrics().text().decode().splitlines()
    service = make_service(scripted(1), Tokenizer(CHECKPOINT), CHECKPOINT, 512, ServerConfig())
    service.engine.close()
    said = service.metrics.text().decode().splitlines()
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        assert f"compiled_mtp_{name} 0.0" in said
        assert f"compiled_mtp_{name} 0.0" in first_look


def test_rounds_are_told_once() -> None:
    async def run() -> list[Message]:
        engine = AsyncEngine(scripted(3))
        try:
            return [one async for one in decode(engine, Call([1], SamplingParams(seed=1)), "r", "same")]
        finally:
            engine.close()

    outputs = [one for said in asyncio.run(run()) if isinstance(said, list) for one in said]
    told = [number for one in outputs for number in one.metrics.history.rounds]
    assert len(outputs) > 3
    assert len(told) == outputs[-1].metrics.rounds
    assert "".join(one.new_text for one in outputs) == TEXT


def test_stats_are_sums() -> None:
    engine = scripted(1)
    metrics = ReplicaMetrics()
    engine.add_request(prompt_token_ids=[1])
    metrics.set_replicas([engine.stats(), engine.stats()], num_unrouted=3)
    text = metrics.text().decode().splitlines()
    assert "compiled_mtp_requests_running 2.0" in text
    assert "compiled_mtp_requests_waiting 3.0" in text
    assert "compiled_mtp_requests_unrouted 3.0" in text
    assert "compiled_mtp_replicas 2.0" in text
    assert 'compiled_mtp_rounds_total{depth="3",why="best"} 10.0' in text
    # Without replicas nothing runs, and requests wait in the ingress.
    metrics.set_replicas([], num_unrouted=7)
    text = metrics.text().decode().splitlines()
    assert "compiled_mtp_replicas 0.0" in text
    assert "compiled_mtp_requests_running 0.0" in text
    assert "compiled_mtp_requests_waiting 7.0" in text
    assert "compiled_mtp_kv_cache_usage_ratio 0.0" in text


def test_a_connection_keeps_the_order_and_knows_when_it_is_full() -> None:
    async def run() -> None:
        sent: list[Any] = []
        gate = asyncio.Event()

        async def send(message: Any) -> None:
            await gate.wait()
            sent.append(message)

        connection = BufferedConnection(send)
        assert connection.write(b"a")
        assert connection.write(b"b")
        assert not connection.write(b"c" * 70_000)
        assert connection.is_full
        end = asyncio.create_task(connection.send({"type": "http.response.body", "body": b""}))
        await asyncio.sleep(0)
        assert sent == []
        gate.set()
        await end
        assert not connection.is_full
        assert b"".join(one["body"] for one in sent) == b"ab" + b"c" * 70_000
        assert [one.get("more_body", False) for one in sent][-1] is False
        connection.abort()
        connection.write(b"late")
        await connection.send({"type": "http.response.body", "body": b""})
        assert b"late" not in b"".join(one["body"] for one in sent)

    asyncio.run(run())


def test_a_failing_send_is_told() -> None:
    async def run() -> None:
        async def send(message: Any) -> None:
            raise OSError("the client is gone")

        connection = BufferedConnection(send)
        connection.write(b"a" * 70_000)
        with pytest.raises(OSError, match="gone"):
            await connection.wait_for_room()
        # The error comes while no call waits, so the next call raises it.
        unseen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        connection = BufferedConnection(send)
        connection.write(b"a")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not connection.is_full
        with pytest.raises(OSError, match="gone"):
            await connection.wait_for_room()
        with pytest.raises(OSError, match="gone"):
            connection.write(b"b")
        with pytest.raises(OSError, match="gone"):
            await connection.send({"type": "http.response.body", "body": b""})
        del connection
        gc.collect()
        assert unseen == []

    asyncio.run(run())
