"""An engine without a model: each request gets its prompt back in capitals, one window per step."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from compiled_mtp.cli import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.plan import RowLogprobs
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from tests import tiny

WIDTH = 3
made: list[FakeEngine] = []


class Letters:
    """Token i is the character chr(i)."""

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class FakeProcessor:
    """Takes prompts of at most 40 characters."""

    max_model_len = 40
    path = Path("fake")
    model_config = tiny.tiny_config()

    def make_request(self, request_id: str, params: SamplingParams, **prompt: Any) -> None:
        if len(text_of(prompt)) > self.max_model_len:
            raise ValueError(
                "prompt must be shorter than max_model_len=40 tokens, got a long one; shorten it"
            )


def open_frontend(config: EngineConfig) -> FakeProcessor:
    if config.model == Path("/nowhere"):
        raise ValueError("model must be a directory with a config.json, got /nowhere; pass\na checkpoint")
    return FakeProcessor()


def text_of(prompt: dict[str, Any]) -> str:
    ((kind, value),) = ((kind, value) for kind, value in prompt.items() if value is not None)
    return value if kind == "prompt" else "".join(map(chr, value)) if kind == "prompt_token_ids" else "chat"


class FakeEngine:
    """`wait_for` is called before a step with the number of steps before it."""

    is_compiled = False
    num_threads: int | None = None
    weight_recipe: str | None = None
    interrupt_after: int | None = None
    wrong_with_mtp_step_0 = False
    fail: str | None = None
    rounds_by_depth: Mapping[int, Mapping[str, int]] = MappingProxyType({})

    def __init__(
        self, config: EngineConfig, *, progress: Any, frontend: FakeProcessor, save_to: None
    ) -> None:
        assert isinstance(frontend, FakeProcessor)
        self.config = config
        self.steps = 0
        self.closed = False
        self.answers: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.params: list[SamplingParams] = []
        self.aborted: set[str] = set()
        made.append(self)
        if self.interrupt_after == 0:
            raise KeyboardInterrupt
        progress("weights", 1, 2)
        progress("weights", 2, 2)

    def add_request(self, params: SamplingParams, request_id: str, **prompt: Any) -> str:
        text = text_of(prompt)
        request = Request(request_id, [1] * len(text), params, detokenizer=Letters())
        request.history.mtp_step = self.config.depths[-1]
        self.requests[request_id], self.answers[request_id] = request, text.upper() + "." * 200
        self.params.append(params)
        return request_id

    def check(self) -> None:
        """Do nothing: no fault ends this engine between steps."""

    def has_unfinished_requests(self) -> bool:
        return any(request.finish_reason is None for request in self.requests.values())

    def abort(self, request_id: str) -> None:
        if self.requests[request_id].finish_reason is not None:
            raise ValueError("request_id must name a request that has not finished")
        self.aborted.add(request_id)

    def before_step(self) -> None:
        """Hook for tests that interfere before a step."""

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        self.before_step()
        if self.steps == self.interrupt_after:
            raise KeyboardInterrupt
        outputs = []
        # In reverse order, so that the last request finishes first.
        for name, request in reversed(self.requests.items()):
            if request.finish_reason is not None:
                continue
            if name in self.aborted:
                text = request.finish("abort")
                outputs.append(RequestOutput(name, [], text, request.metrics, "abort"))
                continue
            outputs += self.advance(name, request)
        return outputs

    def advance(self, name: str, request: Request) -> list[RequestOutput]:
        done = len(request.output_token_ids)
        window = self.answers[name][done : done + (WIDTH if self.config.mtp_step else 1)]
        if self.wrong_with_mtp_step_0 and not self.config.mtp_step and done == 2:
            window = "?"
        num_drafts = len(window) - 1 if done else None
        rows = RowLogprobs([-1.0] * 9, [1] * 9, [[]] * 9, [[]] * 9, [1.0] * 9)
        kept, text = request.append([ord(c) for c in window], num_drafts, time.monotonic(), logprobs=rows)
        error = None
        if self.fail == name:
            request.finish("error")
            error = "the device is on fire"
        reason, entries = request.finish_reason, request.take_logprobs()
        drafts = request.list_drafts([ord(c) for c in window] if done else None)
        output = RequestOutput(name, kept, text, request.metrics, reason, error, entries, drafts=drafts)
        # Further choices give the same text, with their number at the end.
        return [
            *(
                output._replace(index=index, new_text=text + str(index) * bool(reason))
                for index in range(request.params.n - 1, 0, -1)
            ),
            output,
        ]

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(rounds_by_depth=self.rounds_by_depth)

    def close(self) -> None:
        self.closed = True


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def without_labels(printed: str) -> str:
    """Return standard output without the label lines that name each of several texts."""
    return "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("--- "))


def run_main(*flags: object) -> int:
    try:
        return run.main([str(flag) for flag in flags])
    except SystemExit as error:
        return int(error.code or 0)
