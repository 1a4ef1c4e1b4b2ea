"""ServerConfig: the service's address, access rules and limits. Imports no FastAPI."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from compiled_mtp.config.environment import SERVER_ENV_PREFIX, unknown_variables
from compiled_mtp.config.values import Names
from compiled_mtp.errors import remedy_of, rule_of

_ORIGIN = re.compile(r"https?://[^/\s,]+")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# The key file may be a device without an end.
_MOST_KEY_CHARACTERS = 2**20


class ServerConfig(BaseSettings):
    """The service's settings; keyword arguments win over COMPILED_MTP_SERVER_* variables, both over defaults.

    Raises ValueError with one line per mistake, unknown names among them.
    """

    model_config = SettingsConfigDict(
        env_prefix=SERVER_ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, allow_inf_nan=False
    )

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port, 0 for a free one")
    served_model_name: Names = Field(
        default=(),
        description="names of the model, separated by commas; default: its directory's name",
    )
    api_key: SecretStr | None = Field(
        default=None, description="key that clients send; in the environment alone, since flags are public"
    )
    api_key_file: Path | None = Field(
        default=None, description="file with one key per line; an open host needs it"
    )
    allow_anyone: bool = Field(
        default=False, description="serve without a key on an address that other machines can reach"
    )
    allow_weight_updates: bool = Field(
        default=False,
        description="serve /update_weights, /sleep and /wake_up to clients with a key, which must be set",
    )
    allowed_hosts: Names = Field(
        default=(),
        description="host names under which clients may reach this server besides localhost, separated by "
        "commas, * for any; default: `host`",
    )
    allowed_origins: Names = Field(
        default=(),
        description="origins of web pages that may call this server (CORS), such as https://app.example.org, "
        "separated by commas, * for any; default: the server's own page only",
    )
    max_body_bytes: int | None = Field(
        default=None, ge=1, description="bytes of a request's body; default: 8 MiB, or 32 MiB with images"
    )
    header_timeout_s: float = Field(default=10.0, gt=0, description="seconds for a request's headers")
    body_timeout_s: float = Field(default=30.0, gt=0, description="seconds for a request's body")
    write_timeout_s: float = Field(
        default=30.0, gt=0, description="seconds without a read by the client while its connection is full"
    )
    keep_alive_s: int = Field(
        # Proxies keep a connection idle for up to 60 s, and the server must not close it before they do.
        default=75,
        ge=1,
        description="seconds that a connection may be idle between requests",
    )
    max_connections: int = Field(default=1024, ge=1, description="connections at a time")
    max_open: int = Field(default=512, ge=1, description="choices of requests that run or wait at a time")
    max_image_bytes: int = Field(
        default=4 * 2**30, ge=0, description="bytes of pixels of requests that run or wait at a time"
    )
    stream_buffer: int = Field(
        default=1024, ge=1, description="unread outputs of a choice, after which its request is aborted"
    )
    drain_timeout_s: float = Field(default=30.0, ge=0, description="seconds for open requests after SIGTERM")
    step_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="seconds that a step of the engine may take before /health says that it hangs",
    )
    prompt_workers: int = Field(default=2, ge=1, le=16, description="processes that render and tokenise")
    prompt_timeout_s: float = Field(default=10.0, gt=0, description="seconds to render and tokenise a prompt")
    max_prompt_chars: int = Field(default=4 * 2**20, ge=1, description="characters of a rendered prompt")
    allow_media_urls: Names = Field(
        default=(),
        description="hosts, separated by commas, from which images may be fetched by http and https; "
        "default: none, images come only in the request",
    )
    media_root: Path | None = Field(
        default=None, description="directory from which file:// addresses may name images; default: none"
    )
    max_media_bytes: int = Field(default=16 * 2**20, ge=1, description="bytes of an image that is fetched")
    media_timeout_s: float = Field(default=10.0, gt=0, description="seconds to fetch an image")
    max_choices: int = Field(default=32, ge=1, description="prompts times n of a request")
    max_stops: int = Field(default=16, ge=0, description="stop strings of a request")
    max_stop_chars: int = Field(default=256, ge=1, description="characters of a stop string")
    max_bias: int = Field(default=1024, ge=0, description="ids of logit_bias, and of stop_token_ids")
    max_schema_bytes: int = Field(
        default=64 * 1024, ge=2, description="bytes of response_format, and of every other grammar"
    )
    max_tools_bytes: int = Field(
        # Coding agents send 70 kB.
        default=512 * 1024,
        ge=2,
        description="bytes of tools",
    )
    max_stored_bytes: int = Field(
        default=64 * 2**20,
        ge=0,
        description="bytes of the answers of /v1/responses that clients may continue, 0 to store none",
    )
    template_kwargs: Names = Field(
        default=("enable_thinking", "preserve_thinking"),
        description="names that chat_template_kwargs may set, separated by commas",
    )
    strict_fields: bool = Field(
        default=False, description="refuse the fields of a request that the service does not read"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the lowest level of lines in the log; info has a line per request"
    )
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto", description="form of the log's lines: auto for text in a terminal, json elsewhere"
    )
    log_prompts: bool = Field(default=False, description="write prompts into the log")

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"allowed_origins must be * or origins such as https://app.example.org:8443, got "
                    f"{origin!r}; leave out paths and the final slash"
                )
        return value

    def __init__(self, **values: Any) -> None:
        known = sorted(type(self).model_fields)
        if unknown := unknown_variables(SERVER_ENV_PREFIX, known):
            raise ValueError(
                f"environment must name settings only, got {unknown}; known are {SERVER_ENV_PREFIX} and one "
                f"of {known}"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("\n".join(_explain(problem) for problem in error.errors())) from None
        self._check_access()

    def read_keys(self) -> tuple[str, ...]:
        """Return the keys that clients may send, () if they need none.

        Raises ValueError for an empty key and an unusable file.
        """
        found = []
        if self.api_key is not None:
            found = [self.api_key.get_secret_value().strip()]
            if not found[0]:
                # An empty key would admit all clients that send none.
                raise ValueError("api_key must hold a key, got an empty one; give one, or leave it out")
        if self.api_key_file is not None:
            try:
                with self.api_key_file.open(encoding="utf-8") as stream:
                    text = stream.read(_MOST_KEY_CHARACTERS + 1)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"api_key_file must be readable text, got {self.api_key_file}: {type(error).__name__}; "
                    "write one key per line into it"
                ) from None
            if len(text) > _MOST_KEY_CHARACTERS:
                raise ValueError(
                    f"api_key_file must hold at most {_MOST_KEY_CHARACTERS} characters, got more in "
                    f"{self.api_key_file}; write one key per line into it"
                )
            # Do not split a key at its spaces: single words are easily guessed.
            lines = [key for line in text.splitlines() if (key := line.strip())]
            if not lines:
                raise ValueError(
                    f"api_key_file must hold a key, got an empty {self.api_key_file}; write one into it"
                )
            found += lines
        return tuple(found)

    def most_body_bytes(self, *, has_images: bool) -> int:
        """The bytes of a request's body, at most; has_images: the service takes images."""
        return self.max_body_bytes or (32 if has_images else 8) * 2**20

    def hosts(self) -> frozenset[str]:
        """Return the names, in lower case, that a Host header may hold; `*` allows any name.

        The loopback's are always allowed: probes on the same machine use them, and a web page of another name
        cannot make a browser send them.
        """
        names = (*LOOPBACK_NAMES, *(self.allowed_hosts or (self.host,)))
        return frozenset(name.lower().strip("[]") for name in names)

    def _check_access(self) -> None:
        if self.allow_weight_updates and not self.read_keys():
            raise ValueError(
                "allow_weight_updates must come with a key, got none; set "
                f"{SERVER_ENV_PREFIX}API_KEY or api_key_file"
            )
        if is_loopback(self.host):
            return
        needs_names = self.host in ("0.0.0.0", "::") and not self.allowed_hosts
        if not self.read_keys() and not self.allow_anyone:
            also = ", and list the server's names in allowed_hosts" if needs_names else ""
            raise ValueError(
                f"host must be this machine's own without a key, got {self.host}; set "
                f"{SERVER_ENV_PREFIX}API_KEY or api_key_file, or allow_anyone{also}"
            )
        if needs_names:
            raise ValueError(
                f"allowed_hosts must name this server for every address, got none with host {self.host}; "
                "list its names, or * for any"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, an address or a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _explain(problem: Any) -> str:
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    name = ".".join(str(part) for part in problem["loc"]) or "config"
    if problem["type"] == "extra_forbidden":
        return f"config must name settings only, got {name}; known are {sorted(ServerConfig.model_fields)}"
    got = "a secret" if name == "api_key" else repr(problem["input"])
    return f"{name} must {rule_of(problem['msg'])}, got {got}; {remedy_of(problem['type'])}"
