"""AsyncEngine: streams, aborts, a full queue, a slow reader, draining, death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.streams.status import EngineHungError, EngineStoppedError, QueueFullError, SlowReaderError
from tests.server.serving import CHECKPOINT, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    scripted = ScriptedEngine(Tokenizer(CHECKPOINT))
    scripted.say("one two three four five six", chunk=1)
    return scripted


async def read_into(found: list[int], stream: Any) -> None:
    async for output in stream:
        found += output.new_token_ids


async def read(stream: Any) -> list[int]:
    return [i for output in [o async for o in stream] for i in output.new_token_ids]


def test_tokens_of_the_engine_itself() -> None:
    prompts = ["def add(a, b", "import os", "class Stack:", "for i in"]
    params = [SamplingParams(max_tokens=16, seed=index) for index in range(4)]
    engine = Engine(EngineConfig(device="cpu"))
    expected = [one.new_token_ids for one in engine.generate(prompts, params)]
    three = SamplingParams(max_tokens=16, seed=0, n=3)
    choices = [one.new_token_ids for one in engine.generate(prompts[:1], three)]

    async def check_choices(async_engine: AsyncEngine) -> None:
        found: list[list[int]] = [[], [], []]
        async for output in async_engine.generate(prompts[0], three):
            found[output.index] += output.new_token_ids
        assert found == choices
        # A reader that leaves ends every choice; each choice counts as long as it is open.
        stream = async_engine.generate(prompts[0], three.model_copy(update={"max_tokens": 900}))
        await anext(stream)
        assert async_engine.num_open == 3
        await stream.aclose()  # type: ignore[attr-defined]
        while async_engine.num_open:
            await asyncio.sleep(0.01)
        # Three choices never fit, even if all open requests end.
        with pytest.raises(
            ValueError, match=r"n must be at most 512 \(max_open\) .*, got 528; ask for fewer"
        ):
            await async_engine.add_all(
                [{"prompt": "x", "params": SamplingParams(n=16)} for _ in range(33)],
            )

    async def run() -> list[list[int]]:
        async_engine = AsyncEngine(engine)
        streams = [async_engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        found = await asyncio.gather(*map(read, streams))
        with pytest.raises(ValueError, match="prompt must have at least one token"):
            await async_engine.add(prompt="")
        with pytest.raises(ValueError, match="stop_token_ids"):
            await async_engine.add_all(
                [{"prompt": "x"}, {"prompt": "x", "params": SamplingParams(stop_token_ids=(10**6,))}]
            )
        await check_choices(async_engine)
        assert await async_engine.drain(10.0)
        assert engine.stats().running == engine.stats().waiting == 0
        return found

    assert asyncio.run(run()) == expected


def test_a_client_with_an_answer_finds_it_counted(engine: ScriptedEngine) -> None:
    counted: list[int] = []

    class Slow:
        def on_step(self, outputs: Any, seconds: float, stats: Any) -> None:
            time.sleep(0.01)  # A reader that were told before would be there first.
            counted.extend(i for output in outputs for i in output.new_token_ids)

    async def run() -> None:
        async_engine = AsyncEngine(engine, observer=Slow())
        found: list[int] = []
        async for output in async_engine.generate(prompt_token_ids=[1]):
            found += output.new_token_ids
            assert counted[: len(found)] == found
        await async_engine.drain(5)

    asyncio.run(run())
    assert counted == engine.script


def test_leaving_aborts_within_a_step(engine: ScriptedEngine) -> None:
    engine.script = engine.script * 1000

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        task = asyncio.create_task(read(async_engine.generate(prompt_token_ids=[1])))
        generator = async_engine.generate(prompt_token_ids=[2])
        async for _ in generator:
            break
        await generator.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert len(engine.aborted) == 2
        assert async_engine.num_open == 0
        # One that is given up while it is added.
        adding = asyncio.create_task(async_engine.add(prompt_token_ids=[3]))
        await asyncio.sleep(0)
        adding.cancel()
        await asyncio.sleep(0.05)
        assert async_engine.num_open == 0
        async_engine.close()

    engine.step_s = 0.001
    asyncio.run(run())


def test_a_request_that_takes_long_to_prepare_delays_no_other(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may take seconds to compile; a caller that gives up or stops does not wait for it."""
    plain, may_go = engine.add_request, threading.Event()

    def slow(*args: Any, prompt_token_ids: Any = None, **fields: Any) -> str:
        if prompt_token_ids == [7]:
            assert may_go.wait(30)
        return plain(*args, prompt_token_ids=prompt_token_ids, **fields)

    monkeypatch.setattr(engine, "add_request", slow)

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        adding = asyncio.create_task(async_engine.add(prompt_token_ids=[7], request_id="slow"))
        assert await read(async_engine.generate(prompt_token_ids=[1])) == engine.script
        assert not adding.done()
        with pytest.raises(ValueError, match="request_id must be unused, got 'slow'"):
            await async_engine.add(prompt_token_ids=[1], request_id="slow")
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        # The abort has come before the engine has the request.
        await async_engine.between_steps("stats")
        may_go.set()
        while async_engine.num_open:
            await asyncio.sleep(0.001)
        assert set(engine.aborted) == {"slow"}
        may_go.clear()
        adding = asyncio.create_task(async_engine.add(prompt_token_ids=[7]))
        await asyncio.sleep(0.01)
        async_engine.close()
        may_go.set()
        with pytest.raises(EngineStoppedError):
            await read(await adding)
        assert async_engine.num_open == 0

    asyncio.run(run())


def test_an_abort_that_comes_late_ends_no_later_request_of_the_same_id(engine: ScriptedEngine) -> None:
    engine.step_s = 0.05

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        other = await async_engine.add(prompt_token_ids=[1])
        with pytest.raises(ValueError, match="prompt must have at least one token"):
            await async_engine.add(prompt_token_ids=[], request_id="job")
        job = await async_engine.add(prompt_token_ids=[1], request_id="job")
        outputs = [output async for output in job]
        assert outputs[-1].finish_reason == "stop"
        assert await read(other) == engine.script
        for wrong, name in (({"params": {"n": 2}}, "params"), ({"request_id": ["a"]}, "request_id")):
            with pytest.raises(ValueError, match=f"^{name} must be a "):
                await async_engine.add(prompt_token_ids=[1], **wrong)
        assert async_engine.num_open == 0
        async_engine.close()

    asyncio.run(run())


def test_requests_of_one_call_are_added_in_their_order(engine: ScriptedEngine) -> None:
    async def run() -> None:
        async_engine = AsyncEngine(engine)
        streams = await async_engine.add_all([{"prompt_token_ids": [index + 1]} for index in range(40)])
        await asyncio.gather(*map(read, streams))
        with pytest.raises(ValueError, match="prompt must have"):
            await async_engine.add_all([{"prompt_token_ids": ids} for ids in ([1], [], [2], [3])])
        while async_engine.num_open:
            await asyncio.sleep(0.001)
        async_engine.close()

    asyncio.run(run())
    assert [ids for ids, _ in engine.seen] == [[index + 1] for index in range(40)] + [[1]]


def test_a_full_queue_pushes_back(engine: ScriptedEngine) -> None:
    async def run() -> None:
        async_engine = AsyncEngine(engine, max_open=2)
        first = await async_engine.add(prompt_token_ids=[1])
        with pytest.raises(QueueFullError) as full:
            await async_engine.add_all([{"prompt_token_ids": [1]}] * 2)
        assert full.value.retry_after_s >= 1
        second = await async_engine.add(prompt_token_ids=[1])
        assert await read(first) == await read(second) == engine.script
        assert await read(await async_engine.add(prompt_token_ids=[1])) == engine.script
        async_engine.close()

    engine.step_s = 0.02
    asyncio.run(run())


def test_a_slow_reader_is_aborted_and_others_go_on(engine: ScriptedEngine) -> None:
    engine.script = list(range(100, 200))
    engine.step_s = 0.001

    async def run() -> None:
        async_engine = AsyncEngine(engine, stream_buffer=20)
        slow = await async_engine.add(prompt_token_ids=[1])
        assert await read(async_engine.generate(prompt_token_ids=[2])) == engine.script
        found: list[int] = []
        with pytest.raises(SlowReaderError):
            await read_into(found, slow)
        assert found == engine.script[: len(found)]
        assert len(found) == 20
        assert len(engine.aborted) == 1
        async_engine.close()

    asyncio.run(run())


def test_draining_waits_then_ends(engine: ScriptedEngine) -> None:
    engine.step_s = 0.005

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        short = await async_engine.add(prompt_token_ids=[1])
        engine.script = engine.script * 1000
        long = await async_engine.add(prompt_token_ids=[1])
        draining = asyncio.create_task(async_engine.drain(0.3))
        await asyncio.sleep(0)
        assert async_engine.status == "draining"
        with pytest.raises(EngineStoppedError):
            await async_engine.add(prompt_token_ids=[1])
        assert await read(short) == engine.script[: len(engine.script) // 1000]
        assert not await draining
        found: list[int] = []
        with pytest.raises(EngineStoppedError):
            await read_into(found, long)
        # No finished token is lost.
        assert len(found) > 10
        assert found == engine.script[: len(found)]
        assert engine.is_closed
        assert async_engine.status == "stopped"

    asyncio.run(run())


def test_death_is_told_to_all_and_logged_once(
    engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def die() -> None:
        if released.is_set():
            raise RuntimeError("out of luck")

    engine.before_step = die
    engine.script = engine.script * 1000
    engine.step_s = 0.001

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        streams = [await async_engine.add(prompt_token_ids=[1]) for _ in range(3)]
        released.set()
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="out of luck"):
                await read(stream)
        with pytest.raises(EngineStoppedError, match="out of luck"):
            await async_engine.add(prompt_token_ids=[1])
        # The thread that died tells its streams before it is done with them.
        for _ in range(1000):
            if async_engine.status == "stopped" and async_engine.num_open == 0 and engine.is_closed:
                break
            await asyncio.sleep(0.01)
        assert async_engine.status == "stopped"
        assert async_engine.num_open == 0

    asyncio.run(run())
    assert [r.levelname for r in caplog.records if "out of luck" in r.getMessage()] == ["CRITICAL"]
    assert engine.is_closed


class Hang:
    """Holds a scripted engine's steps up while it is set."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._may_step = threading.Event()
        self._may_step.set()
        engine.before_step = self._may_step.wait

    def begin(self) -> None:
        self._may_step.clear()

    def end(self) -> None:
        self._may_step.set()


async def until(status: str, async_engine: AsyncEngine) -> None:
    deadline = time.monotonic() + 20
    while async_engine.status != status:
        assert time.monotonic() < deadline, async_engine.status
        await asyncio.sleep(0.01)


def test_a_step_that_hangs_is_seen_and_may_still_end(engine: ScriptedEngine) -> None:
    engine.script = engine.script * 5
    hang = Hang(engine)

    async def run() -> None:
        async_engine = AsyncEngine(engine, step_timeout_s=0.2)
        # An engine that has nothing to step does not hang.
        await asyncio.sleep(0.4)
        assert (async_engine.status, async_engine.step_age_s) == ("ok", 0.0)
        stream = await async_engine.add(prompt_token_ids=[1])
        found = (await anext(stream)).new_token_ids
        hang.begin()
        await until("hung", async_engine)
        assert async_engine.step_age_s > 0.2
        with pytest.raises(EngineHungError, match=r"a step must end within 0\.2 s \(step_timeout_s\), got"):
            await async_engine.add(prompt_token_ids=[1])
        hang.end()
        found += await read(stream)
        assert found == engine.script
        await until("ok", async_engine)
        assert await async_engine.drain(5)
        assert async_engine.status == "stopped"

    asyncio.run(run())


def test_an_engine_that_hangs_can_be_closed(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.script = engine.script * 20
    hang = Hang(engine)

    async def run() -> None:
        async_engine = AsyncEngine(engine, step_timeout_s=0.2)
        stream = await async_engine.add(prompt_token_ids=[1])
        hang.begin()
        assert not await asyncio.wait_for(async_engine.drain(0.05), 20)
        found: list[int] = []
        with pytest.raises(EngineHungError, match="a step must end within"):
            await read_into(found, stream)
        assert found == engine.script[: len(found)]
        assert (async_engine.status, async_engine.num_open) == ("stopped", 0)
        async_engine.close()
        # The abandoned thread closes the engine when it can.
        assert not engine.is_closed
        hang.end()
        async_engine._thread.join(20)
        assert engine.is_closed

    asyncio.run(run())
    assert {r.levelname for r in caplog.records if "is abandoned" in r.getMessage()} == {"CRITICAL"}


def test_what_the_stepping_thread_does_beside_steps_may_hang_too(engine: ScriptedEngine) -> None:
    may_abort = threading.Event()
    engine.script = engine.script * 1000
    engine.step_s = 0.001

    async def run() -> None:
        async_engine = AsyncEngine(engine, step_timeout_s=0.2)
        engine.abort = lambda _: may_abort.wait()  # type: ignore[assignment, return-value]
        (await async_engine.add(prompt_token_ids=[1])).abort()
        await until("hung", async_engine)
        may_abort.set()
        await until("ok", async_engine)
        async_engine.close()

    asyncio.run(run())


def test_new_weights_may_take_longer_than_a_step(engine: ScriptedEngine) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def update_weights(path: str) -> str:
        begun.set()
        assert may_end.wait(20)
        return path

    engine.update_weights = update_weights  # type: ignore[attr-defined]

    async def run() -> None:
        async_engine = AsyncEngine(engine, step_timeout_s=0.2)
        updating = asyncio.ensure_future(async_engine.between_steps("update_weights", "a"))
        await asyncio.to_thread(begun.wait, 20)
        await asyncio.sleep(0.5)
        # A supervisor would otherwise restart the process in the middle of an update.
        assert (async_engine.status, async_engine.step_age_s) == ("ok", 0.0)
        stream = await async_engine.add(prompt_token_ids=[1])
        may_end.set()
        assert await updating == "a"
        assert await read(stream) == engine.script
        async_engine.close()

    asyncio.run(run())


def test_a_loop_that_is_gone_holds_nothing_up(engine: ScriptedEngine) -> None:
    engine.script = engine.script * 1000
    engine.step_s = 0.001
    async_engine = AsyncEngine(engine)

    async def leave() -> None:
        await async_engine.add(prompt_token_ids=[1])

    asyncio.run(leave())
    deadline = time.monotonic() + 5
    while async_engine.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert async_engine.num_open == 0
    async_engine.close()
    async_engine.close()


def test_wrong_sizes() -> None:
    scripted: Any = ScriptedEngine(Tokenizer(CHECKPOINT))
    with pytest.raises(ValueError, match="max_open must be at least 1, got 0"):
        AsyncEngine(scripted, max_open=0)
    with pytest.raises(ValueError, match="step_timeout_s must be above 0, got 0"):
        AsyncEngine(scripted, step_timeout_s=0)


def test_only_the_service_needs_its_packages() -> None:
    """The engine, AsyncEngine and the prompts' processes work where the extra is not installed."""
    code = (
        "import sys;"
        "sys.modules.update(dict.fromkeys(('fastapi', 'starlette', 'uvicorn', 'prometheus_client')));"
        "import compiled_mtp.server.prompt_worker, compiled_mtp.server.config, compiled_mtp.async_engine;"
        "assert 'torch' not in sys.modules;"
        "from compiled_mtp import Engine"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
