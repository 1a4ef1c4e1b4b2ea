"""Many clients at once, of which some leave: others get their tokens, and no request or thread is left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compiled_mtp import Engine, EngineConfig, SamplingParams
from tests.server.serving import CHECKPOINT, Running, running, wait_for_none_open

PROMPTS = ["def quicksort(", "import os", "class Stack:", "for i in range(", "# a comment", "x = [1, 2"]
MAX_TOKENS = (3, 14)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int, int], list[int]]:
    """Return the tokens of every (prompt, max_tokens, seed), each decoded by an engine without a server."""
    engine = Engine(EngineConfig(device="cpu"))
    kinds = [(p, n, seed) for p in PROMPTS for n in MAX_TOKENS for seed in (1, 2)]
    params = [SamplingParams(max_tokens=n, seed=seed) for _, n, seed in kinds]
    outputs = engine.generate([p for p, _, _ in kinds], params)
    engine.close()
    return {kind: output.new_token_ids for kind, output in zip(kinds, outputs, strict=True)}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(EngineConfig(device="cpu"))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len, drain_timeout_s=60) as found:
        yield found


async def read(
    client: httpx.AsyncClient,
    kind: tuple[str, int, int],
    leave_after: int | None,
    accepted: list[tuple[str, int, int]] | None = None,
) -> list[int]:
    """Return one stream's tokens; with leave_after None, read to its end, which must be regular.

    accepted: gets the kind once the server has accepted the request.
    """
    prompt, max_tokens, seed = kind
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "seed": seed, "stream": True}
    found: list[int] = []
    last = ""
    async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        assert answer.status_code == 200
        if accepted is not None:
            accepted.append(kind)
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                found += [i for choice in choices for i in choice.get("token_ids", [])]
            last = line or last
            if leave_after is not None and len(found) >= leave_after:
                return found
    assert last == "data: [DONE]"
    return found


async def traffic(server: Running, expected: dict[Any, list[int]], num_streams: int, seconds: float) -> int:
    """Keep num_streams open, of which every tenth is left early; return how many ended as they should."""
    rng, loop = random.Random(0), asyncio.get_running_loop()
    deadline = loop.time() + seconds
    num_right = 0

    async def client_loop(client: httpx.AsyncClient) -> None:
        nonlocal num_right
        while True:
            kind = rng.choice(list(expected))
            leave_after = rng.randrange(0, 6) if rng.random() < 0.1 else None
            found = await read(client, kind, leave_after)
            if leave_after is None:
                assert found == expected[kind]
                num_right += 1
            else:
                assert found == expected[kind][: len(found)]
            if loop.time() > deadline:
                return

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(num_streams)))
    return num_right


def count_threads() -> int:
    """Count all threads except those that add requests: at most two, started when first needed."""
    adding = [thread for thread in threading.enumerate() if thread.name.startswith("compiled-mtp-add")]
    assert len(adding) <= 2
    return threading.active_count() - len(adding)


@pytest.mark.parametrize(
    ("num_streams", "seconds"), [(12, 2.0), pytest.param(64, 60.0, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(600)
def test_streams_are_right_and_leave_no_request_or_thread(
    server: Running, expected: dict[Any, list[int]], num_streams: int, seconds: float
) -> None:
    num_threads = count_threads()
    assert asyncio.run(traffic(server, expected, 4, 0.0)) > 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(traffic(server, expected, num_streams, seconds)) >= num_streams // 2
    wait_for_none_open(server)
    stats = server.service.engine.stats
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert not server.service.engine._open._streams
    assert count_threads() == num_threads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000
    assert len(os.listdir("/proc/self/fd")) <= files + num_streams
    # The last answer's task ends after its client has read the answer.
    deadline = time.monotonic() + 10
    while server.server.server_state.tasks and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(server.server.server_state.tasks) == 0


def test_a_signal_in_the_middle_loses_no_finished_token(expected: dict[Any, list[int]]) -> None:
    engine = Engine(EngineConfig(device="cpu"))

    async def run(server: Running) -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            accepted: list[tuple[str, int, int]] = []
            tasks = [asyncio.create_task(read(client, kind, None, accepted)) for kind in list(expected)[:10]]
            # Some may have ended by then: on a busy machine ten are never open at the same time.
            while len(accepted) < 10:
                await asyncio.sleep(0.005)
            server.server.should_exit = True
            return await asyncio.gather(*tasks)

    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len, drain_timeout_s=60) as server:
        assert asyncio.run(run(server)) == list(expected.values())[:10]
