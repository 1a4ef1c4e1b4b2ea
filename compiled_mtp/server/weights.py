"""Endpoints that change the engine's weights: with `allow_weight_updates` alone, which needs a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.errors import EngineUnavailableError
from compiled_mtp.server.errors import ApiError, refusal
from compiled_mtp.server.fields import Body
from compiled_mtp.server.generation import Service, parse
from compiled_mtp.streams.status import EngineStoppedError

Running = Literal["finish", "abort"]
_RUNNING: Any = Field(default="finish", description="what happens to requests that have begun")


class UpdateBody(Body):
    """POST /update_weights."""

    path: str = Field(description="a directory or GGUF file of this machine, stored as the engine's weights")
    running: Running = _RUNNING


class SleepBody(Body):
    """POST /sleep."""

    running: Running = _RUNNING


class WakeBody(Body):
    """POST /wake_up."""

    path: str | None = Field(default=None, description="other weights; default: the last ones")


class WeightHandlers:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def update(self, request: Request) -> Response:
        """POST /update_weights: answers when new requests get the new weights."""
        body = parse(UpdateBody, await request.body(), self._service.config)
        return await self._call("update_weights", Path(body.path), running=body.running)

    async def sleep(self, request: Request) -> Response:
        """POST /sleep: answers when the memory is given back."""
        body = parse(SleepBody, await request.body() or b"{}", self._service.config)
        return await self._call("sleep", running=body.running)

    async def wake_up(self, request: Request) -> Response:
        """POST /wake_up: answers when requests are served again."""
        body = parse(WakeBody, await request.body() or b"{}", self._service.config)
        return await self._call("wake_up", None if body.path is None else Path(body.path))

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Response:
        between_steps = getattr(self._service.engine, "between_steps", None)
        if between_steps is None:
            raise ApiError(400, f"/{name} must not be called on replicas; start new ones with the weights")
        try:
            await between_steps(name, *arguments, **options)
        except (ValueError, RuntimeError, OSError) as error:
            raise _as_answer(error) from error
        return JSONResponse({"status": "ok"})


def _as_answer(error: Exception) -> ApiError:
    """The answer to an error of an update: 503 for an engine that cannot update now, 400 for what does not
    fit, 500 for the device or the system, as for memory that is short."""
    if isinstance(error, (EngineStoppedError, EngineUnavailableError)):
        return refusal(error)
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}")
