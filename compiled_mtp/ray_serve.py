"""Replicas on Ray Serve: `serve run compiled_mtp.ray_serve:app model=PATH replicas=2`, see docs/replicas.md.

A CPU process, the ingress, runs the whole service except the engine; engines are replicas that it calls by
streaming handles. Ray is imported where it is used, so that the module can be imported without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.config.defaults import resolve_prefill_chunk
from compiled_mtp.config.engine_config import DEFAULT_BATCH, EngineConfig
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.replicas.config import (
    ReplicaConfig,
    check_access,
    check_proxy,
    check_seed,
    find_inert,
    split_args,
)
from compiled_mtp.replicas.connection import WithConnection
from compiled_mtp.replicas.decoding import decode
from compiled_mtp.replicas.engine import ReplicatedEngine
from compiled_mtp.replicas.identity import identify, list_files
from compiled_mtp.replicas.messages import Call, Message
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.replicas.relay import RelayLimits
from compiled_mtp.server.app import create_app
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.interpreter import settle_interpreter
from compiled_mtp.server.metrics import Metrics
from compiled_mtp.server.prompts import PromptPool
from compiled_mtp.server.serve import assemble_service, name_model
from compiled_mtp.streams.status import EngineStoppedError

if TYPE_CHECKING:
    from compiled_mtp.spec.engine_stats import EngineStats

logger = logging.getLogger("compiled_mtp.replicas")

_GAUGES_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 10.0


def app(args: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application that `args` describe: fields of ReplicaConfig, ServerConfig and
    EngineConfig by their names, as text or as values.

    Raises ValueError for fields that one of them refuses, ImportError without Ray.
    """
    serve = _import_ray("ray.serve")
    settings, server, engine = split_args(args)
    engine, gpus = _choose_devices(settings, engine)
    if server.media_root is not None:
        # The ingress has a working directory of its own too.
        server = server.model_copy(update={"media_root": server.media_root.expanduser().absolute()})
    scale: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.autoscaling_config is not None:
        scale = {
            "autoscaling_config": {"target_ongoing_requests": engine.max_batch or DEFAULT_BATCH}
            | settings.autoscaling_config
        }
    engines = serve.deployment(
        EngineReplica,
        name="Engine",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": gpus},
        max_ongoing_requests=server.max_open,
        # A replica that is shut down finishes its requests within this time; the others continue elsewhere.
        graceful_shutdown_timeout_s=server.drain_timeout_s,
        # The ingress polls every replica every few seconds, which would fill an access log.
        logging_config={"enable_access_log": False},
        request_router_config={
            "request_router_class": "compiled_mtp.replicas.ray_router:PrefixRouter",
            "request_router_kwargs": {"max_imbalance": settings.max_imbalance},
        },
        **scale,
    ).bind(
        engine.model_dump(mode="json"),
        server.max_open,
        server.max_image_bytes,
        server.stream_buffer,
        server.step_timeout_s,
    )
    return serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.ingress_replicas,
        ray_actor_options={"num_cpus": settings.ingress_cpus},
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=server.drain_timeout_s,
    ).bind(
        engines,
        settings.model_dump(exclude_unset=True),
        server.model_dump(mode="json", include=server.model_fields_set - {"api_key"}),
        engine.model_dump(mode="json"),
        has_keys=bool(server.read_keys()),
    )


def _import_ray(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"ray must be installed to serve replicas, got {error}; pip install 'compiled-mtp[ray]'"
        ) from error


def _choose_devices(settings: ReplicaConfig, engine: EngineConfig) -> tuple[EngineConfig, float]:
    """Return the engine's config and its GPUs per replica; all replicas get one device, and on a CPU one
    thread count, because these decide tokens.
    """
    gpus = settings.gpus
    if gpus is None:
        ray = _import_ray("ray")
        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
        is_on_gpu = engine.device == "cuda" or (engine.device == "auto" and has_gpus)
        gpus = float(engine.tensor_parallel) if is_on_gpu else 0.0
    if engine.device == "cuda" and not gpus:
        raise ValueError("gpus must be above 0 with device=cuda, got 0; raise it, or set device=cpu")
    if engine.device == "cpu" and gpus:
        raise ValueError(f"gpus must be 0 with device=cpu, got {gpus:g}; leave one of the two out")
    if engine.model.is_dir():
        # Replicas have working directories of their own.
        engine = engine.model_copy(update={"model": engine.model.absolute()})
    if engine.lora is not None:
        engine = engine.model_copy(update={"lora": engine.lora.absolute()})
    if gpus:
        return engine.model_copy(update={"device": "cuda"}), gpus
    threads = engine.num_threads or max(1, int(settings.cpus))
    return engine.model_copy(update={"device": "cpu", "num_threads": threads}), gpus


class EngineReplica:
    """The deployment that decodes: one engine, stepped in a thread of its own."""

    def __init__(
        self,
        engine_fields: Mapping[str, Any],
        max_open: int,
        max_image_bytes: int,
        stream_buffer: int,
        step_timeout_s: float,
    ) -> None:
        from compiled_mtp.engine import Engine

        config = EngineConfig(**engine_fields)
        # Before any file of it is read, by the front end too.
        files = list_files(find_checkpoint(Path(config.model), is_offline=config.offline), config.lora)
        frontend = open_frontend(config)
        engine = Engine(config, frontend=frontend)
        frontend.warm_up_grammars()
        metrics = Metrics()
        metrics.set_stats(engine.stats())
        self._replica_id = _import_ray("ray.serve").get_replica_context().replica_id.unique_id
        self._identity = identify(config, engine, files)
        self._max_model_len = engine.runner.memory.max_model_len
        self._engine = AsyncEngine(
            engine,
            max_open=max_open,
            max_image_bytes=max_image_bytes,
            stream_buffer=stream_buffer,
            step_timeout_s=step_timeout_s,
            observer=metrics,
        )
        self._gauges = RayGauges(metrics.collect)
        settle_interpreter()

    async def decode(self, call: Call) -> AsyncIterator[Message]:
        """Yield Accepted and then all outputs, or Refused. Leaving early aborts the request."""
        messages = decode(self._engine, call, self._replica_id, self._identity)
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield message

    async def describe(self) -> dict[str, Any]:
        """Return this replica's id, process id, identity and max_model_len."""
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            "identity": self._identity,
            "max_model_len": self._max_model_len,
        }

    async def stats(self) -> EngineStats:
        """Return the engine's stats."""
        return self._engine.stats

    def check_health(self) -> None:
        """Raise for an engine that died or whose step hangs; Ray then replaces this replica."""
        if self._engine.status == "stopped":
            raise RuntimeError("the engine died; its log says why")
        self._engine.check_step()

    def __del__(self) -> None:
        """Close the engine with its replica."""
        if hasattr(self, "_gauges"):
            self._gauges.close()
        if hasattr(self, "_engine"):
            self._engine.close()


class Ingress:
    """The service over replicas: the deployment that talks to clients."""

    def __init__(
        self,
        engines: Any,
        settings_fields: Mapping[str, Any],
        server_fields: Mapping[str, Any],
        engine_fields: Mapping[str, Any],
        *,
        has_keys: bool,
    ) -> None:
        self._settings = ReplicaConfig(**settings_fields)
        self._engine_config = EngineConfig(**engine_fields)
        self._server = name_model(ServerConfig(**server_fields), self._engine_config)
        check_access(self._server)
        if has_keys and not self._server.read_keys():
            # The key is not an argument, because Ray shows arguments.
            raise ValueError(
                "api_key must be set where the ingress runs, got none; set COMPILED_MTP_SERVER_API_KEY there"
            )
        if not self._server.read_keys() and not self._server.allow_anyone:
            check_proxy(_proxy_host())
        if inert := find_inert(self._server):
            logger.warning("%s: set in the environment, without effect on Ray", ", ".join(inert))
        self._engines = engines
        self._metrics = ReplicaMetrics()
        self._engine: ReplicatedEngine | None = None
        self._watchers: asyncio.Future[Any] | None = None
        # Only the ingress's own metrics: the replicas report theirs themselves.
        self._gauges = RayGauges(self._metrics.collect_own)

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the same app as without Ray, with the middleware that its streams need.

        Ray calls it once, on the event loop of the requests. It waits for the first replica.
        """
        settings, config, server = self._settings, self._engine_config, self._server
        counts = await asyncio.to_thread(_count_replicas)
        check_seed(config, counts["Ingress"])
        frontend = open_frontend(config)
        if frontend.tokenizer is None:
            raise ValueError(f"model must hold a tokenizer.json, got {frontend.path}; download it whole")
        vision = frontend.model_config.vision
        described = await self._engines.describe.remote()
        streaming = self._engines.options(method_name="decode", stream=True)
        self._engine = ReplicatedEngine(
            lambda call: _follow(streaming, call),
            self._metrics,
            RelayLimits(settings.max_failovers, settings.start_timeout_s, settings.silence_timeout_s),
            seed=config.seed,
            # Routing hashes prefixes in chunks of its own, which need not be a GPU's prefill chunks.
            chunk=resolve_prefill_chunk(config, "cpu", frontend.model_config),
            num_chunks=settings.prefix_chunks,
            max_open=server.max_open,
            max_image_bytes=server.max_image_bytes,
            stream_buffer=server.stream_buffer,
            image_token_id=None if vision is None else vision.image_token_id,
        )
        service = assemble_service(
            self._engine,
            self._metrics,
            frontend.tokenizer,
            frontend.path,
            described["max_model_len"],
            server,
            (vision, frontend.max_images),
        )
        _set_bounds(counts, self._engine, service.prompts, server.max_open)
        period_s = settings.stats_period_s
        self._watchers = asyncio.gather(
            _poll_replicas(self._ask_stats, self._metrics, self._engine, period_s),
            _keep_bounds(_count_replicas, self._engine, service.prompts, server.max_open, period_s),
        )
        found = create_app(service)
        found.add_middleware(WithConnection)
        return found

    def __del__(self) -> None:
        """Stop polling; Ray calls it on the event loop of the requests."""
        watchers: asyncio.Future[Any] | None = getattr(self, "_watchers", None)
        if watchers is not None:
            watchers.cancel()
        if hasattr(self, "_gauges"):
            self._gauges.close()

    async def _ask_stats(self) -> list[Any]:
        return await self._engines.broadcast("stats").results_async(
            timeout_s=_ANSWER_TIMEOUT_S, return_exceptions=True
        )


def _proxy_host() -> str | None:
    """Return the address at which Ray's proxies listen; None if Ray, which has no public name for it, gives
    none.
    """
    try:
        return str(_import_ray("ray.serve.context")._get_global_client().http_config.host)
    except (AttributeError, ImportError):
        return None


def _count_replicas() -> dict[str, int]:
    """Return the most replicas that each deployment of this application may have, by its name.

    A config file's `deployments`, and a later deployment, override the arguments, and only Ray knows them;
    these are the numbers of its REST interface. Blocks until Ray's controller answers.
    """
    client = _import_ray("ray.serve.context")._get_global_client()
    application = _import_ray("ray.serve").get_replica_context().app_name
    found = {}
    for name, details in client.get_serve_details()["applications"][application]["deployments"].items():
        scaled = details["deployment_config"].get("autoscaling_config") or {}
        found[name] = max(details["target_num_replicas"], scaled.get("max_replicas", 0))
    return found


def _set_bounds(
    counts: Mapping[str, int], engine: ReplicatedEngine, prompts: PromptPool, max_open: int
) -> None:
    """Admit `max_open` choices, and prompts, per engine that there may be, and as for one engine if there is
    none.
    """
    engine.max_open = prompts.max_waiting = max_open * max(1, counts["Engine"])


async def _keep_bounds(
    count: Callable[[], Mapping[str, int]],
    engine: ReplicatedEngine,
    prompts: PromptPool,
    max_open: int,
    period_s: float,
) -> None:
    """Adjust the bounds to the number of replicas, until cancelled."""

    async def adjust() -> None:
        _set_bounds(await asyncio.to_thread(count), engine, prompts, max_open)

    await _repeat(adjust, period_s, "Ray reports no number of replicas; max_open stays")


async def _poll_replicas(
    ask: Callable[[], Awaitable[list[Any]]],
    metrics: ReplicaMetrics,
    engine: ReplicatedEngine,
    period_s: float,
) -> None:
    """Set the gauges from the replicas' stats, until cancelled.

    ask: returns the stats of each replica, or the exception that it raised.
    """

    async def poll() -> None:
        try:
            answers = await ask()
        except Exception:
            metrics.set_replicas([], engine.num_unrouted)
            raise
        stats = [one for one in answers if not isinstance(one, BaseException)]
        metrics.set_replicas(stats, engine.num_unrouted)

    await _repeat(poll, period_s, "no replica reports its stats; gauges are 0 until one does")


async def _repeat(work: Callable[[], Awaitable[None]], period_s: float, warning: str) -> None:
    """Run `work` every period_s seconds, until cancelled; of failures in a row the first is logged."""
    has_failed = False
    while True:
        try:
            await work()
            has_failed = False
        except Exception:
            if not has_failed:
                logger.warning(warning, exc_info=True)
            has_failed = True
        await asyncio.sleep(period_s)


async def _follow(engines: Any, call: Call) -> AsyncIterator[Message]:
    """Yield the messages of one replica; leaving early cancels the call there.

    Raises Ray's error for a replica that dies, and EngineStoppedError for a cancellation on the replica's
    side.
    """
    answer = engines.remote(call)
    try:
        async for message in answer:
            yield message
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineStoppedError("the call was cancelled where it ran") from None
    finally:
        answer.cancel()


class RayGauges:
    """Reports to Ray the metrics that `collect` yields: gauges, counters, and sums and counts of histograms.

    A thread does so every two seconds; Ray adds the names of deployment and replica.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._ray = _import_ray("ray.serve.metrics")
        self._known: dict[str, Any] = {}
        self._reported: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="compiled-mtp-gauges", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def report(self) -> None:
        """Report gauges, and the increase of counters after the last report."""
        for family in self._collect():
            is_gauge = isinstance(family, GaugeMetricFamily)
            for sample in family.samples:
                if is_gauge or isinstance(family, CounterMetricFamily):
                    self._set(family.name, is_gauge, sample.labels, sample.value)
                elif sample.name.endswith(("_sum", "_count")):
                    self._set(sample.name, False, sample.labels, sample.value)

    def _set(self, name: str, is_gauge: bool, labels: Mapping[str, str], value: float) -> None:
        metric = self._known.get(name)
        if metric is None:
            kind = self._ray.Gauge if is_gauge else self._ray.Counter
            metric = self._known[name] = kind(name, description=name, tag_keys=tuple(labels))
        if is_gauge:
            metric.set(value, tags=dict(labels))
            return
        key = (name, tuple(sorted(labels.items())))
        if (more := value - self._reported.get(key, 0.0)) > 0:
            metric.inc(more, tags=dict(labels))
            self._reported[key] = value

    def _run(self) -> None:
        has_failed = False
        while not self._is_closed.wait(_GAUGES_PERIOD_S):
            try:
                self.report()
                has_failed = False
            except Exception:
                # The engine changes metrics while they are read; the next report may succeed.
                if not has_failed:
                    logger.warning("reporting an engine's metrics to Ray failed; trying again", exc_info=True)
                has_failed = True
