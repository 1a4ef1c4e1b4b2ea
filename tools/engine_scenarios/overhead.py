"""What the service costs over the bare engine: throughput, and the time between a stream's chunks.

    python tools/bench_engine.py overhead --streams 16 --cores 0,1         # the checkpoint that ships, a CPU
    python tools/bench_engine.py overhead --shape 4b --streams 1,32 --device cuda  # random weights, a GPU

One engine decodes in two ways, in turns: "bare", add_request and Engine.step; "service", the same prompts as
streams of /v1/completions from a server in this process, which a client in another process reads over
sockets. Before timing, the client must read the tokens of the bare engine, and in each turn the same texts;
otherwise the tool prints nothing.

Ratios are medians over turns, each of two blocks of the same turn. Times per round, and between the chunks of
one stream, are taken while all of a block's requests decode, over all turns. cpu_ratio compares this process'
CPU seconds per block: with --cores and an engine on a CPU, which never waits, it is the throughput ratio on
cores that no other process uses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.interpreter import settle_interpreter
from compiled_mtp.server.serve import Server, make_service
from engine_scenarios import common, stream_client

PREFILL_CHUNK, LEAST_ROUNDS = 64, 10


@dataclass
class Block:
    """One way's results in one block.

    tokens, texts: of each request. seconds, cpu_s: wall time, and CPU time of this process. rounds: seconds
    of each round with all requests, or between the chunks of such rounds.
    """

    tokens: list[list[int]]
    texts: list[str]
    seconds: float
    cpu_s: float
    rounds: list[float]


class SharedEngine(Engine):
    """An engine that a service steps except while it is lent."""

    is_lent = False

    def has_unfinished_requests(self) -> bool:
        """Return whether the service has something to step."""
        return not self.is_lent and super().has_unfinished_requests()


class Client:
    """The process that runs stream_client."""

    def __init__(self, port: int, core: int | None) -> None:
        self._port = port
        self._process = subprocess.Popen(
            [sys.executable, stream_client.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})

    def stream(self, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Send all bodies at once; return what stream_client answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"port": self._port, "bodies": bodies}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        errors = [stream["error"] for stream in found["streams"] if stream["status"] != 200]
        assert not errors, errors[0]
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Bench:
    """One engine, its service and its client; prompts are texts of at most `context` tokens."""

    def __init__(self, engine: SharedEngine, client: Client, context: int, max_tokens: int) -> None:
        self.engine, self._client = engine, client
        self._max_tokens = max_tokens
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        words = random.Random(0)
        self._prompts = []
        for _ in range(engine.runner.memory.max_batch):
            text = "".join(words.choices("etaoin shrdlu", k=8 * context))
            while (length := len(tokenizer.encode(text))) > context:
                text = text[: len(text) * context // length]
            self._prompts.append(text)

    def bare(self, streams: int) -> Block:
        """Decode without the service."""
        engine, steps = self.engine, list[tuple[float, list[RequestOutput]]]()
        engine.is_lent = True
        params = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True)
        cpu_s, begin = time.process_time(), time.perf_counter()
        ids = [engine.add_request(prompt, params) for prompt in self._prompts[:streams]]
        unfinished = set(ids)
        while unfinished:
            outputs = engine.step()
            steps.append((time.perf_counter(), outputs))
            unfinished.difference_update(one.request_id for one in outputs if one.finish_reason is not None)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
        engine.is_lent = False
        said = [[(now, one) for now, made in steps for one in made if one.request_id == name] for name in ids]
        tokens = [[token for _, one in mine for token in one.new_token_ids] for mine in said]
        texts = ["".join(one.new_text for _, one in mine) for mine in said]
        first, last = _span([[now for now, _ in mine] for mine in said])
        ends = [now for now, outputs in steps if outputs and first <= now <= last]
        return Block(tokens, texts, seconds, cpu_s, _gaps([ends]))

    def service(self, streams: int, *, with_ids: bool = False) -> Block:
        """Decode through the service; the tokens are empty unless they are asked for."""
        fields = {
            "model": "m",
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        bodies = [fields | {"prompt": prompt} for prompt in self._prompts[:streams]]
        if with_ids:
            bodies = [body | {"return_token_ids": True} for body in bodies]
        cpu_s = time.process_time()
        found = self._client.stream(bodies)
        cpu_s = time.process_time() - cpu_s
        times = [stream["times"] for stream in found["streams"]]
        first, last = _span(times)
        return Block(
            [[token for ids in stream["token_ids"] for token in ids] for stream in found["streams"]],
            ["".join(stream["texts"]) for stream in found["streams"]],
            found["seconds"],
            cpu_s,
            _gaps([[now for now in one if first <= now <= last] for one in times]),
        )

    def check(self, streams: int) -> None:
        """Raise AssertionError unless the client reads the bare engine's tokens; also warms both ways up."""
        rate, step = self.engine.config.synthetic_acceptance, self.engine.runner.step
        if rate is not None:
            # Synthetic acceptance depends on the slot, and so on the order in which requests arrive.
            step.accept_at(None)
        bare, service = self.bare(streams), self.service(streams, with_ids=True)
        if rate is not None:
            step.accept_at(rate)
        assert bare.tokens == service.tokens, "the service gives other tokens than the engine"
        assert bare.texts == service.texts, "the service gives another text than the engine"

    def measure(self, streams: int, seconds: float) -> dict[str, Any]:
        """Return the row of blocks in turns: at least one turn, and none that would end after `seconds`."""
        self.check(streams)
        is_exact = self.engine.config.synthetic_acceptance is None
        pairs = list[tuple[Block, Block]]()
        begin = time.perf_counter()
        while not pairs or (time.perf_counter() - begin) * (len(pairs) + 1) / len(pairs) < seconds:
            blocks = {way: way(streams) for way in common.in_turn((self.bare, self.service), len(pairs))}
            pairs.append((blocks[self.bare], blocks[self.service]))
            is_same = not is_exact or pairs[-1][0].texts == pairs[-1][1].texts
            assert is_same, "the service gives another text than the engine"
        bare_s = [one for bare, _ in pairs for one in bare.rounds]
        chunk_s = [one for _, service in pairs for one in service.rounds]
        assert min(len(bare_s), len(chunk_s)) >= LEAST_ROUNDS, (
            "too few rounds decode all requests; raise --max-tokens or lower --context"
        )
        tokens, median = streams * self._max_tokens, statistics.median
        return {
            "streams": streams,
            "turns": len(pairs),
            "tokens": tokens,
            "bare_tokens_per_s": round(tokens / median(bare.seconds for bare, _ in pairs), 1),
            "service_tokens_per_s": round(tokens / median(service.seconds for _, service in pairs), 1),
            "throughput_ratio": round(median(bare.seconds / service.seconds for bare, service in pairs), 4),
            "bare_cpu_us_per_token": round(1e6 * median(bare.cpu_s for bare, _ in pairs) / tokens, 2),
            "cpu_ratio": round(median(bare.cpu_s / service.cpu_s for bare, service in pairs), 4),
            "bare_round_ms": _percentiles(bare_s),
            "chunk_ms": _percentiles(chunk_s),
            "chunk_over_round": round(statistics.fmean(chunk_s) / statistics.fmean(bare_s), 4),
        }


def _span(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the times from which and until which all requests gain tokens."""
    return max(one[0] for one in times), min(one[-1] for one in times)


def _gaps(times: Sequence[Sequence[float]]) -> list[float]:
    return [after - before for one in times for before, after in pairwise(one)]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": round(1e3 * cuts[percent - 1], 3) for percent in (50, 90, 99)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument(
        "--streams", type=common.numbers, default=[16], help="requests at a time, separated by commas"
    )
    parser.add_argument(
        "--accept", type=float, default=2.6, help="with --shape: mean new tokens at mtp_step 3"
    )
    parser.add_argument("--context", type=int, default=64, help="prompt tokens")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="tokens of each request in a block; default: enough for 40 rounds of all",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds for each number of streams")
    parser.add_argument(
        "--cores", type=common.numbers, help="SERVER,CLIENT: the two cores of the two processes, on Linux"
    )


def open_engine(flags: argparse.Namespace, folder: Path) -> SharedEngine:
    """Return the engine of a checkpoint, or of a shape, with the rates and lengths that the blocks need."""
    given: dict[str, Any] = {}
    if flags.shape is not None:
        given["max_model_len"] = flags.context + flags.max_tokens
        given["synthetic_acceptance"] = rate_for(flags.accept, 3)
    return common.open_engine(
        flags,
        kind=SharedEngine,
        folder=folder,
        max_batch=max(flags.streams),
        batch_sizes=tuple(flags.streams),
        prefill_chunk=PREFILL_CHUNK,
        # A block must not be faster because of the prompts of an earlier one.
        prefix_cache=False,
        **given,
    )


@contextlib.contextmanager
def serving(engine: Engine, model: Path) -> Iterator[int]:
    """Serve the engine from its own thread; yield the port."""
    assert engine.tokenizer is not None
    config = ServerConfig(served_model_name="m", prompt_workers=1, drain_timeout_s=1.0)
    service = make_service(engine, engine.tokenizer, model, engine.runner.memory.max_model_len, config)
    server = Server(service)
    switch_interval_s = sys.getswitchinterval()
    settle_interpreter()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start; see its log"
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            service.engine.close()
            sys.setswitchinterval(switch_interval_s)
            gc.unfreeze()


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Start, check and time."""
    server_core, client_core = flags.cores or (None, None)
    if server_core is not None:
        # Set before threads start, since they inherit it.
        os.sched_setaffinity(0, {server_core})
    flags.streams.sort()
    begin = time.perf_counter()
    # Per chunk of the others' prompts the first request decodes a round, of at most mtp_step + 1 tokens.
    chunks = max(flags.streams) * -(-flags.context // PREFILL_CHUNK)
    flags.max_tokens = flags.max_tokens or (chunks + 40) * (flags.mtp_step + 1)
    with tempfile.TemporaryDirectory() as name:
        engine = open_engine(flags, Path(name))
        with (
            serving(engine, engine.frontend.path) as port,
            contextlib.closing(Client(port, client_core)) as client,
        ):
            start_s = time.perf_counter() - begin
            bench = Bench(engine, client, flags.context, flags.max_tokens)
            rows = [bench.measure(streams, flags.seconds) for streams in flags.streams]
    return {
        "model": flags.shape or flags.model.name,
        "device": common.device_name(engine),
        "mtp_step": flags.mtp_step,
        "context": flags.context,
        "start_s": round(start_s, 1),
        "total_s": round(time.perf_counter() - begin, 1),
        "rows": rows,
        "cores": [server_core, client_core],
    }
