"""Anthropic's API: messages and count_tokens, as coding agents use them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.fields import Body, Ignored, Unread
from compiled_mtp.server.generation import Service, Usage, check_limits, make_params, merged, parse
from compiled_mtp.server.openai_models import CacheSalt, Priority
from compiled_mtp.server.prompts import Prompt
from compiled_mtp.server.sse import EventStream, unless_gone
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning

_PING_S = 10.0
# The engine's names of fields that this API names differently, with the API's names.
_SENT = {"stop": "stop_sequences", "response_format.json_schema": "output_config.format"}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class TextBlock(Body):
    """Text, in a message or as a part of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class Base64Source(Body):
    """The bytes of an image's file, in base64."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Body):
    """The address of an image, if the operator allows it."""

    type: Literal["url"]
    url: str


class ImageBlock(Body):
    """An image of the user, or of a tool's result."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Ignored = None

    def to_template(self) -> dict[str, Any]:
        """Return the image as chat templates read it."""
        source = self.source
        url = source.url if isinstance(source, UrlSource) else f"data:image/*;base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ThinkingBlock(Body):
    """Reasoning of the assistant; signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    """A tool that the model may call; input_schema is a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: Ignored = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Annotated[Any, Unread((False,))] = None
    input_examples: Annotated[Any, Unread(([],))] = None
    allowed_callers: Annotated[Any, Unread((["direct"],))] = None


class ToolChoice(Body):
    """Whether the model may, must or must not call a tool, and which one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers; budget_tokens and display have no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The answer's form; effort has no effect."""

    format: OutputFormat | None = None
    effort: Ignored = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    speed: Annotated[Any, Unread(("standard",))] = None
    mcp_servers: Annotated[Any, Unread(([],))] = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    metadata: Ignored = None
    service_tier: Ignored = None
    diagnostics: Ignored = None


class AnthropicHandlers:
    """The endpoints of Anthropic's API over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = parse(CountBody, await request.body(), self._service.config)
        self._service.check_model(body.model)
        self._schemas(body)
        prompt = await self._render(body)
        return JSONResponse({"input_tokens": len(prompt.token_ids)})

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        service = self._service
        body = parse(MessagesBody, await request.body(), service.config)
        service.check_model(body.model)
        schemas, params = self._schemas(body), self._params(body)
        prompt = await self._render(body)
        (stream,) = await service.start([prompt], params, body.priority, _SENT)
        answer = _Answer(body, service.parser(prompt, schemas), len(prompt.token_ids))
        if body.stream:
            events = answer.events(merged([stream]))
            write_timeout_s = service.config.write_timeout_s
            return EventStream(events, write_timeout_s, stream.abort, _event("ping"), _PING_S)
        try:
            return JSONResponse(await unless_gone(request, answer.whole(merged([stream]))))
        finally:
            stream.abort()

    def _schemas(self, body: CountBody) -> dict[str, Any] | None:
        """Return the schemas of the tools that may be called, by name; None if no tool may be called."""
        check_limits(
            self._service.config,
            (),
            (),
            (),
            tools=[t.model_dump() for t in body.tools] if body.tools else None,
        )
        if not body.tools or (body.tool_choice is not None and body.tool_choice.type == "none"):
            return None
        self._service.check_call_form()
        return {tool.name: tool.input_schema for tool in body.tools}

    def _params(self, body: MessagesBody) -> SamplingParams:
        stops = body.stop_sequences or []
        form = _response_format(body.output_config)
        check_limits(self._service.config, stops, (), (), stop_name="stop_sequences", output_config=form)
        forced = _forced_choice(body.tool_choice)
        if forced is not None and form is not None:
            raise ApiError(
                400,
                "output_config.format must be left out where tool_choice forces a call, got both; choose one",
                param="output_config.format",
            )
        if forced is not None and not body.tools:
            raise ApiError(
                400, "tool_choice must be auto or none without tools; add tools", param="tool_choice"
            )
        fields = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": tuple(stops) or None,
            "cache_salt": body.cache_salt,
            # The answer names the stop string that ended it: `_take` finds it at the text's end and cuts it.
            "include_stop": True if stops else None,
            "tool_choice": forced,
            "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            "response_format": form,
            # The prompt already lists the tools; the engine needs them only to force a call.
            "tools": [_to_function(tool) for tool in body.tools or ()] if forced is not None else None,
        }
        return make_params(fields, _SENT)

    async def _render(self, body: CountBody) -> Prompt:
        variables: dict[str, Any] = {
            "enable_thinking": body.thinking is not None and body.thinking.type != "disabled"
        }
        has_tools = body.tools and (body.tool_choice is None or body.tool_choice.type != "none")
        if has_tools:
            variables["tools"] = [_to_function(tool) for tool in body.tools or ()]
        return await self._service.render(to_template(body), variables)


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    """Return the answer's schema as OpenAI's response_format, None if it has none."""
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": config.format.json_schema}}


def _forced_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Return OpenAI's form of a choice that forces a call, None for a choice that does not."""
    if choice is None or choice.type in ("auto", "none"):
        return None
    return "required" if choice.type == "any" else {"type": "function", "function": {"name": choice.name}}


class _Answer:
    """One message, whole or as events. A delta of another kind than the last block's opens a new block."""

    def __init__(self, body: MessagesBody, parser: OutputParser, num_prompt: int) -> None:
        self._parser = parser
        self._stops = body.stop_sequences or []
        self._usage = Usage(num_prompt)
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._blocks: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }

    async def whole(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Read all outputs; return the message."""
        async for _, output in outputs:
            for delta in self._take(output):
                self._add(delta)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _input_of(block.pop("json"))
        return self._head | {
            "content": self._blocks,
            "stop_reason": self._stop[0],
            "stop_sequence": self._stop[1],
            "usage": self._usage_fields(),
        }

    async def events(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is its last event."""
        # Clients update only the counts that they know from message_delta: `speculation`, sent here as zeros,
        # would stay 0 in the message that they build.
        usage = {k: v for k, v in self._usage_fields().items() if k != "speculation"} | {"output_tokens": 0}
        start = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        yield _event("ping")
        try:
            async for _, output in outputs:
                for delta in self._take(output):
                    for event in self._add(delta):
                        yield event
        except ApiError as error:
            yield _event("error", error=error.body("anthropic")["error"])
            return
        if self._blocks:
            yield _event("content_block_stop", index=len(self._blocks) - 1)
        stop = {"stop_reason": self._stop[0], "stop_sequence": self._stop[1]}
        yield _event("message_delta", delta=stop, usage=self._usage_fields())
        yield _event("message_stop")

    def _take(self, output: RequestOutput) -> list[Delta]:
        text, is_last = output.new_text, output.finish_reason is not None
        if is_last:
            self._usage.add(output)
            # If several stop strings end here, the engine has matched the longest.
            found = max((s for s in self._stops if text.endswith(s)), key=len, default=None)
            if output.finish_reason == "stop" and found is not None:
                text = text.removesuffix(found)
                self._stop = ("stop_sequence", found)
            else:
                self._stop = (_REASONS[str(output.finish_reason)], None)
        deltas = self._parser.add(text, is_last)
        if is_last and self._stop[0] == "end_turn" and self._parser.num_calls:
            self._stop = ("tool_use", None)
        return deltas

    def _add(self, delta: Delta) -> list[bytes]:
        """Add `delta` to the last block or to a new one; return the stream's events for it."""
        events = []
        kind, name, event_type = _KINDS[type(delta)]
        last = self._blocks[-1] if self._blocks else None
        if isinstance(delta, CallStart) or last is None or last["type"] != kind:
            if last is not None:
                events.append(_event("content_block_stop", index=len(self._blocks) - 1))
            shown = _new_block(delta)
            self._blocks.append(dict(shown) | ({"json": ""} if kind == "tool_use" else {}))
            events.append(_event("content_block_start", index=len(self._blocks) - 1, content_block=shown))
        if not isinstance(delta, CallStart):
            self._blocks[-1]["json" if kind == "tool_use" else kind] += delta.text
            said = {"type": event_type, name: delta.text}
            events.append(_event("content_block_delta", index=len(self._blocks) - 1, delta=said))
        return events

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "speculation": usage.to_openai()["speculation"],
        }


# Type of the block, name of the field in a delta, type of the delta.
_KINDS: Mapping[type, tuple[str, str, str]] = {
    Content: ("text", "text", "text_delta"),
    Reasoning: ("thinking", "thinking", "thinking_delta"),
    CallStart: ("tool_use", "partial_json", "input_json_delta"),
    CallArguments: ("tool_use", "partial_json", "input_json_delta"),
}


def to_template(body: CountBody) -> list[dict[str, Any]]:
    """Return the turns as chat templates read them: each tool result is its own message of role `tool`."""
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _text_of(body.system)})
    for message in body.messages:
        if isinstance(message.content, str):
            plain.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            plain.append(_assistant(message.content))
        else:
            plain += _user(message.role, message.content)
    return plain


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return (
        message
        | ({"reasoning_content": thought} if thought else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _user(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = _content_of(block.content or "")
            found.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
        elif isinstance(block, (TextBlock, ImageBlock)):
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": ""})
            found[-1]["content"] = _with_block(found[-1]["content"], block)
        else:
            raise ApiError(
                400, f"messages must have {block.type} in assistant turns only; move it", param="messages"
            )
    return found


def _with_block(content: Any, block: TextBlock | ImageBlock) -> Any:
    """Return a message's content, a text or a list of parts, with one block more; images make it a list."""
    if isinstance(block, TextBlock) and isinstance(content, str):
        return content + block.text
    before = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    part = {"type": "text", "text": block.text} if isinstance(block, TextBlock) else block.to_template()
    return [*before, part]


def _content_of(content: str | Sequence[TextBlock | ImageBlock]) -> Any:
    """Return a tool's result: a text, or with images a list of parts."""
    if isinstance(content, str) or all(isinstance(block, TextBlock) for block in content):
        return _text_of(content)  # type: ignore[arg-type]
    parts: Any = ""
    for block in content:
        parts = _with_block(parts, block)
    return parts


def _text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _to_function(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _new_block(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, CallStart):
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": delta.name, "input": {}}
    if isinstance(delta, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input_of(text: str) -> dict[str, Any]:
    """Return a call's arguments: text that is not valid JSON as `incomplete`, JSON that is no object as
    `value`.
    """
    try:
        found = json.loads(text)
        # An answer can hold neither infinite numbers (1e999) nor lone surrogates.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {"incomplete": text}
    return found if isinstance(found, dict) else {"value": found}


def _event(kind: str, **fields: Any) -> bytes:
    body = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()
