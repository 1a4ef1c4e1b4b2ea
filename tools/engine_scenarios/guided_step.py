"""What grammars, log probabilities and penalties cost a decode step: milliseconds, and over a plain step.

    python tools/bench_engine.py guided-step --shape 4b --device cuda       # 0, 1 and 8 guided requests of 8
    python tools/bench_engine.py guided-step --shape tiny --batch 1,2 --guided 1,2 --rounds 8 --turns 2

One real engine with random weights of a released shape, and a synthetic tokenizer of its vocabulary's size,
so that masks and the tokenizer's trie have the real sizes. Blocks of all ways take turns; a ratio is of two
blocks of the same turn. "records" is JSON of short fields, where nearly every draft of such weights is
forbidden; "text" one long JSON string, where nearly none is, and all rows of a window have a mask.
`plain_over_first` compares plain steps among the others with those before anything else had run.

Tokens are compared before anything is printed: those of a request must not depend on its company, the
batch, the turn or log probabilities, and llguidance alone must take what a grammar has let through.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.sampling.grammar_source import from_response_format
from engine_scenarios import common
from engine_scenarios.guided import SCHEMA as RECORD

PREFILL_CHUNK, WARM_UP_ROUNDS = 64, 8
# Neither ends before the measured rounds do.
SCHEMAS: dict[str, dict[str, Any]] = {
    "records": {"type": "array", "items": RECORD, "minItems": 2000},
    "text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 40000}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
EXTRAS: dict[str, dict[str, Any]] = {
    name: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    for name, schema in SCHEMAS.items()
} | {
    "logprobs": {"logprobs": 5},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.2, "repetition_penalty": 1.05},
}


@dataclass
class Way:
    """`batch` requests, the first `count` of them with what EXTRAS calls `extra`.

    blocks: of every timed block the milliseconds of each round; host_blocks: of these the milliseconds in
    which the host did not wait for the device. num_tokens of all requests in the timed blocks.
    """

    batch: int
    extra: str = ""
    count: int = 0
    blocks: list[list[float]] = field(default_factory=list)
    host_blocks: list[list[float]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.count} {self.extra}" if self.count else "plain"

    def extra_of(self, index: int) -> str:
        """What the request asks for."""
        return self.extra if index < self.count else ""


class Bench:
    """An engine of random weights, its requests, and every token that they have had."""

    def __init__(self, flags: argparse.Namespace, folder: Path) -> None:
        begin = time.perf_counter()
        self.engine = open_engine(flags, folder)
        self.start_s = time.perf_counter() - begin
        self.max_tokens = self.engine.runner.memory.max_model_len - flags.context
        generator = torch.Generator().manual_seed(0)
        shape = (max(flags.batch), flags.context)
        self.prompts: list[list[int]] = torch.randint(0, 256, shape, generator=generator).tolist()
        # By request and what of its parameters decides them.
        self.streams: dict[tuple[int, str], list[int]] = {}

    def run_block(self, way: Way, rounds: int) -> tuple[list[float], list[float]]:
        """Decode until all of the way's requests have warmed up, and then for `rounds`.

        Returns milliseconds of each, and of the host. Raises AssertionError for other tokens than before.
        """
        engine, runner = self.engine, self.engine.runner
        tokens = self._add_requests(way)
        while self._round(tokens) < way.batch:
            pass
        for _ in range(WARM_UP_ROUNDS):
            self._round(tokens)
        before = sum(map(len, tokens.values()))
        times, host_times, last = [], [], time.perf_counter()
        for _ in range(rounds):
            waited_s = runner.waited_s
            self._round(tokens)
            now = time.perf_counter()
            times.append(1e3 * (now - last))
            host_times.append(times[-1] - 1e3 * (runner.waited_s - waited_s))
            last = now
        way.num_tokens += sum(map(len, tokens.values())) - before
        for request_id in tokens:
            engine.abort(request_id)
        while engine.has_unfinished_requests():
            engine.step()
        for index, stream in enumerate(tokens.values()):
            self._compare(way, index, stream)
        return times, host_times

    def _add_requests(self, way: Way) -> dict[str, list[int]]:
        """The tokens of each, none yet, by its id."""
        tokens: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts[: way.batch]):
            extra = EXTRAS.get(way.extra_of(index), {})
            params = SamplingParams(
                max_tokens=self.max_tokens, temperature=1.0, seed=index, ignore_eos=True, **extra
            )
            tokens[self.engine.add_request(prompt_token_ids=prompt, params=params)] = []
        return tokens

    def _round(self, tokens: dict[str, list[int]]) -> int:
        """Step until tokens come, of a round or a first one; how many requests have some."""
        while not (outputs := self.engine.step()):
            pass
        for output in outputs:
            assert output.finish_reason is None, (output.finish_reason, output.error)
            tokens[output.request_id] += output.new_token_ids
        return len(outputs)

    def _compare(self, way: Way, index: int, stream: list[int]) -> None:
        extra = way.extra_of(index)
        known = self.streams.setdefault((index, "" if extra == "logprobs" else extra), [])
        both = min(len(known), len(stream))
        is_same = known[:both] == stream[:both]
        assert is_same, f"tokens of request {index} changed: batch {way.batch}, {way.name}"
        known += stream[both:]

    def check_grammars(self) -> None:
        """Raise AssertionError unless llguidance takes every guided stream, token by token."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        other = LLTokenizer(
            tokenizer.json_text, n_vocab=tokenizer.num_ids, eos_token=list(tokenizer.eos_token_ids)
        )
        for (index, extra), stream in self.streams.items():
            if extra not in SCHEMAS:
                continue
            source = from_response_format(EXTRAS[extra]["response_format"])
            assert source is not None
            matcher = LLMatcher(other, source.lark(), log_level=0)
            taken = matcher.validate_tokens(stream)
            assert taken == len(stream) > 0, f"{extra} of request {index}: token {taken} is forbidden"


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.set_defaults(graph_mode="replay")
    parser.add_argument("--batch", type=common.numbers, default=[1, 8], help="requests, separated by commas")
    parser.add_argument(
        "--guided", type=common.numbers, default=[1, 8], help="how many of them are guided, by commas"
    )
    parser.add_argument("--context", type=int, default=256, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=40, help="of a block")
    parser.add_argument("--turns", type=int, default=5, help="blocks of each way")


def open_engine(flags: argparse.Namespace, folder: Path) -> Engine:
    """The real engine; only its weights are random numbers instead of a checkpoint's."""
    # While others are prefilled, a chunk at a time, the first request decodes a round for each.
    chunks = max(flags.batch) * -(-flags.context // PREFILL_CHUNK)
    rounds = 2 * chunks + WARM_UP_ROUNDS + flags.rounds + 16
    given: dict[str, Any] = {}
    if flags.compile == "on" or (flags.device != "cpu" and torch.cuda.is_available()):
        given["batch_sizes"] = tuple(flags.batch)
    return common.open_engine(
        flags,
        kind=Engine,
        folder=folder,
        max_batch=max(flags.batch),
        max_model_len=flags.context + rounds * (flags.mtp_step + 1),
        prefill_chunk=PREFILL_CHUNK,
        prefix_cache=False,
        seed=0,
        **given,
    )


def make_ways(batches: Sequence[int], guided: Sequence[int]) -> list[Way]:
    """For each batch a plain way first."""
    ways = []
    for batch in batches:
        ways.append(Way(batch))
        counts = [count for count in guided if 0 < count <= batch]
        ways += [Way(batch, grammar, count) for grammar in SCHEMAS for count in counts]
        ways += [Way(batch, "logprobs", count) for count in sorted({1, batch})]
        ways.append(Way(batch, "penalties", batch))
    return ways


def measure(bench: Bench, ways: Sequence[Way], rounds: int, turns: int) -> list[dict[str, Any]]:
    """Time every way; a row of the table each."""
    plain = {way.batch: way for way in ways if not way.count}
    for way in plain.values():
        bench.run_block(way, rounds)
    first = {batch: statistics.median(bench.run_block(way, rounds)[0]) for batch, way in plain.items()}
    for way in ways:
        bench.run_block(way, rounds)
    bench.check_grammars()
    for way in ways:
        way.num_tokens = 0
    for turn in range(turns):
        for way in common.in_turn(ways, turn):
            times, host_times = bench.run_block(way, rounds)
            way.blocks.append(times)
            way.host_blocks.append(host_times)
    bench.check_grammars()
    return [make_row(way, plain[way.batch], first[way.batch]) for way in ways]


def make_row(way: Way, plain: Way, first_ms: float) -> dict[str, Any]:
    """What was measured of a way; first_ms is that of plain steps before anything else."""
    times = [one for block in way.blocks for one in block]
    step_ms = statistics.median(times)
    pairs = zip(way.blocks, plain.blocks, strict=True)
    ratios = [statistics.median(block) / statistics.median(other) for block, other in pairs]
    return {
        "batch": way.batch,
        "way": way.name,
        "step_ms": round(step_ms, 3),
        "p90_ms": round(statistics.quantiles(times, n=10)[-1], 3),
        "host_ms": round(statistics.median(one for block in way.host_blocks for one in block), 3),
        "new_tokens_per_round": round(way.num_tokens / len(times) / way.batch, 3),
        "over_plain": round(statistics.median(ratios), 4),
    } | ({} if way.count else {"plain_over_first": round(step_ms / first_ms, 4)})


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check, time every way, and print a table."""
    flags.batch.sort()
    ways = make_ways(flags.batch, flags.guided)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, Path(folder))
        rows = measure(bench, ways, flags.rounds, flags.turns)
        bench.engine.close()
    for row in rows:
        print(
            f"B={row['batch']:<2} {row['way']:12} step {row['step_ms']:8.3f} ms  p90 {row['p90_ms']:8.3f}  "
            f"host {row['host_ms']:7.3f}  over plain {row['over_plain']:.3f}  "
            f"{row['new_tokens_per_round']:.2f} tokens a round"
        )
    programs = bench.engine.runner.programs
    return {
        "shape": flags.shape or flags.model.name,
        "device": str(programs.device),
        "mtp_step": flags.mtp_step,
        "graph_mode": programs.graph_mode,
        "start_s": round(bench.start_s, 1),
        "rounds": flags.rounds * flags.turns,
        "rows": rows,
    }
