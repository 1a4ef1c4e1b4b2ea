"""The FastAPI app over one service: routes, errors in each API's form, auth middleware, access log."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from compiled_mtp.server.anthropic import AnthropicHandlers
from compiled_mtp.server.anthropic_models import CountBody, MessagesBody
from compiled_mtp.server.auth import App, AuthMiddleware, Message, Receive, Scope, Send
from compiled_mtp.server.errors import ApiError, api_of
from compiled_mtp.server.generation import Service
from compiled_mtp.server.openai import OpenAIHandlers
from compiled_mtp.server.openai_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from compiled_mtp.server.own_endpoints import OwnHandlers
from compiled_mtp.server.responses import ResponsesHandlers
from compiled_mtp.server.responses_models import ResponsesBody
from compiled_mtp.server.sse import ClientGoneError
from compiled_mtp.server.static import add_page
from compiled_mtp.server.weights import SleepBody, UpdateBody, WakeBody, WeightHandlers

logger = logging.getLogger("compiled_mtp.server")

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
}
_WEIGHT_BODIES: dict[str, type[BaseModel]] = {
    "/update_weights": UpdateBody,
    "/sleep": SleepBody,
    "/wake_up": WakeBody,
}
_REFS = "#/components/schemas/{model}"
# Supervisors ask for these paths every few seconds: good answers are logged only for debugging.
_PROBED = ("/health", "/metrics")


def create_app(service: Service) -> FastAPI:
    """Return the app. Its lifespan starts and closes the prompt pool; the caller closes the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.prompts.start()
        try:
            yield
        finally:
            await service.prompts.close()

    # FastAPI's documentation pages load scripts from other hosts; only /openapi.json is served.
    app = FastAPI(
        title="compiled-mtp",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            ApiError: _answer_error,
            HTTPException: _answer_http_error,
            ClientGoneError: _answer_client_gone,
            Exception: _answer_bug,
        },
    )
    _add_routes(app, service)
    add_page(app)
    most = service.config.most_body_bytes(has_images=service.max_images > 0)
    app.add_middleware(AuthMiddleware, config=service.config, max_body_bytes=most)
    if service.config.allowed_origins:
        # Outside the auth middleware: a browser's preflight request carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(_AccessLog, service=service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    openai, anthropic = OpenAIHandlers(service), AnthropicHandlers(service)
    responses, own = ResponsesHandlers(service), OwnHandlers(service)
    posts: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/completions": openai.completions,
        "/v1/chat/completions": openai.chat,
        "/tokenize": openai.tokenize,
        "/detokenize": own.detokenize,
        "/v1/embeddings": own.embeddings,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/v1/responses": responses.create,
    }
    if service.config.allow_weight_updates:
        weights = WeightHandlers(service)
        posts |= {
            "/update_weights": weights.update,
            "/sleep": weights.sleep,
            "/wake_up": weights.wake_up,
        }
    for path, handler in posts.items():
        extra = None
        if (body := (_BODIES | _WEIGHT_BODIES).get(path)) is not None:
            schema = {"$ref": _REFS.format(model=body.__name__)}
            content = {"application/json": {"schema": schema}}
            extra = {"requestBody": {"required": True, "content": content}}
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=extra)
    gets: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/models": openai.models,
        "/v1/models/{name:path}": openai.model,
        "/v1/responses/{response_id}": responses.retrieve,
        "/health": own.health,
        "/metrics": own.metrics,
        "/version": own.version,
    }
    for path, handler in gets.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
        # HEAD has its own route: a route of two methods would be in the document twice under one id.
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    path = "/v1/responses/{response_id}"
    app.add_api_route(path, responses.delete, methods=["DELETE"], response_model=None)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of the bodies that the handlers parse themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version="1", routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in (_BODIES | _WEIGHT_BODIES).values()], ref_template=_REFS
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema


def _as_response(error: ApiError, request: Request) -> Response:
    body = error.body(api_of(get_route_path(request.scope)))
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _as_response(error, request)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a request that no route serves, because of its path or its method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {
        404: f"the path must be one that is served, got {path}; /openapi.json lists them",
        405: f"the method must be one that {path} takes, got {request.method}; see the Allow header",
    }.get(error.status_code, str(error.detail))
    response = _as_response(ApiError(error.status_code, message), request)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # Starlette lists the methods of the first route with this path only.
        response.headers["allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """Return the methods that any route serves at the request's path, in alphabetical order."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


async def _answer_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    # The traceback is in the log; the client sees no internals.
    return _as_response(ApiError(500, "the server failed to answer; its log says why"), request)


class _AccessLog:
    """Logs one line of JSON per request, and counts its status.

    The answer's headers carry the line's request id. The line holds the body only with `log_prompts`.
    """

    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics
        self._log_prompts = service.config.log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, then log its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, start = f"req_{uuid.uuid4().hex}", time.perf_counter()
        line: dict[str, Any] = {"request_id": request_id, "method": scope["method"], "path": scope["path"]}
        line["status"] = 500
        body = bytearray()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                line["first_byte_s"] = round(time.perf_counter() - start, 6)
                ids = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
                message = {**message, "headers": [*message.get("headers", []), *ids]}
            await send(message)

        async def read() -> Message:
            message = await receive()
            body.extend(message.get("body", b"") if message["type"] == "http.request" else b"")
            return message

        try:
            await self._app(scope, read if self._log_prompts else receive, noted)
        finally:
            line["seconds"] = round(time.perf_counter() - start, 6)
            if self._log_prompts:
                line["body"] = body.decode("utf-8", "replace")
            # Clients can make up any number of paths: all paths without a route are counted as "other".
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.on_response(path, line["status"])
            is_probe = path in _PROBED and line["status"] == 200
            logger.log(logging.DEBUG if is_probe else logging.INFO, "%s", json.dumps(line))
