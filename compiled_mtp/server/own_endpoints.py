"""The service's own endpoints, which no API describes; and those of OpenAI's API that it refuses by name."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import compiled_mtp
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import Service, parse
from compiled_mtp.server.openai_models import DetokenizeBody


class OwnHandlers:
    """Health, metrics, version and detokenize over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self) -> Response:
        """GET /health: 200 while the engine steps, else 503."""
        status = self._service.engine.status
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    async def metrics(self) -> Response:
        """GET /metrics: Prometheus' text form."""
        return PlainTextResponse(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self) -> Response:
        """GET /version: the package's version."""
        return JSONResponse({"version": compiled_mtp.__version__})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, without special tokens."""
        service = self._service
        body = parse(DetokenizeBody, await request.body(), service.config)
        if body.model is not None:
            service.check_model(body.model)
        most, num_ids = service.max_model_len, service.tokenizer.num_ids
        if len(body.tokens) > most:
            got = len(body.tokens)
            raise ApiError(
                400, f"tokens must be at most {most}, got {got}; send fewer at a time", param="tokens"
            )
        wrong = next((one for one in body.tokens if not 0 <= one < num_ids), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"tokens must lie in 0..{num_ids - 1}, got {wrong}; send ids of this model's tokenizer",
                param="tokens",
            )
        return JSONResponse({"prompt": service.tokenizer.decode(body.tokens)})

    async def embeddings(self) -> Response:
        """POST /v1/embeddings: refuse it by name."""
        raise ApiError(
            404,
            "/v1/embeddings must not be called: this service generates text and has no embeddings; serve an "
            "embedding model for them",
            code="unsupported_endpoint",
        )
