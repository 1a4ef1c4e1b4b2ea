"""What both APIs share: checking a request against the limits, decoding its choices, counting their usage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.frontend.reasoning import ReasoningTokens
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.sampling.parameter_checks import MAX_BAD_WORDS, REFUSED
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.errors import ApiError, param_of, refusal
from compiled_mtp.server.fields import UNKNOWN_FIELD, UNREAD_FIELD
from compiled_mtp.server.media import MediaLoader
from compiled_mtp.server.metrics import Metrics
from compiled_mtp.server.prompts import Prompt, PromptPool
from compiled_mtp.server.sse import EventStream, unless_gone
from compiled_mtp.server.tool_calls import CallForm, OutputParser
from compiled_mtp.streams.status import EngineStoppedError, QueueFullError, SlowReaderError, Status
from compiled_mtp.streams.stream import Stream

_BLOCK_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
B = TypeVar("B", bound=BaseModel)
Outputs: TypeAlias = AsyncIterator[tuple[int, RequestOutput]]
"""Outputs of all choices of one API request, each with the number of its choice."""


class ServedEngine(Protocol):
    """What the service needs of an engine: an AsyncEngine, or replicas in other processes.

    The code that creates the engine closes it.
    """

    @property
    def status(self) -> Status: ...

    @property
    def num_open(self) -> int: ...

    async def add_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Stream]: ...

    async def drain(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """What the handlers share: the engine, the prompt pool, the loader of images, and the model's properties.

    names[0] is the model's own name, the others are aliases. call_form None: the chat template takes no
    tools.
    """

    engine: ServedEngine
    prompts: PromptPool
    media: MediaLoader
    tokenizer: Tokenizer
    config: ServerConfig
    names: tuple[str, ...]
    max_model_len: int
    max_images: int
    call_form: CallForm | None
    reasoning: ReasoningTokens | None
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str) -> None:
        """Raise the 404 of a model that is not served."""
        if name not in self.names:
            raise ApiError(
                404,
                f"model must be one of {list(self.names)}, got {name!r}; GET /v1/models lists them",
                param="model",
                code="model_not_found",
            )

    def parser(self, prompt: Prompt, tools: Mapping[str, Mapping[str, Any]] | None) -> OutputParser:
        """Return a parser for an answer to `prompt`; tools None: it does not look for calls."""
        return OutputParser(
            form=self.call_form if tools is not None else None,
            has_reasoning=self.reasoning is not None,
            is_thinking=self.reasoning is not None and self.reasoning.is_open(prompt.token_ids),
            tools=tools,
        )

    def callable_tools(self, schemas: Mapping[str, Any], choice: Any) -> Mapping[str, Any] | None:
        """Return the schemas of tools by name if tool_choice lets them be called, else None.

        Raises the 400 of tools for a chat template that takes none, and of a choice that needs tools.
        """
        if schemas and choice != "none":
            if self.call_form is None:
                raise ApiError(
                    400,
                    "tools must be left out, got some; the checkpoint's chat template takes no tools",
                    param="tools",
                )
            return schemas
        if choice not in (None, "none", "auto"):
            raise ApiError(
                400, "tool_choice must be auto or none without tools; add tools", param="tool_choice"
            )
        return None

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
        """Return a chat's token ids and images; `variables` go to its template. Raises ApiError."""
        return await self.prompts.render(await self.media.load(messages), variables)

    async def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        priority: int | None = None,
        sent: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Stream]:
        """Add one request per prompt, or none if one is refused; return their streams.

        Without max_tokens an output may fill what the longest prompt leaves. sent: as in `make_params`.
        Raises ApiError for a refusal.
        """
        count = len(prompts) * params.n
        if count > self.config.max_choices:
            raise ApiError(
                400,
                f"n must be at most {self.config.max_choices} over all prompts, got {count}; ask for fewer",
                param="n",
            )
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest >= self.max_model_len:
            # Checked here too: the time of the engine's own check grows with the prompt's length.
            raise ApiError(
                400,
                f"prompt must be shorter than max_model_len ({self.max_model_len} tokens), got {longest}; "
                "shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        if "max_tokens" not in params.model_fields_set:
            params = params.model_copy(update={"max_tokens": self.max_model_len - longest})
        try:
            return await self.engine.add_all(
                [
                    {"prompt_token_ids": prompt.token_ids, "params": params, "priority": priority or 0}
                    | ({"images": prompt.images} if prompt.images else {})
                    for prompt in prompts
                ]
            )
        except (RuntimeError, ValueError) as error:
            raise _as_sent(refusal(error), sent) from None

    async def respond(
        self,
        request: Request,
        streams: Sequence[Stream],
        events: Callable[[Outputs], AsyncIterator[bytes]],
        whole: Callable[[Outputs], Coroutine[Any, Any, dict[str, Any]]],
        *,
        is_stream: bool | None,
        ping: bytes = b"",
        ping_s: float | None = None,
    ) -> Response:
        """Answer with the `events` of the streams' outputs, or with the object that `whole` makes of them.

        Aborts the engine's requests when the client goes away. ping, ping_s: as of `EventStream`.
        """

        def abort() -> None:
            for stream in streams:
                stream.abort()

        outputs = merged(streams)
        if is_stream:
            return EventStream(events(outputs), self.config.write_timeout_s, abort, ping, ping_s)
        try:
            return JSONResponse(await unless_gone(request, whole(outputs)))
        finally:
            abort()


def parse(model: type[B], body: bytes, config: ServerConfig) -> B:
    """Return the body as `model`.

    Raises ApiError (400) that names one wrong field; with `strict_fields` also for a field that is not read.
    """
    try:
        return model.model_validate_json(body, context={"strict_fields": config.strict_fields})
    except ValidationError as error:
        # A union reports errors of all its alternatives: the deepest error belongs to the best match.
        problem = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
    path = _path_of(problem["loc"])
    if problem["type"] == UNKNOWN_FIELD:
        path.append(problem["ctx"]["name"])
    param = ".".join(path) or None
    if problem["type"] == UNKNOWN_FIELD:
        message = f"{param} must be a field of this request, got an unknown name; "
        message += REFUSED.get(path[-1], "leave it out")
    elif problem["type"] == UNREAD_FIELD:
        context = problem["ctx"]
        message = f"{param} must {context['rule']}, got {problem['input']!r:.200}; {context['remedy']}"
    elif problem["type"] == "missing":
        remedy = "GET /v1/models lists the names" if param == "model" else "add it"
        message = f"{param} must be given, got nothing; {remedy}"
    else:
        rule = problem["msg"].replace("Input should", "must", 1)
        got = "" if param is None else f", got {problem['input']!r:.200}"
        message = (
            f"{param or 'the body'} {rule if rule.startswith('must') else f'must be valid: {rule}'}{got}"
        )
        message += "; correct it"
    raise ApiError(400, message, param=param)


def _path_of(loc: Sequence[str | int]) -> list[str]:
    """Return the field names and indices in pydantic's `loc`, without the names of a union's alternatives."""
    path: list[str] = []
    for before, part in zip((None, *loc), loc, strict=False):
        is_block_type = isinstance(before, int) and isinstance(part, str)
        is_alternative = isinstance(part, str) and (part in ("str", "int") or "[" in part)
        if not is_alternative and not (is_block_type and part in _BLOCK_TYPES):
            path.append(str(part))
    return path


def make_params(fields: Mapping[str, Any], sent: Mapping[str, str] | None = None) -> SamplingParams:
    """Return SamplingParams of the fields that are not None.

    sent: the engine's names of fields that the client named differently, with the client's names. Raises
    ApiError (400) for a value that the engine refuses.
    """
    try:
        return SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise _as_sent(refusal(error), sent or {}) from None


def _as_sent(error: ApiError, sent: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return `error` with the client's name of the field to blame."""
    if error.param == "prompt_token_ids":
        error.param = "prompt"
        return error
    for name, own in sent.items():
        if error.param is not None and f"{error.param}.".startswith(f"{name}."):
            message = own + error.message.removeprefix(name)
            param = own + error.param.removeprefix(name)
            return ApiError(error.status, message, param=param, code=error.code)
    return error


def check_limits(
    config: ServerConfig,
    stops: Sequence[str],
    bias: Iterable[Any],
    stop_ids: Sequence[int],
    bad_words: Sequence[str] = (),
    stop_name: str = "stop",
    **schemas: Any,
) -> None:
    """Raise ApiError (400) for the first field above its limit; `schemas` are measured in bytes of JSON."""
    bias_count = sum(1 for _ in bias)
    rules = [
        (stop_name, len(stops), config.max_stops, "strings"),
        (stop_name, max(map(len, stops), default=0), config.max_stop_chars, "characters in each"),
        ("bad_words", len(bad_words), MAX_BAD_WORDS, "strings"),
        ("bad_words", max(map(len, bad_words), default=0), config.max_stop_chars, "characters in each"),
        ("logit_bias", bias_count, config.max_bias, "ids"),
        ("stop_token_ids", len(stop_ids), config.max_bias, "ids"),
    ]
    for name, schema in schemas.items():
        size = 0 if schema is None else len(json.dumps(schema).encode())
        most = config.max_tools_bytes if name == "tools" else config.max_schema_bytes
        rules.append((name, size, most, "bytes"))
    for name, got, most, unit in rules:
        if got > most:
            raise ApiError(400, f"{name} must have at most {most} {unit}, got {got}; send fewer", param=name)


def check_template_kwargs(config: ServerConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables for the chat template.

    Raises ApiError (400) for a name that is not allowed and for a value that is not a plain one.
    """
    for name, value in (given or {}).items():
        param = f"chat_template_kwargs.{name}"
        if name not in config.template_kwargs:
            known = list(config.template_kwargs)
            raise ApiError(
                400, f"{param} must be one of {known}, got an unknown name; leave it out", param=param
            )
        if not isinstance(value, bool | str | int | float):
            raise ApiError(
                400, f"{param} must be a plain value, got {value!r:.100}; simplify it", param=param
            )
    return dict(given or {})


async def merged(streams: Sequence[Stream]) -> Outputs:
    """Yield (choice, output) of all streams as outputs come; leaving early aborts all streams.

    Choices are numbered through, beginning with the choices of the first stream. Raises ApiError when a
    choice ends for another reason than `stop` or `length`, after its tokens.
    """
    try:
        if len(streams) == 1:
            async for output in streams[0]:
                for one in _delivered(output):
                    yield output.index, one
            return
        found: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)
        readers = [asyncio.create_task(_read(index, s, found)) for index, s in enumerate(streams)]
        try:
            num_left = len(readers)
            while num_left:
                item = await found.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    for one in _delivered(item[1]):
                        yield item[0], one
        finally:
            for reader in readers:
                reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*readers, return_exceptions=True)
    except SlowReaderError as error:
        raise ApiError(408, str(error), code="slow_reader") from None
    except (EngineStoppedError, QueueFullError, ValueError) as error:
        # The answer may have begun: its writer then sends the ApiError as an event.
        raise _as_sent(refusal(error)) from None
    finally:
        for stream in streams:
            stream.abort()


async def _read(index: int, stream: Stream, found: asyncio.Queue[Any]) -> None:
    try:
        async for output in stream:
            await found.put((index * stream.num_choices + output.index, output))
        await found.put(None)
    except Exception as error:
        await found.put(error)


def _delivered(output: RequestOutput) -> Iterator[RequestOutput]:
    """Yield an output. One that ends a choice with an error gives its tokens first, then the ApiError.

    A round may draw tokens before the one that it cannot draw; without drafts an earlier output has them.
    """
    error = _error_of(output)
    if error is None:
        yield output
        return
    if output.new_token_ids or output.new_text:
        yield output._replace(finish_reason=None, error=None, error_kind=None)
    raise error


def _error_of(output: RequestOutput) -> ApiError | None:
    """Return the error of an output that ends a choice for another reason than `stop` or `length`."""
    if output.finish_reason == "error" and output.error_kind == "parameters":
        error = output.error or "the request's parameters must leave a token to draw"
        return ApiError(400, error, param=param_of(error), code="parameters_failed")
    if output.finish_reason == "error":
        return ApiError(500, f"the request failed: {output.error}", code="engine_error")
    if output.finish_reason == "abort":
        return ApiError(503, output.error or "the request was aborted", code="aborted")
    return None


@dataclass
class Usage:
    """Sums over the choices of one API request; each prompt counts once.

    drafted, accepted: of all drafts; lookup_drafted, lookup_accepted: of those that were looked up in the
    text.
    """

    prompt_tokens: int
    output_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    # By engine request; each has one prompt.
    _cached: dict[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(self._cached.values())

    def add(self, output: RequestOutput) -> None:
        """Count a choice's last output."""
        metrics = output.metrics
        self.output_tokens += metrics.output_tokens
        known = self._cached.get(output.request_id, 0)
        self._cached[output.request_id] = max(known, metrics.cached_tokens)
        self.rounds += metrics.rounds
        self.drafted += metrics.drafted
        self.accepted += metrics.accepted
        self.lookup_drafted += metrics.lookup_drafted
        self.lookup_accepted += metrics.lookup_accepted

    def to_openai(self) -> dict[str, Any]:
        """Return OpenAI's usage object with `speculation` added."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "speculation": {
                "rounds": self.rounds,
                "drafted_tokens": self.drafted,
                "accepted_tokens": self.accepted,
                "lookup_drafted_tokens": self.lookup_drafted,
                "lookup_accepted_tokens": self.lookup_accepted,
            },
        }


class RoundCounter:
    """Counts the drafts of the rounds between two outputs of one choice, and how many were accepted."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted = 0

    def take(self, output: RequestOutput) -> dict[str, int]:
        """Return the counts since the last call."""
        metrics = output.metrics
        drafted, accepted = metrics.drafted, metrics.accepted
        new = {"drafted": drafted - self._drafted, "accepted": accepted - self._accepted}
        self._drafted, self._accepted = drafted, accepted
        return new
