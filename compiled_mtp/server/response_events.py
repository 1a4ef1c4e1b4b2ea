"""Builds one answer of /v1/responses: its object, and its typed events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_mtp.frontend.tokenizer import json_object
from compiled_mtp.request import RequestOutput
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import Usage
from compiled_mtp.server.responses_models import NamespaceTool, ResponsesBody, full_name
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning

_STATUS = {"stop": "completed", "length": "incomplete"}
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kind of item streams its text.

    text_event and part_event begin the names of the events of the text, and of the part of type `part` that
    holds it and has a place in `index`; they are None for items without parts.
    """

    item: str
    prefix: str
    text_event: str
    part_event: str | None = None
    part: str = ""
    index: str | None = None


_MESSAGE = _Form(
    "message",
    "msg",
    "response.output_text",
    part_event="response.content_part",
    part="output_text",
    index="content_index",
)
_REASONING = _Form(
    "reasoning",
    "rs",
    "response.reasoning_text",
    part_event="response.content_part",
    part="reasoning_text",
    index="content_index",
)
_SUMMARY = _Form(
    "reasoning",
    "rs",
    "response.reasoning_summary_text",
    part_event="response.reasoning_summary_part",
    part="summary_text",
    index="summary_index",
)
_CALL = _Form("function_call", "fc", "response.function_call_arguments")


class ResponseBuilder:
    """One answer while it is decoded. A delta of another kind than the last item's opens a new item.

    reasoning_end: the id of the token that ends a reasoning part, None if the checkpoint has none.
    """

    def __init__(
        self, body: ResponsesBody, parser: OutputParser, num_prompt: int, reasoning_end: int | None
    ) -> None:
        self._parser = parser
        self._usage = Usage(num_prompt)
        self._reasoning_end = reasoning_end
        is_summary = body.reasoning is not None and body.reasoning.summary is not None
        self._forms: Mapping[type, _Form] = {
            Reasoning: _SUMMARY if is_summary else _REASONING,
            Content: _MESSAGE,
            CallStart: _CALL,
            CallArguments: _CALL,
        }
        self._items: list[dict[str, Any]] = []
        self._open: _Form | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._num_events = 0
        self._status = "in_progress"
        self._completed_at: int | None = None
        self.id = f"resp_{uuid.uuid4().hex}"
        self.is_stored = body.store is not False
        # The items' fields of functions in namespaces, by the names that the model sees.
        self._namespaced = {
            full_name(tool.name, one.name): {"namespace": tool.name, "name": one.name}
            for tool in body.tools or ()
            if isinstance(tool, NamespaceTool)
            for one in tool.tools
        }
        self._head = _head_of(body)

    def begin(self) -> list[bytes]:
        """Return a stream's first events."""
        whole, names = self.whole(), ("created", "in_progress")
        return [self.encode({"type": f"response.{name}", "response": whole}) for name in names]

    def take(self, output: RequestOutput) -> list[Event]:
        """Add one output; return the events that it makes."""
        reason = output.finish_reason
        self._token_ids += output.new_token_ids
        if reason is not None:
            self._usage.add(output)
        events: list[Event] = []
        for delta in self._parser.add(output.new_text, reason is not None):
            self._add(delta, events)
        if reason is not None:
            self._status, self._completed_at = _STATUS[reason], int(time.time())
            self._close(self._status, events)
        return events

    def end(self) -> bytes:
        """Return a stream's last event, after its last output."""
        return self.encode({"type": f"response.{self._status}", "response": self.whole()})

    def fail(self, error: ApiError) -> bytes:
        """Return a stream's last event after a failure."""
        # The codes that the API knows.
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        body = error.body("openai")["error"] | {"code": code}
        return self.encode({"type": "response.failed", "response": self.whole("failed") | {"error": body}})

    def encode(self, event: Event) -> bytes:
        """Return an event's bytes, with the next sequence number."""
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        text = json.dumps(numbered, ensure_ascii=False, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {text}\n\n".encode()

    def whole(self, status: str | None = None) -> dict[str, Any]:
        """Return the answer's object, with `status` or else its own."""
        status = status or self._status
        return self._head | {
            "id": self.id,
            "status": status,
            "completed_at": self._completed_at,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items) if status != "in_progress" else [],
            "store": self.is_stored,
            "usage": None if self._completed_at is None else self._usage_fields(),
        }

    def message(self) -> dict[str, Any]:
        """Return the answer as the chat template reads it in later turns."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self._items:
            if item["type"] == "message":
                message["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                (part,) = item["content"] or item["summary"]
                message["reasoning_content"] = message.get("reasoning_content", "") + part["text"]
            else:
                name = full_name(item.get("namespace"), item["name"])
                function = {"name": name, "arguments": _object_of(item["arguments"])}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return message

    def _add(self, delta: Delta, events: list[Event]) -> None:
        form = self._forms[type(delta)]
        if form is not self._open or isinstance(delta, CallStart):
            self._close("completed", events)
            self._start(form, delta, events)
        if not isinstance(delta, CallStart):
            self._text += delta.text
            extra: dict[str, Any] = {"logprobs": []} if form is _MESSAGE else {}
            events.append(self._event(f"{form.text_event}.delta", delta=delta.text, **extra))

    def _start(self, form: _Form, delta: Delta, events: list[Event]) -> None:
        self._open, self._text = form, ""
        item: dict[str, Any] = {"type": form.item, "id": f"{form.prefix}_{uuid.uuid4().hex}"}
        item["status"] = "in_progress"
        if isinstance(delta, CallStart):
            item |= {"call_id": f"call_{uuid.uuid4().hex[:24]}", "arguments": ""}
            item |= self._namespaced.get(delta.name, {"name": delta.name})
        elif form is _MESSAGE:
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": [], "encrypted_content": None}
        self._items.append(item)
        added = {"output_index": len(self._items) - 1, "item": dict(item)}
        events.append({"type": "response.output_item.added", **added})
        if form.part_event is not None:
            events.append(self._event(f"{form.part_event}.added", part=_part(form, "")))

    def _close(self, status: str, events: list[Event]) -> None:
        """End the open item, if there is one."""
        form = self._open
        if form is None:
            return
        item = self._items[-1]
        if form is _CALL:
            item["arguments"] = self._text
            done = {"name": item["name"], "arguments": self._text}
        else:
            done = {"text": self._text} | ({"logprobs": []} if form is _MESSAGE else {})
        events.append(self._event(f"{form.text_event}.done", **done))
        if form.part_event is not None:
            part = _part(form, self._text)
            item["summary" if form is _SUMMARY else "content"] = [part]
            events.append(self._event(f"{form.part_event}.done", part=part))
        item["status"] = status
        ended = {"output_index": len(self._items) - 1, "item": dict(item)}
        events.append({"type": "response.output_item.done", **ended})
        self._open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the text of the open item."""
        place: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if self._open is not None and self._open.index is not None:
            place[self._open.index] = 0
        return {"type": kind, **place, **fields}

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning()},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "speculation": usage.to_openai()["speculation"],
        }

    def _num_reasoning(self) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        if not any(item["type"] == "reasoning" for item in self._items):
            return 0
        ids, end = self._token_ids, self._reasoning_end
        return ids.index(end) + 1 if end in ids else len(ids)


def _part(form: _Form, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if form is _MESSAGE else {}
    return {"type": form.part, "text": text, **extra}


def _object_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments for the chat template; text that is no JSON object as `incomplete`."""
    found = json_object(arguments)
    return {"incomplete": arguments} if found is None else found


def _head_of(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of an answer that repeat its request."""

    def dumped(value: Any) -> Any:
        return value.model_dump(by_alias=True, exclude_none=True)

    tools: Sequence[Any] = body.tools or ()
    form = body.text.format if body.text is not None else None
    choice = body.tool_choice or "auto"
    return {
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": dumped(body.reasoning)
        if body.reasoning is not None
        else {"effort": None, "summary": None},
        "temperature": body.temperature,
        "text": {"format": dumped(form) if form is not None else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else dumped(choice),
        "tools": [_repeat_tool(dumped(tool)) for tool in tools],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _repeat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that clients require of a function."""
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
