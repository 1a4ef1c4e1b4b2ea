"""Throughput of mtp_step "auto" over the best fixed depth and over none.

    python tools/bench_depth.py --seconds 300 --plot depth.png            # the checkpoint that ships
    python tools/bench_depth.py --shape 4b --accept 1.1,2.1,2.6,3.3,change --batches 1,8,32     # a GPU

Texts are code, prose and random ids, greedy. A block decodes a batch to the end of --max-tokens; blocks of
auto and of each fixed depth take turns, and every ratio is of two blocks of the same turn.

--accept names synthetic acceptances instead, as mean tokens a round at depth 3, all on one engine; "change"
goes from 3.3 to 1.1 and back every 200 rounds. A round of a fixed depth takes as long whatever is kept, so
fixed depths are timed once a batch, for --rounds rounds, and auto for as many at each acceptance ("change":
600). The tokens that a fixed depth has in a round are computed: over the text that auto has decoded, from the
hash that decides what is kept. Where a round of auto verified what was no draft, nothing beyond its drafts
counts. On a GPU --graph-mode uncompiled captures the rounds as they are: the start takes seconds where
compiling five depths takes minutes, and every depth pays for it alike.

Before anything is timed the tokens of auto must be those of depth 0; else nothing is printed. Every record is
printed when it is made. Ends in one JSON line: medians, and the ratios' medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_step import fill_random, model_config, rate_for

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.compile import compile_program, compiler_settings
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.ops.window.reference import position_hash
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
CHANGE_ROUNDS, CHANGE_ACCEPTS, NUM_CHANGES = 200, (3.3, 1.1), 3
PROMPT_TOKENS, CHECKED_TOKENS, WARM_UP_ROUNDS = 48, 40, 64


@dataclass
class Way:
    """One way to choose depths: a fixed one, or None for auto; tokens a second of each of its blocks."""

    depth: int | None
    speeds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "auto" if self.depth is None else str(self.depth)


@dataclass(frozen=True)
class Case:
    """What is decoded: prompts of a text, or rates of synthetic acceptance, each for some rounds in turn."""

    name: str
    prompts: list[list[int]]
    rates: tuple[float, ...] = ()

    def rate(self, number: int) -> float:
        """The rate of a round."""
        return self.rates[number // CHANGE_ROUNDS % len(self.rates)]


@dataclass(frozen=True)
class Block:
    """What came of decoding a case: rounds, their seconds and tokens; of each request all its tokens, and the
    positions of the last one before the first round and after the last."""

    rounds: int
    seconds: float
    num_tokens: int
    token_ids: list[list[int]]
    spans: list[tuple[int, int]]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


class Bench:
    """A runner with every depth ready, and a scheduler whose depths come from the way that is tried."""

    def __init__(
        self, config: EngineConfig, shape: str | None, clock: Callable[[], float], *, is_plain: bool = False
    ) -> None:
        model = model_config(shape) if shape is not None else read_model_config(config.model)
        fill = None if shape is None else fill_random
        make: Any = (lambda function, name, graph_mode: function) if is_plain else compile_program
        with mock.patch("compiled_mtp.programs.compile_program", make):
            self.runner = Runner(config, model, model.vocab_size, fill=fill)
        programs, depths, first = self.runner.programs, config.depths, first_depth(config.depths)
        if programs.is_compiled:
            if self.runner.later is not None:
                self.runner.later.close()
            later = [s for depth in depths for s in programs.shapes(depth) if s.depth == depth != first]
            with compiler_settings():
                for one in later:
                    method = partial(one.method, programs.step)
                    programs.adopt(one, make(method, one.name, programs.graph_mode))
        sizes = [b.groups for b in programs.buckets if b.verify_step == b.draft_step == first]
        self._depths, self._sizes = depths, sizes
        self.clock = clock
        self.policy = DepthPolicy(depths, sizes, clock)
        self.way = Way(None)
        self.scheduler = Scheduler(
            max_batch=config.max_batch,
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
            max_model_len=self.runner.max_model_len,
            prefill_chunk=config.resolve_prefill_chunk("cuda"),
            mtp_step=self.runner.step.mtp_step,
            max_in_flight=self.runner.max_in_flight,
            depth=self._choose,
        )
        self.num_rounds = 0
        self._rate: float | None = config.synthetic_acceptance

    def begin_case(self) -> None:
        """Forget what was learnt."""
        self.policy = DepthPolicy(self._depths, self._sizes, self.clock)

    def decode(self, way: Way, case: Case, rounds: int | None, max_tokens: int) -> Block:
        """Decode the case's prompts together until one ends, or for `rounds`."""
        self.way, self.num_rounds = way, 0
        requests = []
        for index, prompt in enumerate(case.prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=index)
            requests.append(Request(f"{index}", prompt, params))
            self.scheduler.add(requests[-1])
        while len(self.scheduler.running) < len(requests):
            self._step(case)
        self.num_rounds = num_tokens = 0
        starts = [one.prompt_len + len(one.output_token_ids) - 1 for one in requests]
        begin = self.clock()
        while all(one.finish_reason is None for one in requests) and self.num_rounds != rounds:
            num_tokens += self._step(case)
        seconds = self.clock() - begin
        num_rounds, tokens = self.num_rounds, [list(one.output_token_ids) for one in requests]
        ends = [one.prompt_len + len(one.output_token_ids) - 1 for one in requests]
        self.scheduler.forget_all()
        while (result := self.runner.run(None)) is not None:
            self.scheduler.update(result)
        self.policy.forget_launches()
        self.scheduler.take_outputs()
        return Block(num_rounds, seconds, num_tokens, tokens, list(zip(starts, ends, strict=True)))

    def _step(self, case: Case) -> int:
        """One step as `Engine` makes it; tokens of the round whose result has come."""
        rate = case.rate(self.num_rounds) if case.rates else None
        if rate != self._rate:
            self.runner.step.accept_at(rate)
            self._rate = rate
        plan = self.scheduler.schedule()
        if plan is not None:
            self.policy.launch(plan)
        result = self.runner.run(plan)
        if result is None:
            return 0
        assert result.error is None, result.error
        if self.way.depth is None:
            self.policy.read(result)
        self.scheduler.update(result)
        if result.plan.kind != "decode":
            return 0
        self.num_rounds += 1
        most = result.plan.num_drafts + 1 if case.rates else 99
        return sum(min(len(new), most) for new in result.token_ids)

    def _choose(self, num_requests: int, context_tokens: int, is_halved: bool) -> int:
        if self.way.depth is not None:
            return self.way.depth
        return self.policy.choose(num_requests, context_tokens, is_halved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--shape", help="random weights of a released shape: 0.8b, 4b, 9b, 27b, 35b-a3b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--graph-mode", default="replay", help="on a GPU: replay or uncompiled")
    parser.add_argument("--accept", default="", help="synthetic: mean tokens a round, or change, by commas")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--depths", default="0,1,2,3,5", help="what auto may choose")
    parser.add_argument(
        "--fixed", help="depths to compare with, by commas; default: 0,3 for texts, else --depths"
    )
    parser.add_argument("--rounds", type=int, default=200, help="of a block of synthetic acceptance")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a block of a text")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's time, on a CPU that others use too"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for all blocks of texts together")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    arguments = parser.parse_args()
    rows = run(arguments)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"device": device, "model": arguments.shape or arguments.model.name, "cases": rows}))


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check, time every case, and return a record of each."""
    accepts = [one for one in arguments.accept.split(",") if one]
    batches, depths = numbers(arguments.batches), numbers(arguments.depths)
    fixed = numbers(arguments.fixed) if arguments.fixed else depths if accepts else [0, 3]
    width, is_plain = max(depths) + 1, arguments.graph_mode == "uncompiled"
    rounds = max(arguments.rounds, NUM_CHANGES * CHANGE_ROUNDS * ("change" in accepts))
    most = rounds * width if accepts else arguments.max_tokens
    given: dict[str, Any] = {
        "mtp_step": "auto",
        "mtp_depths": arguments.depths,
        "device": arguments.device,
        "compile": "on" if is_plain else arguments.compile,
        "max_batch": max(batches),
        "max_model_len": most + PROMPT_TOKENS * (max(batches) + 1) + 2 * width,
        "prefill_chunk": 64,
        "synthetic_acceptance": 0.0 if accepts else None,
    }
    if torch.cuda.is_available():
        given |= {"batch_sizes": arguments.batches, "graph_mode": "replay"}
    given |= {"model": arguments.model} if arguments.shape is None else {"model": Path(__file__)}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    bench = Bench(EngineConfig(**given), arguments.shape, clock, is_plain=is_plain)
    check(bench, arguments)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    if not accepts:
        todo = [(name, batch) for name in ("code", "prose", "random ids") for batch in batches]
        ways, share_s = [Way(None), *map(Way, fixed)], arguments.seconds / len(todo)
        for name, batch in todo:
            case = make_case(name, batch, arguments)
            keep(time_texts(bench, case, [Way(way.depth) for way in ways], most, share_s) | {"batch": batch})
        return rows
    for batch in batches:
        seconds = time_fixed(bench, make_case(accepts[0], batch, arguments), fixed, arguments.rounds, most)
        for accept in accepts:
            case = make_case(accept, batch, arguments)
            count = arguments.rounds if accept != "change" else NUM_CHANGES * CHANGE_ROUNDS
            keep(time_auto(bench, case, seconds, count, most) | {"batch": batch})
    return rows


def numbers(text: str) -> list[int]:
    """Those that a flag names, by commas."""
    return [int(number) for number in text.split(",")]


def check(bench: Bench, arguments: argparse.Namespace) -> None:
    """Raise AssertionError unless auto gives depth 0's tokens, also with another depth every second round."""
    case = make_case("random ids", 1, arguments)
    expected = bench.decode(Way(0), case, None, CHECKED_TOKENS).token_ids
    found = bench.decode(Way(None), case, None, CHECKED_TOKENS).token_ids
    assert found == expected, "tokens depend on the depth"
    steps, depths = iter(range(1 << 20)), numbers(arguments.depths)
    bench.policy.controller.choose = lambda bucket, context: depths[next(steps) // 2 % len(depths)]  # type: ignore[method-assign]
    found = bench.decode(Way(None), case, None, CHECKED_TOKENS).token_ids
    assert found == expected, "tokens depend on switches"


def make_case(name: str, batch: int, arguments: argparse.Namespace) -> Case:
    """The case of a text or of a synthetic acceptance."""
    vocab_size = 1000 if arguments.shape else read_model_config(arguments.model).vocab_size
    generator = torch.Generator().manual_seed(batch)
    random_ids = torch.randint(0, vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    if name == "change":
        return Case(name, random_ids, tuple(rate_for(accept, 3) for accept in CHANGE_ACCEPTS))
    if name == "random ids":
        return Case(name, random_ids)
    if name in ("code", "prose"):
        file = ROOT / "compiled_mtp" / "engine.py" if name == "code" else ROOT / "docs" / "design.md"
        ids = Tokenizer(arguments.model).encode(file.read_text(encoding="utf-8"))
        return Case(name, [ids[40 * i : 40 * i + PROMPT_TOKENS] for i in range(batch)])
    return Case(f"accept {name}", random_ids, (rate_for(float(name), 3),))


def time_fixed(
    bench: Bench, case: Case, depths: Sequence[int], rounds: int, max_tokens: int
) -> dict[int, float]:
    """Seconds of a round of each depth: means over `rounds` rounds, in two blocks."""
    spent = dict.fromkeys(depths, 0.0)
    for _ in range(2):
        for depth in depths:
            block = bench.decode(Way(depth), case, -(-rounds // 2), max_tokens)
            spent[depth] += block.seconds / block.rounds / 2
    return spent


def time_auto(
    bench: Bench, case: Case, seconds: Mapping[int, float], rounds: int, max_tokens: int
) -> dict[str, Any]:
    """A block of auto beside fixed depths, of which `seconds` of a round are known, on the same text."""
    bench.begin_case()
    # Untimed: the rounds in which it learns what the machine takes.
    bench.decode(Way(None), case, min(rounds, WARM_UP_ROUNDS), max_tokens)
    block = bench.decode(Way(None), case, rounds, max_tokens)
    batch, speeds = len(case.prompts), {"auto": block.speed}
    for depth, spent in seconds.items():
        speeds[str(depth)] = batch * tokens_a_round(case, depth, block) / spent
    best = max(seconds, key=lambda depth: speeds[str(depth)])
    found = {
        "case": case.name,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "best": str(best),
        "auto_over_best": round(block.speed / speeds[str(best)], 3),
        "ms_by_depth": {depth: round(1e3 * spent, 3) for depth, spent in seconds.items()},
        "tokens_a_round": round(block.num_tokens / block.rounds / batch, 3),
    }
    found |= {"auto_over_none": round(block.speed / speeds["0"], 3)} if 0 in seconds else {}
    return found | what_auto_chose(bench)


def tokens_a_round(case: Case, depth: int, block: Block) -> float:
    """What a fixed depth gives one request: over the text of a block, where rates change over its rounds."""
    is_changing, most = len(case.rates) > 1, block.rounds * (depth + 1)
    last = max(max(end, start + most) for start, end in block.spans) + depth + 1
    hashes = position_hash(torch.arange(last + 1)).tolist()
    num_tokens = num_rounds = 0
    for start, end in block.spans:
        at, number = start, 0
        while number < block.rounds if is_changing else at < end:
            limit, kept = round(case.rate(number) * 2**16), 0
            while kept < depth and hashes[at + kept + 1] < limit:
                kept += 1
            at += kept + 1
            number += 1
        num_tokens += at - start
        num_rounds += number
    return num_tokens / num_rounds


def what_auto_chose(bench: Bench) -> dict[str, Any]:
    """Of the case so far."""
    counts, controller = bench.policy.rounds(), bench.policy.controller
    return {
        "rounds_by_depth": {depth: sum(why.values()) for depth, why in counts.items()},
        "switches": controller.num_switches,
        "probes": controller.num_probes,
        "retries": controller.num_retries,
    }


def time_texts(bench: Bench, case: Case, ways: list[Way], max_tokens: int, seconds: float) -> dict[str, Any]:
    """Blocks of every way by turns, at least one turn, and no new turn once the time would be over."""
    bench.begin_case()
    for way in ways:
        # Untimed, and of auto not the rounds in which it learns what the machine takes.
        bench.decode(way, case, WARM_UP_ROUNDS, max_tokens)
    begin, turns = time.perf_counter(), 0
    while not turns or (time.perf_counter() - begin) * (turns + 1) / turns < seconds:
        for index in range(len(ways)):
            way = ways[(index + turns) % len(ways)]
            way.speeds.append(bench.decode(way, case, None, max_tokens).speed)
        turns += 1
    auto, *fixed = ways
    medians = {way.name: statistics.median(way.speeds) for way in ways}
    best = max(fixed, key=lambda way: medians[way.name])
    row = {
        "case": case.name,
        "tokens_per_s": {name: round(speed, 1) for name, speed in medians.items()},
        "best": best.name,
        "auto_over_best": _ratio(auto, best),
        "turns": turns,
    }
    none = [way for way in fixed if way.depth == 0]
    row |= {"auto_over_none": _ratio(auto, none[0])} if none else {}
    return row | what_auto_chose(bench)


def _ratio(one: Way, other: Way) -> float:
    return round(statistics.median(a / b for a, b in zip(one.speeds, other.speeds, strict=True)), 3)


def plot(rows: list[Mapping[str, Any]] | list[dict[str, Any]], file: Path) -> None:
    """Draw the tokens a second of every case as bars, a colour a way."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2 + 1.4 * len(rows), 4), layout="constrained")
    names = list(rows[0]["tokens_per_s"])
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        speeds = [row["tokens_per_s"][name] / max(row["tokens_per_s"].values()) for row in rows]
        label = name if name == "auto" else f"depth {name}"
        axes.bar([place + index * width for place in range(len(rows))], speeds, width, label=label)
    labels = [f"{row['case']}\nbatch {row['batch']}" for row in rows]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))], labels)
    axes.set_ylabel("tokens/s, of the fastest")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
