"""ReplicaConfig: how many replicas there are and what each has. No Ray, no FastAPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import fail, remedy_of, rule_of, shown
from compiled_mtp.server.config import LOOPBACK_NAMES, ServerConfig, is_loopback

# Ray's own: how its proxy listens. A key in the arguments would be on Ray's dashboard.
_NOT_HERE = {
    "host": "set Ray's http_options.host",
    "port": "set Ray's http_options.port",
    "api_key": "set COMPILED_MTP_SERVER_API_KEY where Ray runs, or api_key_file",
    "header_timeout_s": "leave it out; Ray's proxy reads headers, and waits for them as it likes",
    "keep_alive_timeout_s": "leave it out; Ray's proxy keeps connections as it likes",
    "write_timeout_s": "leave it out; Ray's proxy takes all that is written, however slow its client is",
}


class ReplicaConfig(BaseModel):
    """Arguments of `compiled_mtp.ray_serve:app` that are neither the engine's nor the server's.

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
        description="GPUs of a replica, 0 for a CPU; default: tensor_parallel if the cluster has some, "
        "unless device=cpu",
    )
    cpus: float = Field(default=1, ge=0, description="CPU cores of a replica; threads too on a CPU")
    ingress_replicas: int = Field(default=1, ge=1, description="processes that talk to clients")
    ingress_cpus: float = Field(default=1, ge=0, description="CPU cores of each of those")
    max_failovers: int = Field(
        default=3, ge=0, description="times that a request is begun again when its replica is lost"
    )
    start_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds in which a replica must take a request"
    )
    silence_timeout_s: float = Field(
        default=30.0,
        ge=5,
        description="seconds without a word after which a replica loses its streams to another",
    )
    prefix_chunks: int = Field(
        default=1, ge=1, description="chunks of a prompt that decide which replica is preferred"
    )
    max_imbalance: int = Field(
        default=4,
        ge=0,
        description="requests that a preferred replica may have more than the least loaded one",
    )
    stats_period_s: float = Field(default=2.0, gt=0, description="seconds between looks at the replicas")

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
    """Return the three configs that the arguments of an app mean; each name belongs to one of them.

    Raises ValueError for an unknown name, one that Ray decides, a value out of range, names of other hosts
    among allowed_hosts without a key, and a seed that more than one ingress would give.
    """
    fields: dict[type, dict[str, Any]] = {ReplicaConfig: {}, ServerConfig: {}, EngineConfig: {}}
    for name, value in args.items():
        if name in _NOT_HERE:
            raise fail("args", "leave out what is Ray's or secret", name, _NOT_HERE[name])
        owner = next((one for one in fields if name in one.model_fields), None)  # type: ignore[attr-defined]
        if owner is None:
            known = sorted({n for one in fields for n in one.model_fields} - _NOT_HERE.keys())  # type: ignore[attr-defined]
            raise ValueError(f"args must name settings only, got {shown(name)}; known are {known}")
        fields[owner][name] = value
    server = ServerConfig(**fields[ServerConfig])
    check_access(server)
    settings, engine = ReplicaConfig(**fields[ReplicaConfig]), EngineConfig(**fields[EngineConfig])
    check_seed(engine, settings.ingress_replicas)
    return settings, server, engine


def check_seed(engine: EngineConfig, num_ingresses: int) -> None:
    """Raise ValueError for a seed that several ingresses would give: each counts its own requests from the
    first, and two of them would have one seed."""
    if engine.seed is not None and num_ingresses > 1:
        raise fail(
            "seed", "be left out with more than one ingress", engine.seed, "send one with each request"
        )


def check_access(server: ServerConfig) -> None:
    """Raise ValueError unless whoever calls the service by another name than the loopback's needs a key."""
    others = server.hosts() - set(LOOPBACK_NAMES)
    if others and not server.read_keys() and not server.allow_anyone:
        raise fail(
            "allowed_hosts",
            "be this machine's own names without a key",
            sorted(others),
            f"{_NOT_HERE['api_key']}, or allow_anyone",
        )


def find_inert(server: ServerConfig) -> list[str]:
    """Return the names of settings that were given, in the environment, and that do nothing on Ray."""
    return sorted(server.model_fields_set & _NOT_HERE.keys() - {"api_key"})


def check_proxy(host: str | None) -> None:
    """Raise ValueError unless Ray's proxies, at `host`, are this machine's own: for a door without a key.

    Whoever reaches them may call the service by any name. host None: Ray does not tell.
    """
    if host is None or not is_loopback(host):
        raise fail(
            "http_options.host",
            "be this machine's own without a key",
            "what Ray does not tell" if host is None else host,
            f"set it to 127.0.0.1, or {_NOT_HERE['api_key']}, or allow_anyone",
        )


def _explain(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "args"
    return str(fail(name, rule_of(problem["msg"]), shown(problem["input"], repr), remedy_of(problem["type"])))
