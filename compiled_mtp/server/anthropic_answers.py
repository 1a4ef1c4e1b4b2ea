"""The answers of Anthropic's API: one message, whole or as a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from compiled_mtp.request import RequestOutput
from compiled_mtp.server.anthropic_models import MessagesBody
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import Outputs, Usage
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning

_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Answer:
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

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
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

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is its last event."""
        # Clients update only the counts that they know from message_delta: `speculation`, sent here as zeros,
        # would stay 0 in the message that they build.
        usage = {k: v for k, v in self._usage_fields().items() if k != "speculation"} | {"output_tokens": 0}
        start = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield make_event("message_start", message=start)
        yield make_event("ping")
        try:
            async for _, output in outputs:
                for delta in self._take(output):
                    for event in self._add(delta):
                        yield event
        except ApiError as error:
            yield make_event("error", error=error.body("anthropic")["error"])
            return
        if self._blocks:
            yield make_event("content_block_stop", index=len(self._blocks) - 1)
        stop = {"stop_reason": self._stop[0], "stop_sequence": self._stop[1]}
        yield make_event("message_delta", delta=stop, usage=self._usage_fields())
        yield make_event("message_stop")

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
                events.append(make_event("content_block_stop", index=len(self._blocks) - 1))
            shown = _new_block(delta)
            self._blocks.append(dict(shown) | ({"json": ""} if kind == "tool_use" else {}))
            events.append(make_event("content_block_start", index=len(self._blocks) - 1, content_block=shown))
        if not isinstance(delta, CallStart):
            self._blocks[-1]["json" if kind == "tool_use" else kind] += delta.text
            said = {"type": event_type, name: delta.text}
            events.append(make_event("content_block_delta", index=len(self._blocks) - 1, delta=said))
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


def make_event(kind: str, **fields: Any) -> bytes:
    """Return one event of a stream, as bytes to send."""
    body = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()
