"""Errors in the form of each API. Handlers raise ApiError anywhere; the app turns it into the answer."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from compiled_mtp.errors import EngineUnavailableError
from compiled_mtp.streams.status import EngineStoppedError, QueueFullError

Api = Literal["openai", "anthropic"]

_MOST_CHARACTERS = 1000
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error answer: its status, a one-line message, and the field to blame, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = bounded(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else bounded(param)
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        found = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, api: Api) -> dict[str, Any]:
        """Return the JSON object of the answer in the form of `api`."""
        if api == "anthropic":
            kind = _ANTHROPIC_TYPES.get(
                self.status, "invalid_request_error" if self.status < 500 else "api_error"
            )
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_of(path: str) -> Api:
    """Return the API of a path; the path is without the prefix that the app is mounted at."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def refusal(error: Exception) -> ApiError:
    """Return the answer to an error that the engine or a prompt worker raised; re-raise one that is a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineUnavailableError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after_s=5)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code=error.code, retry_after_s=5)
    if isinstance(error, ValueError):
        return ApiError(400, str(error), param=param_of(str(error)))
    raise error


def param_of(message: str) -> str | None:
    """Return the name that a message of the form `<name> must <rule>` begins with."""
    found = re.match(r"([A-Za-z_][\w.\[\]]*):? must ", message)
    return found.group(1) if found else None


def bounded(text: str) -> str:
    """Return `text` as one short, printable line: it may quote a 5 MB value or control characters."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
