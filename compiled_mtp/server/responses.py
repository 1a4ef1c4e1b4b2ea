"""OpenAI's /v1/responses: create an answer, continue a stored one, read it again, delete it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.request import SamplingParams
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import (
    Outputs,
    Service,
    check_limits,
    check_template_kwargs,
    make_params,
    parse,
)
from compiled_mtp.server.openai import arguments_of
from compiled_mtp.server.openai_models import COMMON_NAMES, ContentPart
from compiled_mtp.server.prompts import Prompt
from compiled_mtp.server.response_events import ResponseBuilder
from compiled_mtp.server.response_store import ResponseStore, StoredResponse
from compiled_mtp.server.responses_models import (
    AnyTool,
    CallItem,
    CallOutputItem,
    FunctionTool,
    Item,
    MessageItem,
    NamedFunction,
    NamespaceTool,
    RefusalPart,
    ResponsesBody,
    full_name,
)

# The engine's names of fields that this API names differently, with the API's names.
_SENT = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


class ResponsesHandlers:
    """The endpoints of /v1/responses over one service; they own the stored answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore(service.config.max_stored_bytes)

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        service = self._service
        body = parse(ResponsesBody, await request.body(), service.config)
        service.check_model(body.model)
        given = body.previous_response_id
        previous = None if given is None else self._find(given, "previous_response_id", 400)
        functions = functions_of(body.tools or ())
        schemas = service.callable_tools(
            {n: f.parameters or {} for n, f in functions.items()}, body.tool_choice
        )
        params = self._params(body)
        own = (
            [{"role": "user", "content": body.input}]
            if isinstance(body.input, str)
            else to_template(body.input)
        )
        earlier = [] if previous is None else previous.conversation()
        prompt = await self._render(body, [*earlier, *own], has_tools=schemas is not None)
        (stream,) = await service.start([prompt], params, body.priority, _SENT)
        end = None if service.reasoning is None else service.reasoning.end
        builder = ResponseBuilder(body, service.parser(prompt, schemas), len(prompt.token_ids), end)
        how = (builder, own, previous)
        events, whole = partial(self._events, *how), partial(self._whole, *how)
        return await service.respond(request, [stream], events, whole, is_stream=body.stream)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """GET /v1/responses/{response_id}: a stored answer."""
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(
                400, "stream must be false for a stored answer; read it as a whole", param="stream"
            )
        return JSONResponse(self._find(response_id).response)

    async def delete(self, response_id: str) -> Response:
        """DELETE /v1/responses/{response_id}; answers that continue it keep their conversation."""
        if not self._store.remove(response_id):
            raise _unknown(404, "response_id", response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _events(
        self,
        builder: ResponseBuilder,
        own: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
        outputs: Outputs,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is its last event."""
        for event in builder.begin():
            yield event
        try:
            async for _, output in outputs:
                for one in builder.take(output):
                    yield builder.encode(one)
        except ApiError as error:
            yield builder.fail(error)
            return
        self._keep(builder, own, previous)
        yield builder.end()

    async def _whole(
        self,
        builder: ResponseBuilder,
        own: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
        outputs: Outputs,
    ) -> dict[str, Any]:
        async for _, output in outputs:
            builder.take(output)
        return self._keep(builder, own, previous)

    def _keep(
        self, builder: ResponseBuilder, own: Sequence[Mapping[str, Any]], previous: StoredResponse | None
    ) -> dict[str, Any]:
        """Store a finished answer if its request allows; return it. Its `store` says whether it is kept."""
        if builder.is_stored:
            messages = [*own, builder.message()]
            builder.is_stored = self._store.add(builder.whole(), messages, previous)
        return builder.whole()

    def _find(self, response_id: str, param: str = "response_id", status: int = 404) -> StoredResponse:
        stored = self._store.find(response_id)
        if stored is None:
            raise _unknown(status, param, response_id)
        return stored

    def _params(self, body: ResponsesBody) -> SamplingParams:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        tools = _to_functions(body.tools or ()) or None
        choice = body.tool_choice if body.tool_choice not in ("auto", "none") else None
        # A forced call leaves no text that could have a format.
        form = None if choice is not None else _response_format(body)
        check_limits(self._service.config, stops, (), (), tools=tools, text=form)
        fields: dict[str, Any] = {name: getattr(body, name) for name in COMMON_NAMES}
        fields |= {
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_tokens": body.max_output_tokens,
            "stop": tuple(stops) or None,
            "response_format": form,
        }
        if choice is not None:
            # The prompt already lists the tools; the engine needs them only to force a call.
            fields["tools"] = tools
            if isinstance(choice, NamedFunction):
                fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            else:
                fields["tool_choice"] = choice
        return make_params(fields, _SENT)

    async def _render(
        self, body: ResponsesBody, messages: Sequence[Mapping[str, Any]], *, has_tools: bool
    ) -> Prompt:
        variables = check_template_kwargs(self._service.config, body.chat_template_kwargs)
        effort = None if body.reasoning is None else body.reasoning.effort
        if effort is not None and "enable_thinking" in variables:
            raise ApiError(
                400,
                "reasoning.effort must be left out with chat_template_kwargs.enable_thinking, got both; "
                "choose one",
                param="reasoning.effort",
            )
        if effort is not None:
            variables["enable_thinking"] = effort != "none"
        if has_tools:
            variables["tools"] = _to_functions(body.tools or ())
        return await self._service.render(with_instructions(body.instructions, messages), variables)


def to_template(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages of a chat template; items of one assistant turn become one message."""
    messages: list[dict[str, Any]] = []

    def assistant(*full: str) -> dict[str, Any]:
        """Return the assistant's last message, or a new one if one of the names in `full` is set in it."""
        last = messages[-1] if messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in full):
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        return last

    for index, item in enumerate(items):
        if isinstance(item, CallItem):
            arguments = arguments_of(item.arguments, f"input.{index}.arguments")
            function = {"name": full_name(item.namespace, item.name), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            content = _content_of(item.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, MessageItem) and item.role == "assistant":
            assistant("content", "tool_calls")["content"] = _text_of(item.content)
        elif isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            content = _content_of(item.content) if role == "user" else _text_of(item.content)
            messages.append({"role": role, "content": content})
        else:
            thought = "".join(part.text for part in item.content or item.summary or ())
            assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
    return messages


def with_instructions(
    instructions: str | None, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages with one system message at most at the beginning: templates take no second one."""
    texts = [] if instructions is None else [instructions]
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        texts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _text_of(content: str | Sequence[ContentPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.refusal if isinstance(part, RefusalPart) else part.text
        if text is None:
            raise ApiError(
                400, "input must have images in user turns and results only; move it", param="input"
            )
        texts.append(text)
    return "".join(texts)


def _content_of(content: str | Sequence[ContentPart | RefusalPart]) -> str | list[dict[str, Any]]:
    """Return the content of a turn that may have images: a text, or with images a list of parts."""
    if isinstance(content, str) or not any(isinstance(p, ContentPart) and p.is_image for p in content):
        return _text_of(content)
    return [
        part.to_template() if isinstance(part, ContentPart) else {"type": "text", "text": part.refusal}
        for part in content
    ]


def functions_of(tools: Sequence[AnyTool]) -> dict[str, FunctionTool]:
    """Return the functions that the model may call, by the names that it sees."""
    found = {}
    for tool in tools:
        if isinstance(tool, FunctionTool):
            found[tool.name] = tool
        elif isinstance(tool, NamespaceTool):
            found |= {full_name(tool.name, one.name): one for one in tool.tools}
    return found


def _to_functions(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """Return the functions in the form of chats, which chat templates and the engine read."""
    return [
        {
            "type": "function",
            "function": {"name": name}
            | ({"description": tool.description} if tool.description is not None else {})
            | ({"parameters": tool.parameters} if tool.parameters is not None else {}),
        }
        for name, tool in functions_of(tools).items()
    ]


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """Return the form of the text as OpenAI's response_format of chats, None for plain text."""
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": form.name or "answer", "schema": form.json_schema},
    }


def _unknown(status: int, param: str, response_id: str) -> ApiError:
    return ApiError(
        status,
        f"{param} must be a stored answer, got {response_id!r:.100}; send the whole conversation: the "
        "service keeps only the latest answers, in memory, and none with store false",
        param=param,
        code="previous_response_not_found" if status == 400 else "response_not_found",
    )
