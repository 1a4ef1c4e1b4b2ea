"""What grammars, log probabilities and penalties cost a decode step: milliseconds and drafts.

    python tools/bench_engine.py guided                                # drafts: the checkpoint that ships
    python tools/bench_engine.py guided --shape 4b --device cuda       # time: 0, 1 and 8 guided requests of 8
    python tools/bench_engine.py guided --shape tiny --batch 1,2 --guided 1,2 --rounds 8 --turns 2

One real engine, of a checkpoint or with random weights of a released shape. A shape has a synthetic tokenizer
of its vocabulary's size, so that masks and the tokenizer's trie have the real sizes. Prompts end where JSON
records begin. Blocks of all ways take turns; `over_plain` compares two blocks of the same turn. "records" is
JSON of short fields, where nearly every draft of random weights is forbidden; "text" is one long JSON string,
where nearly none is, and all rows of a window have a mask. The draft is not masked: `new_tokens_per_round` of
"records" over that of "plain" says how many drafts the grammar costs.

Tokens are compared before anything is printed: a request's tokens must not depend on other requests, the
batch, the turn or log probabilities, and llguidance alone must accept every guided stream.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.sampling.grammar_source import from_response_format
from engine_scenarios import common

PREFILL_CHUNK, WARM_UP_ROUNDS = 64, 8
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "is_done": {"type": "boolean"},
    },
    "required": ["name", "size", "parts", "is_done"],
    "additionalProperties": False,
}
NAMES = ("items", "value", "result", "index", "total", "count", "name", "path", "line", "data")
# Under neither schema may a text end before the measured rounds do.
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
    """`batch` requests, the first `count` of them with the parameters EXTRAS[extra].

    blocks: for every timed block the milliseconds of each round. num_tokens: the tokens of all requests in
    these blocks.
    """

    batch: int
    extra: str = ""
    count: int = 0
    blocks: list[list[float]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.count} {self.extra}" if self.count else "plain"

    def extra_of(self, index: int) -> str:
        """Return the request's key in EXTRAS, "" for a plain request."""
        return self.extra if index < self.count else ""


def make_prompt(number: int, size: int) -> str:
    """Return a list of records, one per line, of at least `size` characters, then the start of another."""
    rng, text = random.Random(number), "items = [\n"
    while len(text) < size:
        record = {
            "name": rng.choice(NAMES),
            "size": rng.choice(["small", "large"]),
            "parts": [rng.randrange(100) for _ in range(rng.randint(0, 4))],
            "is_done": rng.random() < 0.5,
        }
        text += f"    {json.dumps(record)},\n"
    return text + "]\nrecords = "


class Bench:
    """An engine, its requests, and all tokens that they have got."""

    def __init__(self, flags: argparse.Namespace, folder: Path) -> None:
        begin = time.perf_counter()
        self.engine = open_engine(flags, folder)
        self.start_s = time.perf_counter() - begin
        self.temperature = flags.temperature
        self.max_tokens = self.engine.runner.memory.max_model_len - flags.context
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        texts = [make_prompt(number, 8 * flags.context) for number in range(max(flags.batch))]
        self.prompts = [tokenizer.encode(text)[-flags.context :] for text in texts]
        # Tokens by request and by the extra that may change them.
        self.streams: dict[tuple[int, str], list[int]] = {}

    def run_block(self, way: Way, rounds: int) -> list[float]:
        """Decode until all of the way's requests are warm, then `rounds` rounds; return milliseconds of each.

        Raises AssertionError if a request's tokens differ from those of an earlier block.
        """
        engine, tokens = self.engine, self._add_requests(way)
        while self._round(tokens) < way.batch:
            pass
        for _ in range(WARM_UP_ROUNDS):
            self._round(tokens)
        before = sum(map(len, tokens.values()))
        times = [time.perf_counter()]
        for _ in range(rounds):
            self._round(tokens)
            times.append(time.perf_counter())
        way.num_tokens += sum(map(len, tokens.values())) - before
        for request_id in tokens:
            engine.abort(request_id)
        while engine.has_unfinished_requests():
            engine.step()
        for index, stream in enumerate(tokens.values()):
            self._compare(way, index, stream)
        return [1e3 * (after - before) for before, after in pairwise(times)]

    def _add_requests(self, way: Way) -> dict[str, list[int]]:
        """Add the way's requests; return an empty list of tokens for each, by id."""
        tokens: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts[: way.batch]):
            extra = EXTRAS.get(way.extra_of(index), {})
            params = SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=index, ignore_eos=True, **extra
            )
            tokens[self.engine.add_request(prompt_token_ids=prompt, params=params)] = []
        return tokens

    def _round(self, tokens: dict[str, list[int]]) -> int:
        """Step until a round or a prefill gives tokens; return how many requests got some."""
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
        """Raise AssertionError unless llguidance accepts every guided stream, token by token."""
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
        "--guided",
        type=common.numbers,
        default=[1, 8],
        help="how many of them are guided, separated by commas",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--context", type=int, default=256, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of a block")
    parser.add_argument("--turns", type=int, default=5, help="blocks of each way")


def open_engine(flags: argparse.Namespace, folder: Path) -> Engine:
    """Return an engine with room for the rounds of a block."""
    # The first request decodes a round for every chunk of the others' prefill.
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
    """Return the ways; those of each batch begin with the plain one."""
    ways = []
    for batch in batches:
        ways.append(Way(batch))
        counts = [count for count in guided if 0 < count <= batch]
        ways += [Way(batch, grammar, count) for grammar in SCHEMAS for count in counts]
        ways += [Way(batch, "logprobs", count) for count in sorted({1, batch})]
        ways.append(Way(batch, "penalties", batch))
    return ways


def measure(bench: Bench, ways: Sequence[Way], rounds: int, turns: int) -> list[dict[str, Any]]:
    """Time every way; return a row for each."""
    for way in ways:
        bench.run_block(way, rounds)
        way.num_tokens = 0
    bench.check_grammars()
    for turn in range(turns):
        for way in common.in_turn(ways, turn):
            way.blocks.append(bench.run_block(way, rounds))
    bench.check_grammars()
    plain = {way.batch: way for way in ways if not way.count}
    return [make_row(way, plain[way.batch]) for way in ways]


def make_row(way: Way, plain: Way) -> dict[str, Any]:
    """Return the row of a way; `plain` is the plain way of its batch."""
    times = [one for block in way.blocks for one in block]
    pairs = zip(way.blocks, plain.blocks, strict=True)
    ratios = [statistics.median(block) / statistics.median(other) for block, other in pairs]
    return {
        "batch": way.batch,
        "way": way.name,
        "step_ms": round(statistics.median(times), 3),
        "p90_ms": round(statistics.quantiles(times, n=10)[-1], 3),
        "new_tokens_per_round": round(way.num_tokens / len(times) / way.batch, 3),
        "over_plain": round(statistics.median(ratios), 4),
    }


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check and time every way."""
    flags.batch.sort()
    ways = make_ways(flags.batch, flags.guided)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, Path(folder))
        rows = measure(bench, ways, flags.rounds, flags.turns)
        bench.engine.close()
    programs = bench.engine.runner.programs
    return {
        "shape": flags.shape or flags.model.name,
        "temperature": flags.temperature,
        "device": str(programs.device),
        "mtp_step": flags.mtp_step,
        "graph_mode": programs.graph_mode,
        "start_s": round(bench.start_s, 1),
        "rounds": flags.rounds * flags.turns,
        "rows": rows,
    }
