"""Answers of OpenAI's API: choices as they are decoded, whole objects and the chunks of streams."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from compiled_mtp.request import RequestOutput, RoundDrafts, RoutedExperts
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.server import logprob_fields
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import Outputs, RoundCounter, Service, Usage
from compiled_mtp.server.openai_models import ChatBody, CompletionBody
from compiled_mtp.server.rounds import round_fields
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning


@dataclass
class Choice:
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


class Answer:
    """Builds the JSON of one answer: a whole object, or the chunks of a stream."""

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        prefix: str,
        kind: str,
        usage: Usage,
        choices: list[Choice],
        service: Service,
    ) -> None:
        self.body = body
        self._choices = choices
        self._is_chat = isinstance(body, ChatBody)
        self._usage = usage
        self._tokenizer = service.tokenizer
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Read all outputs; return the answer's object."""
        choices = self._choices
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

    def _drop_unwanted(self, choice: Choice) -> None:
        """Drop the token that the engine drew for a completion without output: it draws at least one."""
        body = self.body
        if isinstance(body, CompletionBody) and body.wants_no_output:
            self._usage.output_tokens -= len(choice.token_ids)
            choice.content, choice.finish_reason = "", "length"
            choice.token_ids, choice.logprobs, choice.drafts = [], [], []

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """Return the fields that describe a prompt: of an entry in completions, of the answer in chats."""
        fields: dict[str, Any] = {}
        if (num_top := self.body.prompt_logprobs) is not None:
            entries = choice.prompt_logprobs or ()
            fields["prompt_logprobs"] = logprob_fields.of_prompt(self._tokenizer, entries, num_top)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(choice.prompt_ids)
        return fields

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is its last event."""
        head, choices = dict(self._head), self._choices
        has_usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        # Every chunk but the last says so then.
        no_usage = {"usage": None} if has_usage else {}
        if self._is_chat:
            head["object"] = "chat.completion.chunk"
            first = {"role": "assistant", "content": ""}
            for choice in choices:
                yield _event(head | {"choices": [_chunk(choice, {"delta": first})]} | no_usage)
        frames = [self._frame(head | no_usage, choice) for choice in choices]
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
                    yield _event(chunk | no_usage)
        except ApiError as error:
            yield _event(error.body("openai"))
            return
        if has_usage:
            yield _event(head | {"choices": [], "usage": self._usage.to_openai()})
        yield b"data: [DONE]\n\n"

    def _frame(self, head: Mapping[str, Any], choice: Choice) -> tuple[bytes, bytes] | None:
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
        chunk = {**head, "choices": [_chunk(choice, said)]}
        before, after = _event(chunk).split(f'"{text}"'.encode())
        return before, after

    def _chunk_choice(
        self, choice: Choice, output: RequestOutput, deltas: Sequence[Delta]
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

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
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

    def _echo(self, choice: Choice, body: CompletionBody) -> dict[str, Any]:
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


def _chunk(choice: Choice, said: Mapping[str, Any]) -> dict[str, Any]:
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
