"""The parts of the Ray application, without Ray."""

from __future__ import annotations

import ast
import asyncio
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_mtp import ray_serve
from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.replicas.config import ReplicaConfig, split_args
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput
from compiled_mtp.streams.status import EngineHungError, QueueFullError
from tests.replicas.scripted import Replica, Truth, in_turn, make_engine
from tests.server.serving import CHECKPOINT, ScriptedEngine

PACKAGE = Path(__file__).parents[2] / "compiled_mtp"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"ray must be installed .* pip install 'compiled-mtp\[ray\]'"):
        ray_serve.app({})


def test_only_the_router_imports_ray_when_it_is_imported() -> None:
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" for name in names):
                importing.add(path.relative_to(PACKAGE).as_posix())
    assert importing == {"replicas/ray_router.py"}


def test_each_argument_has_its_config() -> None:
    settings, server, engine = split_args(
        {
            "gpus": "0.5",
            "mtp_step": "1",
            "max_open": "7",
            "served_model_name": "a,b",
            "autoscaling_config": '{"min_replicas": 1, "max_replicas": 4}',
        }
    )
    assert settings.gpus == 0.5
    assert settings.autoscaling_config == {"min_replicas": 1, "max_replicas": 4}
    # The ingress builds equal configs from the arguments that it receives.
    again = ReplicaConfig(**settings.model_dump(exclude_unset=True))
    assert again == settings
    assert (server.max_open, server.served_model_name, engine.mtp_step) == (7, ("a", "b"), 1)
    assert split_args({"seed": 3})[2].seed == 3
    assert split_args({"max_images": "4"})[2].max_images == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "x"}, "args must name settings only, got modle; known are"),
        (
            {"port": 1},
            "args must leave out Ray's settings and secrets, got port; set Ray's http_options.port",
        ),
        ({"api_key": "k"}, "got api_key; set COMPILED_MTP_SERVER_API_KEY where Ray runs"),
        ({"replicas": 0}, "replicas must be greater than or equal to 1, got 0; raise it"),
        ({"autoscaling_config": "{"}, "autoscaling_config must be JSON on a command line"),
        (
            {"autoscaling_config": '{"max_replicas": null}'},
            "autoscaling_config must hold a whole number of at least 1 as max_replicas, got .*null.*; corr",
        ),
        ({"autoscaling_config": {"max_replicas": "x"}}, "autoscaling_config must hold a whole number"),
        ({"autoscaling_config": {"max_replicas": 0}}, "autoscaling_config must hold a whole number"),
        (
            {"autoscaling_config": "{}", "replicas": 3},
            "replicas must be left out with autoscaling_config, got 3; set min_replicas",
        ),
        ({"write_timeout_s": 3}, "got write_timeout_s; leave it out; Ray's proxy buffers all"),
        ({"header_timeout_s": 3}, "got header_timeout_s; leave it out; Ray's proxy reads headers"),
        ({"seed": 3, "ingress_replicas": 2}, "seed must be left out with more than one ingress, got 3"),
        ({"mtp_step": 9}, "mtp_step must"),
        ({"allowed_hosts": "example.org"}, r"allowed_hosts must be this machine's own names without a key"),
    ],
)
def test_arguments_that_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_args(args)


def test_names_of_other_hosts_need_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    split_args({"allowed_hosts": "example.org", "api_key_file": str(keys)})
    split_args({"allowed_hosts": "example.org", "allow_anyone": "true"})


def test_what_decides_tokens_is_the_same_for_all_replicas() -> None:
    engine, gpus = ray_serve._choose_devices(ReplicaConfig(gpus=0, cpus=1), EngineConfig())
    assert (engine.device, engine.num_threads, gpus) == ("cpu", 1, 0)
    assert engine.model.is_absolute()
    engine, gpus = ray_serve._choose_devices(ReplicaConfig(gpus=2), EngineConfig())
    assert (engine.device, engine.num_threads, gpus) == ("cuda", None, 2)
    with pytest.raises(ValueError, match="gpus must be above 0 with device=cuda, got 0"):
        ray_serve._choose_devices(ReplicaConfig(gpus=0), EngineConfig(device="cuda"))
    with pytest.raises(ValueError, match="gpus must be 0 with device=cpu, got 1"):
        ray_serve._choose_devices(ReplicaConfig(gpus=1), EngineConfig(device="cpu"))


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (8, "cuda")])
def test_a_gpu_each_where_the_cluster_has_some(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"GPU": num_gpus})
    monkeypatch.setattr(ray_serve, "_import_ray", lambda _: ray)
    engine, gpus = ray_serve._choose_devices(ReplicaConfig(), EngineConfig())
    assert (engine.device, gpus) == (device, min(1, num_gpus))
    # Every rank of an engine has its own GPU.
    _, gpus = ray_serve._choose_devices(ReplicaConfig(), EngineConfig(tensor_parallel=2))
    assert gpus == 2 * min(1, num_gpus)
    engine, gpus = ray_serve._choose_devices(ReplicaConfig(), EngineConfig(device="cpu"))
    assert (engine.device, gpus) == ("cpu", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", None])
def test_a_proxy_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    def use(found: Any) -> None:
        client = SimpleNamespace(http_config=SimpleNamespace(host=found))
        ray = SimpleNamespace(
            _get_global_client=lambda: SimpleNamespace() if found is None else client,
            Gauge=FakeMetric,
            Counter=FakeMetric,
        )
        monkeypatch.setattr(ray_serve, "_import_ray", lambda _: ray)

    def start(**server_fields: Any) -> None:
        ray_serve.Ingress(None, {}, server_fields, {}, has_keys=False)

    use(host)
    with pytest.raises(ValueError, match=r"http_options\.host must be a loopback address without a key"):
        start()
    start(allow_anyone=True)
    with monkeypatch.context() as patch:
        patch.setenv("COMPILED_MTP_SERVER_API_KEY", "secret")
        start()
    for own in ("127.0.0.1", "::1", "localhost"):
        use(own)
        start()


def test_settings_that_do_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_serve, "_proxy_host", lambda: "127.0.0.1")
    monkeypatch.setattr(
        ray_serve, "_import_ray", lambda _: SimpleNamespace(Gauge=FakeMetric, Counter=FakeMetric)
    )
    monkeypatch.setenv("COMPILED_MTP_SERVER_WRITE_TIMEOUT_S", "3")
    ray_serve.Ingress(None, {}, {"max_open": 3}, {}, has_keys=False)
    assert [one.getMessage() for one in caplog.records] == [
        "write_timeout_s: set in the environment, without effect on Ray"
    ]


def test_looking_at_replicas_goes_on_whatever_they_say(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ReplicaMetrics()
    stats = ray_serve.EngineReplica  # No stats at all.
    answers: list[Any] = [OSError("nobody"), [stats], [], [ValueError("one of them")]]
    shown: list[bytes] = []

    async def ask() -> list[Any]:
        shown.append(metrics.text())
        if not answers:
            raise asyncio.CancelledError
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    async def run() -> None:
        engine: Any = SimpleNamespace(num_unrouted=5)
        with pytest.raises(asyncio.CancelledError):
            await ray_serve._poll_replicas(ask, metrics, engine, 0.0)

    asyncio.run(run())
    assert len(shown) == 5
    assert all(b"compiled_mtp_requests_waiting 5.0" in text for text in shown[1:])
    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_an_ingress_that_ends_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "_proxy_host", lambda: "127.0.0.1")
    ray = SimpleNamespace(Gauge=FakeMetric, Counter=FakeMetric)
    monkeypatch.setattr(ray_serve, "_import_ray", lambda _: ray)

    async def run() -> None:
        ingress = ray_serve.Ingress(None, {}, {}, {}, has_keys=False)
        ingress._watchers = asyncio.create_task(asyncio.sleep(60))
        watchers = ingress._watchers
        ingress.__del__()
        with pytest.raises(asyncio.CancelledError):
            await watchers
        assert ingress._gauges._is_closed.is_set()

    asyncio.run(run())


def details(**deployments: Any) -> dict[str, Any]:
    """Return what Ray's REST interface reports about its applications."""
    return {"applications": {"other": {"deployments": {}}, "mtp": {"deployments": deployments}}}


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        ({"target_num_replicas": 2, "deployment_config": {"num_replicas": 2}}, 2),
        # A bound, and the scaler's number within it.
        ({"target_num_replicas": 1, "deployment_config": {"autoscaling_config": {"max_replicas": 4}}}, 4),
        ({"target_num_replicas": 3, "deployment_config": {"num_replicas": 1}}, 3),
        ({"target_num_replicas": 0, "deployment_config": {"num_replicas": 0}}, 0),
    ],
)
def test_ray_tells_how_many_replicas_there_may_be(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], most: int
) -> None:
    ingress = {"target_num_replicas": 1, "deployment_config": {"num_replicas": 1}}
    said = details(Engine=engine, Ingress=ingress)
    client = SimpleNamespace(get_serve_details=lambda: said)
    context = SimpleNamespace(app_name="mtp")
    ray = SimpleNamespace(_get_global_client=lambda: client, get_replica_context=lambda: context)
    monkeypatch.setattr(ray_serve, "_import_ray", lambda _: ray)
    assert ray_serve._count_replicas() == {"Engine": most, "Ingress": 1}


def test_the_ingress_takes_what_the_replicas_of_a_config_file_take(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = [{"Engine": 2}, OSError("no controller"), KeyError("mtp"), {"Engine": 3}, {"Engine": 0}]
    shown: list[int] = []
    one = replica_of_tests()
    engine = make_engine(in_turn(one), max_open=12)
    prompts: Any = SimpleNamespace(max_waiting=12)

    def count() -> dict[str, int]:
        shown.append(engine.max_open)
        assert prompts.max_waiting == engine.max_open
        if not told:
            raise asyncio.CancelledError
        answer = told.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await ray_serve._keep_bounds(count, engine, prompts, 12, 0.0)
        # Idle, it takes as many requests as one replica: they make Ray start one.
        await engine.add_all([{"prompt_token_ids": [1]}] * 12)
        with pytest.raises(QueueFullError):
            await engine.add_all([{"prompt_token_ids": [1]}])
        engine.max_open = 24
        await engine.add_all([{"prompt_token_ids": [1]}] * 12)
        engine.close()

    asyncio.run(run())
    assert shown == [12, 24, 24, 24, 36, 12]
    # Two failures in a row are logged once.
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def replica_of_tests() -> Replica:
    return Replica("a", [Truth([1] * 500, "x" * 500, list(range(501)))], random.Random(1))


def test_a_seed_is_for_one_ingress_in_a_config_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "_proxy_host", lambda: "127.0.0.1")
    ray = SimpleNamespace(Gauge=FakeMetric, Counter=FakeMetric)
    monkeypatch.setattr(ray_serve, "_import_ray", lambda _: ray)
    monkeypatch.setattr(ray_serve, "_count_replicas", lambda: {"Engine": 1, "Ingress": 2})
    ingress = ray_serve.Ingress(None, {}, {}, {"seed": 3}, has_keys=False)
    with pytest.raises(ValueError, match="seed must be left out with more than one ingress, got 3"):
        asyncio.run(ingress.__serve_build_asgi_app__())


def test_a_replica_whose_step_hangs_is_unhealthy(tmp_path: Path) -> None:
    replica = object.__new__(ray_serve.EngineReplica)
    may_step = threading.Event()
    engine = ScriptedEngine(Tokenizer(CHECKPOINT))
    engine.say("one two")
    engine.before_step = may_step.wait
    replica._gauges = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    replica._engine = AsyncEngine(engine, step_timeout_s=0.1)
    try:
        replica.check_health()

        async def add() -> None:
            await replica._engine.add(prompt_token_ids=[1])
            await asyncio.sleep(0.3)

        asyncio.run(add())
        with pytest.raises(EngineHungError, match=r"a step must end within 0\.1 s"):
            replica.check_health()
    finally:
        may_step.set()
    replica._engine.close()
    with pytest.raises(RuntimeError, match="the engine died; its log says why"):
        replica.check_health()


class FakeMetric:
    """One of Ray's metrics: records what was set or added, by tags."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[tuple(tags[key] for key in self.tag_keys)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        key = tuple(tags[key] for key in self.tag_keys)
        self.values[key] = self.values.get(key, 0.0) + value


def test_rays_metrics_follow_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, FakeMetric] = {}

    def make(name: str, description: str, tag_keys: tuple[str, ...]) -> FakeMetric:
        assert name not in made
        return made.setdefault(name, FakeMetric(name, description, tag_keys))

    monkeypatch.setattr(ray_serve, "_import_ray", lambda _: SimpleNamespace(Gauge=make, Counter=make))
    metrics = ReplicaMetrics()
    gauges = ray_serve.RayGauges(metrics.collect)
    gauges.close()
    history = RequestHistory(3, 1, mtp_step=2, rounds=[16 * 2 + 1], time_to_first_token_s=0.5)
    output = RequestOutput("a", [1, 2], "x", RequestMetrics(history, 1, 2, 0.7), "stop")
    for _ in range(2):
        metrics.count((output,))
        metrics.on_failover()
        gauges.report()
    assert made["compiled_mtp_output_tokens"].values == {(): 4.0}
    assert made["compiled_mtp_failovers"].values == {(): 2.0}
    assert made["compiled_mtp_requests_finished"].values == {("stop",): 2.0}
    assert made["compiled_mtp_accepted_tokens"].values == {("1",): 2.0}
    assert made["compiled_mtp_replicas"].values == {(): 0.0}
    assert made["compiled_mtp_time_to_first_token_seconds_count"].values == {(): 2.0}
    assert made["compiled_mtp_time_to_first_token_seconds_sum"].values == {(): 1.0}
