"""Two replicas on Ray Serve under load (`make replicas`): streams go on when one dies, starts or ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp.benchmarks import service_load as tool
from compiled_mtp.request import SamplingParams

pytestmark = [pytest.mark.replicas, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MODEL = "default_model"
NUM_TOKENS = 96
# Half of them greedy, half sampled.
NUM_REQUESTS = 16
ARGS = {
    "device": "cpu",
    "cpus": 1,
    "prefill_chunk": 64,
    "num_threads": 1,
    "max_batch": 4,
    "max_open": 12,
    "silence_timeout_s": 10,
    "drain_timeout_s": 1,
    "prompt_workers": 1,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Served:
    """The service on Ray: its address and its deployments."""

    def __init__(self, port: int, metrics_port: int, args: Mapping[str, Any]) -> None:
        self.args = dict(args)
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def deploy(self, num_replicas: int) -> None:
        """Deploy as `serve deploy` does with a file."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {
            "name": "mtp",
            "import_path": "compiled_mtp.ray_serve:app",
            "args": self.args,
            "deployments": [{"name": "Engine", "num_replicas": num_replicas}],
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))

    def describe(self) -> list[dict[str, Any]]:
        """Return the stats of every replica."""
        from ray import serve

        handle = serve.get_deployment_handle("Engine", "mtp")
        said = handle.broadcast("describe").results(timeout_s=30, return_exceptions=True)
        return [one for one in said if isinstance(one, dict)]

    def wait_for(self, num_replicas: int, *, without: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Wait until so many replicas answer, none of them a process in `without`."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                found = self.describe()
                if len(found) == num_replicas and not {one["pid"] for one in found} & set(without):
                    return found
            time.sleep(0.5)
        raise AssertionError(f"there never were {num_replicas} replicas")

    def metric(self, name: str) -> float:
        """Return a value of the ingress's /metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


@contextlib.contextmanager
def on_ray(args: Mapping[str, Any]) -> Iterator[Served]:
    """Serve two replicas with these arguments."""
    # Ray replaces a proxy that is not ready after 5 s, on a busy machine repeatedly. It reads this at import.
    patience = {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "120" for check in ("READY", "HEALTH")}
    os.environ |= {"PYTHONPATH": str(ROOT), **patience}
    import ray
    from ray import serve

    found = Served(free_port(), metrics_port := free_port(), args)
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        _metrics_export_port=metrics_port,
    )
    try:
        serve.start(http_options={"port": int(found.url.rsplit(":", 1)[1])})
        found.deploy(2)
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{found.url}/health").status_code == 200:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.5)
        found.wait_for(2)
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with on_ray(ARGS) as found:
        yield found


def body_of(index: int) -> dict[str, Any]:
    prompts = [p for p in tool.read_prompts(tool.PROMPTS) if "prompt" in p]
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    return {
        "model": MODEL,
        "prompt": prompts[index % len(prompts)]["prompt"],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **({"logprobs": 2} if index % 4 < 2 else {}),
        **sampling,
    }


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str]]:
    """Return the outputs of one engine."""
    from compiled_mtp import Engine, EngineConfig

    bodies = [body_of(index) for index in range(NUM_REQUESTS)]
    names = ("max_tokens", "ignore_eos", "temperature", "top_p", "seed", "logprobs")
    params = [SamplingParams(**{n: body[n] for n in names if n in body}) for body in bodies]
    with Engine(EngineConfig(device="cpu", num_threads=1, max_batch=4, prefill_chunk=64)) as engine:
        outputs = engine.generate([body["prompt"] for body in bodies], params)
    return [(one.new_token_ids, one.new_text) for one in outputs]


async def load(
    served: Served, meanwhile: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> tuple[list[Any], float]:
    bodies = [body_of(index) for index in range(NUM_REQUESTS)]
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
        running = asyncio.create_task(tool.run_load(client, bodies, concurrency=8, rate=None, seed=0))
        await meanwhile(client)
        samples, seconds = await running
    flags = tool.make_parser().parse_args([])
    failovers = served.metric("compiled_mtp_failovers_total")
    print(json.dumps({**tool.summarize(samples, seconds, flags), "failovers_so_far": failovers}))
    return samples, seconds


def check(samples: Sequence[Any], expected: Sequence[tuple[list[int], str]]) -> None:
    assert [one.error for one in samples] == [None] * NUM_REQUESTS
    assert [one.token_ids for one in samples] == [ids for ids, _ in expected]
    assert [one.text for one in samples] == [text for _, text in expected]
    assert [one.output_tokens for one in samples] == [NUM_TOKENS] * NUM_REQUESTS


async def until_tokens(served: Served, client: httpx.AsyncClient, num_tokens: float) -> None:
    """Wait until so many more tokens have been delivered."""

    async def count() -> float:
        lines = (await client.get("/metrics")).text.splitlines()
        name = "compiled_mtp_output_tokens_total "
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    start = await count()
    while await count() < start + num_tokens:
        await asyncio.sleep(0.1)


def test_one_is_killed(served: Served, expected: Any) -> None:
    before = served.wait_for(2)
    assert len({one["identity"] for one in before}) == 1

    async def kill(client: httpx.AsyncClient) -> None:
        await until_tokens(served, client, 150)
        os.kill(before[0]["pid"], signal.SIGKILL)

    samples, _ = asyncio.run(load(served, kill))
    check(samples, expected)
    assert served.metric("compiled_mtp_failovers_total") > 0
    assert served.metric("compiled_mtp_requests_lost_total") == 0
    served.wait_for(2, without=[before[0]["pid"]])


def test_one_is_alive_and_silent(served: Served, expected: Any) -> None:
    stopped = served.wait_for(2)[0]["pid"]
    lost, num_requests = served.metric("compiled_mtp_failovers_total"), 6

    async def run() -> list[Any]:
        bodies = [body_of(index) for index in range(num_requests)]
        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            # All requests are sent before the replica stops.
            running = tool.run_load(client, bodies, concurrency=num_requests, rate=None, seed=0)
            task = asyncio.create_task(running)
            await until_tokens(served, client, 150)
            os.kill(stopped, signal.SIGSTOP)
            return (await task)[0]

    try:
        samples = asyncio.run(run())
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [one.error for one in samples] == [None] * num_requests
    assert [one.token_ids for one in samples] == [ids for ids, _ in expected[:num_requests]]
    assert served.metric("compiled_mtp_failovers_total") > lost
    assert served.metric("compiled_mtp_requests_lost_total") == 0


def test_two_replicas_of_a_config_file_take_twice_as_many(served: Served) -> None:
    served.wait_for(2)
    # More requests than one replica takes.
    bodies = [body_of(index) | {"max_tokens": 24} for index in range(20)]

    async def run() -> list[Any]:
        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            return (await tool.run_load(client, bodies, concurrency=20, rate=None, seed=0))[0]

    assert [one.error for one in asyncio.run(run())] == [None] * len(bodies)


def test_prompts_that_begin_alike_meet_what_is_cached(served: Served) -> None:
    served.wait_for(2)
    system = "# A module that many ask about.\n" * 24
    cached = []
    for index in range(6):
        body = {"model": MODEL, "prompt": f"{system}def f{index}(", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # With random routing at least one request would meet an empty cache in 15 of 16 runs.
    assert cached[0] == 0
    assert min(cached[1:]) >= 64


def test_one_is_added_and_two_are_taken_away(served: Served, expected: Any) -> None:
    async def scale(client: httpx.AsyncClient) -> None:
        served.deploy(3)
        await asyncio.to_thread(served.wait_for, 3)

    async def shrink(client: httpx.AsyncClient) -> None:
        await until_tokens(served, client, 150)
        served.deploy(1)
        await asyncio.to_thread(served.wait_for, 1)

    samples, _ = asyncio.run(load(served, scale))
    check(samples, expected)
    samples, _ = asyncio.run(load(served, shrink))
    check(samples, expected)
    assert served.metric("compiled_mtp_requests_lost_total") == 0


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    body = body_of(0) | {"max_tokens": 400}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert running(served) == 1
    deadline = time.monotonic() + 20
    while running(served):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    assert any(line.startswith('compiled_mtp_requests_finished_total{reason="abort"}') for line in lines)


def running(served: Served) -> int:
    """Return the number of requests that the engines decode."""
    from ray import serve

    handle = serve.get_deployment_handle("Engine", "mtp")
    return sum(one.running + one.waiting for one in handle.broadcast("stats").results(timeout_s=30))


def test_whole_answers_chats_and_errors(served: Served) -> None:
    base = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(
        f"{served.url}/v1/completions", json=base | {"prompt": ["def f(", "class A"], "n": 1}, timeout=60
    ).json()
    assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 2
    refused = httpx.post(
        f"{served.url}/v1/completions", json=base | {"prompt": "x", "logit_bias": {"99999": 1}}, timeout=60
    )
    assert refused.status_code == 400
    assert "logit_bias" in refused.json()["error"]["message"]


def test_gauges_of_each_replica_are_on_rays_port(served: Served) -> None:
    deadline = time.monotonic() + 60
    wanted = (
        "ray_compiled_mtp_requests_running{",
        "ray_compiled_mtp_requests_waiting{",
        "ray_compiled_mtp_kv_cache_usage_ratio{",
        "ray_compiled_mtp_output_tokens_total{",
        "ray_compiled_mtp_step_seconds_sum_total{",
        "ray_compiled_mtp_failovers_total{",
    )
    while True:
        text = httpx.get(served.metrics_url).text
        if all(name in text for name in wanted):
            break
        assert time.monotonic() < deadline, [line for line in text.splitlines() if "compiled_mtp" in line]
        time.sleep(1)
    line = next(line for line in text.splitlines() if line.startswith(wanted[0]))
    assert 'deployment="Engine"' in line
    assert "replica=" in line
