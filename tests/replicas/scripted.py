"""Scripted replicas: they send given outputs in rounds of any size and die on command."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_mtp.replicas.engine import ReplicatedEngine
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.replicas.relay import RelayLimits
from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput, RoundDrafts
from compiled_mtp.sampling.logprobs import TokenLogprob

PROMPT = [1, 2, 3]


def entry(token_id: int) -> TokenLogprob:
    """Return the log probability of a token."""
    return TokenLogprob(token_id, b"", -token_id / 8, 1, (), 0.5)


@dataclass
class Truth:
    """All that a choice sends.

    Each output is a round: all of its drafts were accepted except a last one, -1. After k tokens `shown[k]`
    characters of the text and `told[k]` entries are sent; the others come with the end.
    """

    token_ids: list[int]
    text: str
    shown: list[int]
    told: list[int] | None = None
    finish_reason: Any = "stop"
    prompt_logprobs: list[TokenLogprob] | None = None
    has_drafts: bool = False

    def output(self, index: int, start: int, end: int) -> RequestOutput:
        """Return the output of tokens `start` to `end`; the last one has the finish reason."""
        is_last = end == len(self.token_ids)
        logprobs = None
        if self.told is not None:
            ids = self.token_ids[self.told[start] : None if is_last else self.told[end]]
            logprobs = [entry(i) for i in ids]
        history = RequestHistory(len(PROMPT), 7, mtp_step=4, rounds=[16 * (end - start) + end - start - 1])
        return RequestOutput(
            "there",
            self.token_ids[start:end],
            self.text[self.shown[start] : None if is_last else self.shown[end]],
            RequestMetrics(history, 1, end, 0.1),
            self.finish_reason if is_last else None,
            "it failed" if is_last and self.finish_reason == "error" else None,
            logprobs,
            index,
            self.prompt_logprobs if not start else None,
            [RoundDrafts([*self.token_ids[start : end - 1], -1], end - start - 1)]
            if self.has_drafts
            else None,
        )


@dataclass
class Replica:
    """Sends every choice's `Truth` in rounds of its own sizes.

    After `dies_after` outputs it dies or, if it hangs, sends nothing more. Before each output it sends
    `beats` heartbeats, `beat_s` seconds apart.
    """

    name: str
    truths: Sequence[Truth]
    sizes: random.Random
    dies_after: int | None = None
    refuses: Refused | None = None
    identity: str = "equal"
    most: int = 4
    hangs: bool = False
    beats: int = 0
    beat_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    num_open: int = 0

    async def decode(self, call: Call) -> AsyncIterator[Message]:
        """Decode as EngineReplica does."""
        self.calls.append(call)
        self.num_open += 1
        try:
            await asyncio.sleep(0)
            if self.refuses is not None:
                yield self.refuses
                return
            left = self.dies_after
            if left == 0 and not self.hangs:
                raise ConnectionError(f"{self.name} died")
            yield Accepted(self.name, self.identity)
            if left == 0:
                await asyncio.Event().wait()
            at = [0] * len(self.truths)
            while any(at[i] < len(truth.token_ids) for i, truth in enumerate(self.truths)):
                index = self.sizes.choice(
                    [i for i, truth in enumerate(self.truths) if at[i] < len(truth.token_ids)]
                )
                truth = self.truths[index]
                end = min(len(truth.token_ids), at[index] + self.sizes.randint(1, self.most))
                for _ in range(self.beats):
                    await asyncio.sleep(self.beat_s)
                    yield []
                yield [truth.output(index, at[index], end)]
                at[index] = end
                await asyncio.sleep(0)
                if left is not None and (left := left - 1) == 0:
                    if self.hangs:
                        await asyncio.Event().wait()
                    raise ConnectionError(f"{self.name} died")
        finally:
            self.num_open -= 1


def make_engine(
    route: Callable[[Call], Replica], metrics: ReplicaMetrics | None = None, **options: Any
) -> ReplicatedEngine:
    """Return an engine whose calls go to the replica that `route` returns."""
    limits = RelayLimits(
        options.pop("max_failovers", 3),
        options.pop("start_timeout_s", 5.0),
        options.pop("silence_timeout_s", 30.0),
    )
    defaults: dict[str, Any] = {
        "seed": None,
        "chunk": 64,
        "num_chunks": 1,
        "max_open": 8,
        "stream_buffer": 1024,
    }
    return ReplicatedEngine(
        lambda call: route(call).decode(call), metrics or ReplicaMetrics(), limits, **(defaults | options)
    )


def in_turn(*replicas: Replica) -> Callable[[Call], Replica]:
    """Return a route: each call goes to the next replica, and all later calls go to the last one."""
    left = list(replicas)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


async def read(engine: ReplicatedEngine, **request: Any) -> list[RequestOutput]:
    """Return all outputs of a request."""
    (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT, **request}])
    return [output async for output in stream]
