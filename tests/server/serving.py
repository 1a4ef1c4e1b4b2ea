"""Servers for tests: on loopback, in a thread, over a real or a scripted engine."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput, SamplingParams
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.generation import Service
from compiled_mtp.server.serve import Server, make_service

CHECKPOINT = Path(__file__).parents[2] / "compiled_mtp" / "default_model"
FAMILY_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MTP_STEP = 3

_TOOLS = {
    "xml": "Call as <tool_call>\n<function=NAME>\n<parameter=ARG>\nVALUE\n</parameter>\n</function>"
    "\n</tool_call>",
    "json": 'Call as <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>',
}
_TEMPLATE = """\
{%- if tools -%}{{- "<|im_start|>system\\n# Tools\\n" }}
{%- for tool in tools -%}{{- tool | tojson + "\\n" -}}{%- endfor -%}{{- CALLS ~ "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- "<tool_call>" ~ call.function.name -}}
{%- for name, value in call.function.arguments|items -%}{{- name ~ "=" ~ value -}}{%- endfor -%}
{%- endfor -%}{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{{- "<|im_start|>assistant\\n" -}}
{{- "<think>\\n" if enable_thinking is defined and enable_thinking else "<think>\\n\\n</think>\\n\\n" -}}
"""


def make_family(directory: Path, form: str) -> Path:
    """Make a checkpoint directory without weights, with a tokenizer and template like the family's."""
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(CHECKPOINT / name, directory)
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"]
    for index, content in enumerate(FAMILY_TOKENS, start=added[-1]["id"] + 1):
        added.append({**added[-1], "id": index, "content": content, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    template = _TEMPLATE.replace("CALLS", json.dumps(_TOOLS[form]))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


class Stats:
    """The scripted engine's statistics."""


class ScriptedEngine:
    """Gives `script` (token ids) to every request, `chunk` tokens per step, through the real detokenizer.

    `before_step` runs in the stepping thread; if it raises, the engine dies.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.script: list[int] = []
        self.chunk = 1
        self.step_s = 0.0
        self.error: str | None = None
        self.error_kind: Any = "engine"
        self.logprobs: Callable[[Sequence[int]], Any] | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.priorities: list[int] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self._running: dict[str, dict[str, Any]] = {}
        self._count = 0

    def say(self, text: str, *, by_character: bool = False, chunk: int = 1) -> None:
        """Set the script to the tokens of a text; the family's special tokens stay whole unless `spelt`."""
        pieces = list(text) if by_character else [text]
        self.script = [token for piece in pieces for token in self.tokenizer.encode(piece)]
        self.chunk = chunk

    def add_request(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Any = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> str:
        """Add a request, like the engine."""
        ids = list(prompt_token_ids or ())
        if not ids:
            raise ValueError("prompt must have at least one token, got none; give some text or token ids")
        if any(not 0 <= i < 4160 for i in ids):
            raise ValueError("prompt_token_ids must lie in 0..4159, got others; use the tokenizer's")
        self._count += 1
        name = request_id or f"request-{self._count}"
        params = params or SamplingParams()
        self.seen.append((ids, params))
        self.priorities.append(priority)
        history = RequestHistory(len(ids), params.seed or 0)
        history.mtp_step, history.time_to_first_token_s = MTP_STEP, 0.01
        self._running[name] = {
            "left": list(self.script[: params.max_tokens]),
            "reason": "length" if len(self.script) > params.max_tokens else "stop",
            "history": history,
            "told": 0,
            "detokenizer": self.tokenizer.detokenizer(),
            "params": params,
            "is_aborted": False,
        }
        return name

    def abort(self, request_id: str) -> None:
        """End a request; the next step reports it."""
        if request_id not in self._running:
            raise ValueError("request_id must be running")
        self.aborted.append(request_id)
        self._running[request_id]["is_aborted"] = True

    def check(self) -> None:
        """Do nothing: no fault ends this engine between steps."""

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not had all its tokens."""
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        """Give `chunk` more tokens to every request."""
        self.before_step()
        time.sleep(self.step_s)
        return [self._output(name, state) for name, state in list(self._running.items())]

    def _output(self, name: str, state: dict[str, Any]) -> RequestOutput:
        new, state["left"] = state["left"][: self.chunk], state["left"][self.chunk :]
        history: RequestHistory = state["history"]
        if state["told"] and new:
            history.rounds.append(MTP_STEP * 16 + min(len(new) - 1, MTP_STEP))
        state["told"] += len(new)
        metrics = RequestMetrics(history, len(history.rounds), state["told"], 0.02)
        reason = None if state["left"] else state["reason"]
        if state["is_aborted"]:
            new, reason = [], "abort"
        elif self.error is not None:
            reason = "error"
        text = "".join(map(state["detokenizer"].add, new))
        text += state["detokenizer"].flush() if reason else ""
        for stop in state["params"].stop:
            if stop in text:
                text = text[: text.index(stop) + (len(stop) if state["params"].include_stop else 0)]
                reason = "stop"
        if reason:
            del self._running[name]
        logprobs = self.logprobs(new) if self.logprobs is not None else None
        kind = self.error_kind if reason == "error" else None
        return RequestOutput(name, new, text, metrics, reason, self.error, logprobs, error_kind=kind)

    def stats(self) -> Any:
        """Return statistics like the engine's."""
        from compiled_mtp.spec.engine_stats import EngineStats
        from compiled_mtp.spec.stats import SpeculationStats

        running = len(self._running)
        none = SpeculationStats.empty(MTP_STEP)
        return EngineStats(running, 0, 0, running, 64, 0, 0, none, {MTP_STEP: {"best": 5, "probe": 1}})

    def close(self) -> None:
        """Forget all requests; a later server starts with none of them."""
        self.is_closed = True
        self._running.clear()


class Running:
    """A server that listens: its address, its service, and its end."""

    def __init__(self, service: Service, url: str, server: Server, thread: threading.Thread) -> None:
        self.service, self.url, self.server, self._thread = service, url, server, thread
        self.host, self.port = "127.0.0.1", int(url.rsplit(":", 1)[1])

    def stop(self) -> None:
        """End as at SIGTERM."""
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def running(
    engine: Any, model: Path, max_model_len: int = 512, chat_template: Path | None = None, **options: Any
) -> Iterator[Running]:
    """Serve an engine during the block."""
    defaults: dict[str, Any] = {
        "prompt_workers": 1,
        "drain_timeout_s": 2.0,
        "served_model_name": ("m", "alias"),
    }
    config = ServerConfig(**(defaults | options))
    frontend = getattr(engine, "frontend", None)
    tokenizer = Tokenizer(model, chat_template)
    service = make_service(engine, tokenizer, model, max_model_len, config, frontend)
    server = Server(service)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = Running(service, f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
    try:
        yield found
    finally:
        found.stop()
        service.engine.close()


def wait_for_none_open(server: Running) -> None:
    """Wait until the service has no open request; fail after 5 seconds."""
    deadline = time.monotonic() + 5
    while server.service.engine.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service.engine.num_open == 0


logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
