"""OpenAI's API: completions, chat completions and models, and the service's own /tokenize."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compiled_mtp.request import RequestOutput, RoundDrafts, RoutedExperts, SamplingParams
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.server import logprob_fields
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import (
    RoundCounter,
    Service,
    Usage,
    check_limits,
    check_template_kwargs,
    make_params,
    merged,
    parse,
)
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
from compiled_mtp.server.rounds import round_fields
from compiled_mtp.server.sse import EventStream, unless_gone
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning
from compiled_mtp.streams.stream import Stream

# OpenAI's default max_tokens of completions; a chat's default is the room left in the context.
DEFAULT_COMPLETION_TOKENS = 16


@dataclass
class _Choice:
    """One choice while it is decoded, with its answer so far."""

    index: int
    parser: OutputParser
    prompt_ids: Sequence[int]
    rounds: RoundCounter = field(default_factory=RoundCounter)
    prompt_text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Where the text of a stream's next logprobs entry begins, in characters of the choice's text.
    offset: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    drafts: list[RoundDrafts] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    finish_reason: str | None = None

    def part(self, output: RequestOutput) -> list[Delta]:
        """Return the deltas of one output; store only its finish reason."""
        reason = output.finish_reason
        deltas = self.parser.add(output.new_text, reason is not None)
        if reason is not None:
            self.finish_reason = "tool_calls" if reason == "stop" and self.parser.num_calls else reason
        return deltas

    def take(self, output: RequestOutput) -> list[Delta]:
        """Store one output; return its deltas."""
        deltas = self.part(output)
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
        _add_calls(self.calls, deltas)
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.drafts += output.drafts or ()
        self.routed_experts = output.routed_experts
        return deltas


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
            # Those of the prompt are prefill's: its tokens are not decoded.
            fields["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
        if body.wants_no_output:
            fields["max_tokens"] = 1
        params = self._params(body, **fields)
        given = _prompts_of(body.prompt, self._service)
        prompts = [await self._encode(one) for one in given]
        streams = await self._service.start(prompts, params, body.priority)
        choices = [
            _Choice(number * params.n + index, OutputParser(), prompt.token_ids)
            for number, prompt in enumerate(prompts)
            for index in range(params.n)
        ]
        if body.echo:
            for choice in choices:
                one = given[choice.index // params.n]
                choice.prompt_text = one if isinstance(one, str) else self._service.tokenizer.decode(one)
        answer = _Answer(body, "cmpl", "text_completion", Usage(_count(prompts)), self._service)
        return await self._respond(request, answer, choices, streams)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, await request.body(), self._service.config)
        self._service.check_model(body.model)
        schemas = None
        if body.tools and body.tool_choice != "none":
            self._service.check_call_form()
            schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
        elif body.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400, "tool_choice must be auto or none without tools; add tools", param="tool_choice"
            )
        params = self._chat_params(body)
        prompt = await self._render(
            body.messages, body.tools if schemas is not None else None, body.chat_template_kwargs
        )
        if "max_tokens" not in params.model_fields_set:
            room = max(1, self._service.max_model_len - len(prompt.token_ids))
            params = params.model_copy(update={"max_tokens": room})
        streams = await self._service.start([prompt], params, body.priority)
        parsers = [self._service.parser(prompt, schemas) for _ in range(params.n)]
        choices = [_Choice(i, parser, prompt.token_ids) for i, parser in enumerate(parsers)]
        answer = _Answer(body, "chatcmpl", "chat.completion", Usage(_count([prompt])), self._service)
        return await self._respond(request, answer, choices, streams)

    async def _respond(
        self, request: Request, answer: _Answer, choices: list[_Choice], streams: list[Stream]
    ) -> Response:
        def abort() -> None:
            for stream in streams:
                stream.abort()

        if answer.body.stream:
            events = answer.events(choices, merged(streams))
            return EventStream(events, self._service.config.write_timeout_s, abort)
        try:
            return JSONResponse(await unless_gone(request, answer.whole(choices, merged(streams))))
        finally:
            abort()

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


class _Answer:
    """Builds the JSON of one answer: a whole object, or the chunks of a stream."""

    def __init__(
        self, body: CompletionBody | ChatBody, prefix: str, kind: str, usage: Usage, service: Service
    ) -> None:
        self.body = body
        self._is_chat = isinstance(body, ChatBody)
        self._usage = usage
        self._tokenizer = service.tokenizer
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(
        self, choices: list[_Choice], outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> dict[str, Any]:
        """Read all outputs; return the answer's object."""
        async for index, output in outputs:
            choices[index].take(output)
            if output.finish_reason is not None:
                self._usage.add(output)
        # All choices of a prompt get the prompt log probabilities that its first choice carries.
        num_choices = self.body.n or 1
        for index, choice in enumerate(choices):
            choice.prompt_logprobs = choices[index // num_choices * num_choices].prompt_logprobs
            self._drop_unwanted(choice)
        entries = [self._whole_choice(choice) for choice in choices]
        answer = self._head | {"choices": entries, "usage": self._usage.to_openai()}
        for entry, choice in zip([answer] if self._is_chat else entries, choices, strict=False):
            entry |= self._of_prompt(choice)
        return answer

    def _drop_unwanted(self, choice: _Choice) -> None:
        """Drop the token that the engine drew for a completion without output: it draws at least one."""
        body = self.body
        if isinstance(body, CompletionBody) and body.wants_no_output:
            self._usage.output_tokens -= len(choice.token_ids)
            choice.content, choice.finish_reason = "", "length"
            choice.token_ids, choice.logprobs, choice.drafts = [], [], []

    def _of_prompt(self, choice: _Choice) -> dict[str, Any]:
        """Return the fields that describe a prompt: of an entry in completions, of the answer in chats."""
        fields: dict[str, Any] = {}
        if (num_top := self.body.prompt_logprobs) is not None:
            entries = choice.prompt_logprobs or ()
            fields["prompt_logprobs"] = logprob_fields.of_prompt(self._tokenizer, entries, num_top)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(choice.prompt_ids)
        return fields

    async def events(
        self, choices: list[_Choice], outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is its last event."""
        head = dict(self._head)
        has_usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        if self._is_chat:
            head["object"] = "chat.completion.chunk"
            first = {"role": "assistant", "content": ""}
            for choice in choices:
                yield _event(head | {"choices": [_chunk(choice, {"delta": first})]})
        frames = [self._frame(head, choice, has_usage) for choice in choices]
        try:
            async for index, output in outputs:
                choice, frame = choices[index], frames[index]
                if frame is None:
                    deltas = choice.take(output)
                else:
                    deltas = choice.part(output)
                    if len(deltas) == 1 and output.finish_reason is None and isinstance(deltas[0], Content):
                        yield frame[0] + encode_basestring(deltas[0].text).encode() + frame[1]
                        continue
                if output.finish_reason is not None:
                    self._usage.add(output)
                if (entry := self._chunk_choice(choice, output, deltas)) is not None:
                    chunk = head | {"choices": [entry]}
                    if self.body.include_round:
                        chunk["round"] = choice.rounds.take(output)
                    if has_usage:
                        chunk["usage"] = None
                    yield _event(chunk)
        except ApiError as error:
            yield _event(error.body("openai"))
            return
        if has_usage:
            yield _event(head | {"choices": [], "usage": self._usage.to_openai()})
        yield b"data: [DONE]\n\n"

    def _frame(self, head: Mapping[str, Any], choice: _Choice, has_usage: bool) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the text in events that hold only text; None if events hold more.

        The text itself goes between them as a JSON string.
        """
        body = self.body
        # In completions `logprobs` is a number: 0 asks for the log probabilities of the drawn tokens alone.
        has_logprobs = body.logprobs is not None and body.logprobs is not False
        if body.include_round or body.include_drafts or body.return_token_ids or has_logprobs:
            return None
        text = uuid.uuid4().hex
        said: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        chunk = {**head, "choices": [_chunk(choice, said)], **({"usage": None} if has_usage else {})}
        before, after = _event(chunk).split(f'"{text}"'.encode())
        return before, after

    def _chunk_choice(
        self, choice: _Choice, output: RequestOutput, deltas: Sequence[Delta]
    ) -> dict[str, Any] | None:
        entries: list[TokenLogprob] = list(output.logprobs or ())
        wants_ids = bool(self.body.return_token_ids) and bool(output.new_token_ids)
        wants_rounds = bool(self.body.include_drafts) and bool(output.new_token_ids)
        is_silent = not (deltas or entries or wants_ids or wants_rounds or output.finish_reason)
        if is_silent and not self.body.include_round:
            return None
        if self._is_chat:
            said: dict[str, Any] = {"delta": _delta(deltas)}
        else:
            said = {"text": "".join(d.text for d in deltas if isinstance(d, Content))}
        entry = _chunk(choice, said) | {"logprobs": self._logprobs(entries, choice.offset)}
        # A token that a stop string cuts counts with its whole text, as in an answer that is no stream.
        choice.offset += sum(len(logprob_fields.token_text(self._tokenizer, e.token_id)) for e in entries)
        if wants_ids:
            entry["token_ids"] = output.new_token_ids
        if wants_rounds:
            entry |= round_fields(self._tokenizer, output.new_token_ids, output.drafts or ())
        return entry

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.calls:
                calls = [{k: v for k, v in call.items() if k != "index"} for call in choice.calls]
                message |= {"content": choice.content or None, "tool_calls": calls}
            said: dict[str, Any] = {"message": message}
        else:
            said = {"text": choice.content}
        entry = _chunk(choice, said) | {"logprobs": self._logprobs(choice.logprobs)}
        if isinstance(self.body, CompletionBody) and self.body.echo:
            entry |= self._echo(choice, self.body)
        if self.body.include_drafts:
            entry |= round_fields(self._tokenizer, choice.token_ids, choice.drafts)
        if (experts := choice.routed_experts) is not None:
            data = base64.b64encode(experts.data).decode()
            entry["routed_experts"] = {"shape": experts.shape, "dtype": "int16", "data": data}
        return entry | ({"token_ids": choice.token_ids} if self.body.return_token_ids else {})

    def _echo(self, choice: _Choice, body: CompletionBody) -> dict[str, Any]:
        """Return the fields of a completion that repeats its prompt."""
        fields: dict[str, Any] = {"text": choice.prompt_text + choice.content}
        if body.has_echoed_logprobs:
            fields["logprobs"] = logprob_fields.of_echo(
                self._tokenizer,
                choice.prompt_ids,
                choice.prompt_logprobs or (),
                choice.logprobs,
                body.logprobs or 0,
            )
        return fields

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any] | None:
        if self._is_chat:
            return logprob_fields.of_chat(self._tokenizer, entries)
        return logprob_fields.of_completion(self._tokenizer, entries, offset)


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
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
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


def _count(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)


def _chunk(choice: _Choice, said: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, **said, "finish_reason": choice.finish_reason, "logprobs": None}


def _delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for name, kind in (("reasoning_content", Reasoning), ("content", Content)):
        if text := "".join(d.text for d in deltas if isinstance(d, kind)):
            delta[name] = text
    calls: list[dict[str, Any]] = []
    _add_calls(calls, deltas)
    return delta | ({"tool_calls": calls} if calls else {})


def _add_calls(calls: list[dict[str, Any]], deltas: Sequence[Delta]) -> None:
    """Add the calls in `deltas` to `calls`, the entries of a message or of a chunk."""
    for delta in deltas:
        if isinstance(delta, CallStart):
            call = {"index": delta.index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            calls.append(call | {"function": {"name": delta.name, "arguments": ""}})
        elif isinstance(delta, CallArguments):
            if not calls or calls[-1]["index"] != delta.index:
                calls.append({"index": delta.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += delta.text


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
