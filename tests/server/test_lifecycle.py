"""The service's life: its processes for prompts, a full queue, health, the drain and the signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.prompt_worker import Limits
from compiled_mtp.server.prompts import PromptPool
from compiled_mtp.server.serve import main
from tests.server.serving import ScriptedEngine, make_family, running, wait_for_none_open

ROOT = Path(__file__).parents[2]
BODY: Any = {"model": "m", "prompt": "x", "max_tokens": 8}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    scripted = ScriptedEngine(Tokenizer(model))
    scripted.model = model  # type: ignore[attr-defined]
    scripted.say("one two three")
    return scripted


def test_a_template_that_never_ends(tmp_path: Path) -> None:
    model = make_family(tmp_path / "m", "xml")
    loops = "{%- for a in range(90000) -%}" * 2 + "{%- endfor -%}" * 2
    template = "{%- if messages[0].content == 'loop' -%}" + loops + "{%- endif -%}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(template)

    async def run() -> None:
        pool = PromptPool(model, num_workers=1, timeout_s=0.3, limits=Limits(100))
        await pool.start()
        try:
            for _ in range(2):
                with pytest.raises(ApiError, match=r"0\.3 seconds"):
                    await pool.render([{"role": "user", "content": "loop"}], {})
                assert (await pool.render([{"role": "user", "content": "def"}], {})).token_ids
            # A cancelled job's answer must not reach the next job.
            leaving = asyncio.create_task(pool.render([{"role": "user", "content": "import"}], {}))
            await asyncio.sleep(0)
            leaving.cancel()
            expected = Tokenizer(model).encode("class")
            assert (await pool.encode("class")).token_ids == expected
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_closed_pool_starts_no_process_for_the_job_it_cut_off(tmp_path: Path) -> None:
    model = make_family(tmp_path / "m", "xml")

    async def run() -> None:
        pool = PromptPool(model, num_workers=1, timeout_s=60, limits=Limits(10**9))
        await pool.start()
        cut = asyncio.create_task(pool.encode("def " * 10**6))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(ApiError) as error:
            await cut
        assert error.value.status == 503
        assert not pool._workers

    asyncio.run(run())


def test_a_process_that_cannot_be_replaced_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(tmp_path / "m", "xml")

    async def run() -> None:
        pool = PromptPool(model, num_workers=1, timeout_s=10, limits=Limits(10**9))
        await pool.start()
        create = asyncio.create_subprocess_exec
        try:
            for worker in pool._workers:
                worker.kill()
            monkeypatch.setattr(asyncio, "create_subprocess_exec", no_memory)
            for status in (400, 503):
                with pytest.raises(ApiError) as error:
                    await asyncio.wait_for(pool.encode("def"), 10)
                assert error.value.status == status
            monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
            assert (await asyncio.wait_for(pool.encode("def"), 10)).token_ids
        finally:
            await pool.close()

    async def no_memory(*_: object, **__: object) -> None:
        raise OSError("no memory")

    asyncio.run(run())


def test_a_full_queue_says_when_to_retry(engine: Any) -> None:
    engine.step_s, script = 0.02, engine.script
    engine.script = script * 10
    try:
        with running(engine, engine.model, max_open=1) as server, httpx.Client(base_url=server.url) as client:
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 30}):
                answer = client.post("/v1/completions", json=BODY)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
            wait_for_none_open(server)
            assert client.post("/v1/completions", json=BODY).status_code == 200
    finally:
        engine.step_s, engine.script = 0.0, script


def test_a_dead_engine_is_unhealthy_and_reported(engine: Any) -> None:
    def die() -> None:
        if not engine.is_well:
            raise RuntimeError("out of luck")

    script, engine.script, engine.step_s = engine.script, engine.script * 100, 0.01
    engine.before_step, engine.is_well = die, True
    try:
        with running(engine, engine.model) as server, httpx.Client(base_url=server.url, timeout=20) as client:
            with client.stream(
                "POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 99}
            ) as answer:
                lines = answer.iter_lines()
                next(lines)
                engine.is_well = False
                last = [line for line in lines if line][-1]
            assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json=BODY).status_code == 503
    finally:
        engine.before_step, engine.script, engine.step_s = (lambda: None), script, 0.0


def test_a_hanging_step_is_unhealthy_until_it_ends(engine: Any) -> None:
    may_step = threading.Event()
    engine.before_step = may_step.wait

    def until(client: httpx.Client, status: str, code: int) -> None:
        deadline = time.monotonic() + 20
        while (answer := client.get("/health")).json() != {"status": status}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert answer.status_code == code

    try:
        with (
            running(engine, engine.model, step_timeout_s=0.2) as server,
            httpx.Client(base_url=server.url, timeout=20) as client,
            ThreadPoolExecutor(1) as other,
        ):
            answer = other.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=20)
            until(client, "hung", 503)
            refused = client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "hung")
            may_step.set()
            assert answer.result().status_code == 200
            until(client, "ok", 200)
    finally:
        may_step.set()
        engine.before_step = lambda: None


def test_draining_finishes_open_requests_and_refuses_new_ones(engine: Any) -> None:
    script, engine.step_s = engine.script, 0.02
    engine.script = script * 10
    try:
        with running(engine, engine.model, drain_timeout_s=0.5) as server, httpx.Client(timeout=20) as client:
            url = f"{server.url}/v1/completions"
            with (
                client.stream("POST", url, json=BODY | {"stream": True, "max_tokens": 10}) as short,
                client.stream("POST", url, json=BODY | {"stream": True, "max_tokens": 99}) as long,
            ):
                server.server.should_exit = True
                short_lines = [line for line in short.iter_lines() if line]
                long_lines = [line for line in long.iter_lines() if line]
            assert short_lines[-1] == "data: [DONE]"
            assert "shut" in json.loads(long_lines[-1].removeprefix("data: "))["error"]["message"]
            assert len(long_lines) > 10
    finally:
        engine.script, engine.step_s = script, 0.0


def test_refusals_before_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port]) == 2
    assert "port must be free" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "error: model must be a directory with a config.json, got" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["--api-key", "x"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_signals_end_it(number: int) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "compiled_mtp.server",
            "--port",
            "0",
            "--device",
            "cpu",
            "--prompt-workers",
            "1",
            "--log-format",
            "text",
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        url = first = ""
        for line in process.stderr:
            if "serving" in line:
                url = line.split(" at ")[1].split()[0]
                break
            first = first or line
        assert url in first
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 0
        said = process.stderr.read()
        assert not any(noise in said for noise in ("Traceback", "leaked", "FakeTensor"))
    finally:
        process.kill()
