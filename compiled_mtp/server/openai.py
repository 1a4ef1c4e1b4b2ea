"""OpenAI's API: completions, chat completions and models, and the service's own /tokenize."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.frontend.tokenizer import json_object
from compiled_mtp.request import SamplingParams
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import (
    Service,
    Usage,
    check_limits,
    check_template_kwargs,
    make_params,
    parse,
)
from compiled_mtp.server.openai_answers import Answer, Choice
from compiled_mtp.server.openai_models import (
    SAME_NAMES,
    ChatBody,
    CompletionBody,
    Message,
    SamplingBody,
    TokenizeBody,
    Tool,
)
from compiled_mtp.server.prompts import Prompt
from compiled_mtp.server.tool_calls import OutputParser

# OpenAI's default max_tokens of completions; a chat's default is the room left in the context.
DEFAULT_COMPLETION_TOKENS = 16


class OpenAIHandlers:
    """The endpoints of OpenAI's API over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self) -> Response:
        """GET /v1/models: one entry for each name of the model."""
        service = self._service
        entries = [
            {
                "id": name,
                "object": "model",
                "created": service.created,
                "owned_by": "compiled-mtp",
                "root": service.names[0],
                "max_model_len": service.max_model_len,
                "max_images": service.max_images,
            }
            for name in service.names
        ]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}: the entry of one name."""
        self._service.check_model(name)
        entry = {"id": name, "object": "model", "created": self._service.created, "owned_by": "compiled-mtp"}
        return JSONResponse(entry)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the token ids of a text or of a rendered chat."""
        body = parse(TokenizeBody, await request.body(), self._service.config)
        if body.model is not None:
            self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(
                400, "prompt or messages must be given, got both or none; give one of them", param="prompt"
            )
        check_limits(self._service.config, (), (), (), tools=_dumped(body.tools))
        if body.prompt is not None:
            prompt = await self._service.prompts.encode(body.prompt)
        else:
            prompt = await self._render(body.messages or [], body.tools, body.chat_template_kwargs)
        ids = prompt.token_ids
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._service.max_model_len})

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = parse(CompletionBody, await request.body(), self._service.config)
        self._service.check_model(body.model)
        fields: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
        if body.has_echoed_logprobs:
            # The log probabilities of the prompt come from prefill: its tokens are not decoded.
            fields["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
        if body.wants_no_output:
            fields["max_tokens"] = 1
        params = self._params(body, **fields)
        given = _prompts_of(body.prompt, self._service)
        prompts = [await self._encode(one) for one in given]
        streams = await self._service.start(prompts, params, body.priority)
        choices = [
            Choice(number * params.n + index, OutputParser(), prompt.token_ids)
            for number, prompt in enumerate(prompts)
            for index in range(params.n)
        ]
        if body.echo:
            for choice in choices:
                one = given[choice.index // params.n]
                choice.prompt_text = one if isinstance(one, str) else self._service.tokenizer.decode(one)
        usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        answer = Answer(body, "cmpl", "text_completion", usage, choices, self._service)
        how = (answer.events, answer.whole)
        return await self._service.respond(request, streams, *how, is_stream=body.stream)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, await request.body(), self._service.config)
        self._service.check_model(body.model)
        functions = [tool.function for tool in body.tools or ()]
        schemas = self._service.callable_tools(
            {f.name: f.parameters or {} for f in functions}, body.tool_choice
        )
        params = self._chat_params(body)
        prompt = await self._render(
            body.messages, body.tools if schemas is not None else None, body.chat_template_kwargs
        )
        streams = await self._service.start([prompt], params, body.priority)
        parsers = [self._service.parser(prompt, schemas) for _ in range(params.n)]
        choices = [Choice(i, parser, prompt.token_ids) for i, parser in enumerate(parsers)]
        usage = Usage(len(prompt.token_ids))
        answer = Answer(body, "chatcmpl", "chat.completion", usage, choices, self._service)
        how = (answer.events, answer.whole)
        return await self._service.respond(request, streams, *how, is_stream=body.stream)

    async def _encode(self, prompt: str | list[int]) -> Prompt:
        return await self._service.prompts.encode(prompt) if isinstance(prompt, str) else Prompt(prompt)

    async def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
    ) -> Prompt:
        variables = check_template_kwargs(self._service.config, kwargs)
        if tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        return await self._service.render(to_template(messages), variables)

    def _chat_params(self, body: ChatBody) -> SamplingParams:
        if body.top_logprobs and not body.logprobs:
            problem = (
                f"top_logprobs must come with logprobs true, got {body.top_logprobs} alone; set logprobs"
            )
            raise ApiError(400, problem, param="top_logprobs")
        fields: dict[str, Any] = {}
        given = [name for name in ("max_tokens", "max_completion_tokens") if getattr(body, name) is not None]
        if len(given) > 1 and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, f"max_tokens must be given once, got {given}; choose one", param="max_tokens")
        # SamplingParams checks the values; its error texts go to the client. The prompt already lists the
        # tools; the engine needs them only to force a call.
        forced = body.tool_choice if body.tool_choice not in ("auto", "none") else None
        tools = _dumped(body.tools)
        if forced is not None:
            # A forced call leaves no text that could have a format.
            fields |= {"tools": tools, "response_format": None}
        return self._params(
            body,
            shown_tools=tools,
            sent={"logprobs": "top_logprobs"} | ({"max_tokens": given[0]} if given else {}),
            max_tokens=getattr(body, given[0]) if given else None,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            tool_choice=forced if isinstance(forced, str | None) else forced.model_dump(),
            parallel_tool_calls=body.parallel_tool_calls,
            **fields,
        )

    def _params(
        self,
        body: SamplingBody,
        shown_tools: Sequence[Any] | None = None,
        sent: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> SamplingParams:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        bias, stop_ids = body.logit_bias or {}, body.stop_token_ids or []
        check_limits(
            self._service.config,
            stops,
            bias,
            stop_ids,
            body.bad_words or (),
            response_format=body.response_format,
            guided_regex=body.guided_regex,
            guided_choice=body.guided_choice,
            guided_grammar=body.guided_grammar,
            tools=shown_tools or None,
        )
        for name in ("prompt_logprobs", "echo", "return_routed_experts") if body.stream else ():
            if (value := getattr(body, name)) not in (None, False):
                raise ApiError(
                    400,
                    f"{name} must be left out of a stream, got {value}; ask for the answer as a whole",
                    param=name,
                )
        form = body.response_format
        if body.max_tokens is None and isinstance(body, CompletionBody):
            fields["max_tokens"] = DEFAULT_COMPLETION_TOKENS
        return make_params(
            {name: getattr(body, name) for name in SAME_NAMES}
            | {
                "stop": tuple(stops) or None,
                "stop_token_ids": tuple(stop_ids) or None,
                "logit_bias": bias or None,
                "response_format": None if form == {"type": "text"} else form,
            }
            | fields,
            sent,
        )


def to_template(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: call arguments as objects, `developer` as `system`."""
    plain = []
    for index, message in enumerate(messages):
        fields = message.model_dump(
            exclude_none=True, exclude={"annotations", "cache_control", "id", "reasoning"}
        )
        if message.reasoning is not None:
            fields.setdefault("reasoning_content", message.reasoning)
        if isinstance(message.content, list):
            fields["content"] = [part.to_template() for part in message.content]
        fields["role"] = "system" if message.role == "developer" else message.role
        if message.tool_calls is not None:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(
                            call.function.arguments, f"messages.{index}.tool_calls.{i}.function.arguments"
                        ),
                    },
                }
                for i, call in enumerate(message.tool_calls)
            ]
        plain.append(fields)
    return plain


def _dumped(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump() for tool in tools] if tools else None


def arguments_of(arguments: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Raises ApiError (400) that names `param`."""
    if isinstance(arguments, dict):
        return arguments
    found = json_object(arguments or "{}")
    if found is None:
        raise ApiError(
            400, f"{param} must be the text of a JSON object, got {arguments!r:.100}; correct it", param=param
        )
    return found


def _prompts_of(
    prompt: str | list[str] | list[int] | list[list[int]], service: Service
) -> list[str | list[int]]:
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts: Any = [prompt] if is_one else prompt
    most = service.config.max_choices
    if not 1 <= len(prompts) <= most:
        raise ApiError(
            400, f"prompt must be 1 to {most} prompts, got {len(prompts)}; split the request", param="prompt"
        )
    return list(prompts)
