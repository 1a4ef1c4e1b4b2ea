"""ReplicaConfig: the number of replicas and the resources of each. No Ray, no FastAPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import fail, remedy_of, rule_of, shown
from compiled_mtp.server.config import LOOPBACK_NAMES, ServerConfig, is_loopback

# Settings that Ray's own options replace, and api_key, which Ray's dashboard would show as an argument.
_REFUSED = {
    "host": "set Ray's http_options.host",
    "port": "set Ray's http_options.port",
    "api_key": "set COMPILED_MTP_SERVER_API_KEY where Ray runs, or api_key_file",
    "log_level": "set Ray's logging_config",
    "log_format": "set Ray's logging_config",
    "header_timeout_s": "leave it out; Ray's proxy reads headers with its own limit",
    "keep_alive_s": "leave it out; Ray's proxy keeps connections with its own limit",
    "write_timeout_s": "leave it out; Ray's proxy buffers all output, however slow the client is",
}


class ReplicaConfig(BaseModel):
    """The arguments of `compiled_mtp.ray_serve:app` that neither the engine nor the server takes.

    Raises ValueError with one line per mistake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    replicas: int = Field(default=1, ge=1, description="engines, where autoscaling_config is not given")
    autoscaling_config: dict[str, Any] | None = Field(
        default=None, description="Ray Serve's autoscaling_config of the engines, as JSON on a command line"
    )
    gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs of a replica, 0 for a CPU; default: tensor_parallel if the cluster has GPUs, "
        "unless device=cpu",
    )
    cpus: float = Field(default=1, ge=0, description="CPU cores of a replica; on a CPU also its threads")
    ingress_replicas: int = Field(default=1, ge=1, description="processes that serve clients")
    ingress_cpus: float = Field(default=1, ge=0, description="CPU cores of each ingress")
    max_failovers: int = Field(
        default=3, ge=0, description="times that a request restarts on another replica after a loss"
    )
    start_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds within which a replica must take a request"
    )
    silence_timeout_s: float = Field(
        default=30.0,
        ge=5,
        description="seconds without a message after which a replica's streams move to another",
    )
    prefix_chunks: int = Field(
        default=1, ge=1, description="prefill chunks of a prompt that decide which replica is preferred"
    )
    max_imbalance: int = Field(
        default=4,
        ge=0,
        description="requests that a preferred replica may have more than the least loaded one",
    )
    stats_period_s: float = Field(default=2.0, gt=0, description="seconds between polls of the replicas")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("\n".join(_explain(one) for one in error.errors())) from None
        if self.autoscaling_config is not None and "replicas" in self.model_fields_set:
            raise fail(
                "replicas",
                "be left out with autoscaling_config",
                self.replicas,
                "set min_replicas and max_replicas of autoscaling_config",
            )

    @field_validator("autoscaling_config", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"be JSON on a command line ({error})") from None

    @field_validator("autoscaling_config")
    @classmethod
    def _check_most(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        most = (value or {}).get("max_replicas", 1)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError("hold a whole number of at least 1 as max_replicas")
        return value


def split_args(args: Mapping[str, Any]) -> tuple[ReplicaConfig, ServerConfig, EngineConfig]:
    """Return the three configs of an app's arguments; each name belongs to one of them.

    Raises ValueError for an unknown name, a name in _REFUSED, a value out of range, names of other hosts in
    allowed_hosts without a key, and a seed with more than one ingress.
    """
    fields: dict[type, dict[str, Any]] = {ReplicaConfig: {}, ServerConfig: {}, EngineConfig: {}}
    for name, value in args.items():
        if name in _REFUSED:
            raise fail("args", "leave out Ray's settings and secrets", name, _REFUSED[name])
        owner = next((one for one in fields if name in one.model_fields), None)  # type: ignore[attr-defined]
        if owner is None:
            known = sorted({n for one in fields for n in one.model_fields} - _REFUSED.keys())  # type: ignore[attr-defined]
            raise ValueError(f"args must name settings only, got {shown(name)}; known are {known}")
        fields[owner][name] = value
    server = ServerConfig(**fields[ServerConfig])
    check_access(server)
    settings, engine = ReplicaConfig(**fields[ReplicaConfig]), EngineConfig(**fields[EngineConfig])
    check_seed(engine, settings.ingress_replicas)
    return settings, server, engine


def check_seed(engine: EngineConfig, num_ingresses: int) -> None:
    """Raise ValueError for a seed with several ingresses.

    Each ingress counts its own requests, so two requests would have the same seed.
    """
    if engine.seed is not None and num_ingresses > 1:
        raise fail(
            "seed", "be left out with more than one ingress", engine.seed, "send one with each request"
        )


def check_access(server: ServerConfig) -> None:
    """Raise ValueError if clients without a key may call the service by a name other than the loopback's."""
    others = server.hosts() - set(LOOPBACK_NAMES)
    if others and not server.read_keys() and not server.allow_anyone:
        raise fail(
            "allowed_hosts",
            "be this machine's own names without a key",
            sorted(others),
            f"{_REFUSED['api_key']}, or allow_anyone",
        )


def find_inert(server: ServerConfig) -> list[str]:
    """Return the names of the settings from the environment that have no effect on Ray."""
    return sorted(server.model_fields_set & _REFUSED.keys() - {"api_key"})


def check_proxy(host: str | None) -> None:
    """Raise ValueError unless `host`, on which Ray's proxies listen, is a loopback address.

    For a service without a key: all clients that reach the proxies may call it by any name. host: None if
    Ray does not report it.
    """
    if host is None or not is_loopback(host):
        raise fail(
            "http_options.host",
            "be a loopback address without a key",
            "no address from Ray" if host is None else host,
            f"set it to 127.0.0.1, or {_REFUSED['api_key']}, or allow_anyone",
        )


def _explain(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "args"
    return str(fail(name, rule_of(problem["msg"]), shown(problem["input"], repr), remedy_of(problem["type"])))
