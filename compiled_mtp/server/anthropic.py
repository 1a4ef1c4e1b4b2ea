"""Anthropic's API: messages and count_tokens, as coding agents use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.request import SamplingParams
from compiled_mtp.server.anthropic_answers import Answer, make_event
from compiled_mtp.server.anthropic_models import (
    AnthropicTool,
    CountBody,
    ImageBlock,
    MessagesBody,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import Service, check_limits, make_params, parse
from compiled_mtp.server.prompts import Prompt

_PING_S = 10.0
# The engine's names of fields that this API names differently, with the API's names.
_SENT = {"stop": "stop_sequences", "response_format.json_schema": "output_config.format"}


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
        answer = Answer(body, service.parser(prompt, schemas), len(prompt.token_ids))
        return await service.respond(
            request,
            [stream],
            answer.events,
            answer.whole,
            is_stream=body.stream,
            ping=make_event("ping"),
            ping_s=_PING_S,
        )

    def _schemas(self, body: CountBody) -> Mapping[str, Any] | None:
        """Return the schemas of the tools that may be called, by name; None if no tool may be called."""
        tools = [tool.model_dump() for tool in body.tools] if body.tools else None
        check_limits(self._service.config, (), (), (), tools=tools)
        schemas = {tool.name: tool.input_schema for tool in _callable_tools(body)}
        return self._service.callable_tools(schemas, None)

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
            # The answer names the stop string that ended it: `Answer` finds it at the text's end and cuts it.
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
        if tools := _callable_tools(body):
            variables["tools"] = [_to_function(tool) for tool in tools]
        return await self._service.render(_to_template(body), variables)


def _callable_tools(body: CountBody) -> list[AnthropicTool]:
    is_none = body.tool_choice is not None and body.tool_choice.type == "none"
    return [] if is_none else body.tools or []


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


def _to_template(body: CountBody) -> list[dict[str, Any]]:
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
    if isinstance(content, str):
        return content
    texts = [block for block in content if isinstance(block, TextBlock)]
    if len(texts) == len(content):
        return _text_of(texts)
    parts: Any = ""
    for block in content:
        parts = _with_block(parts, block)
    return parts


def _text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _to_function(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
