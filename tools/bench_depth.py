"""Throughput of mtp_step "auto" over the best fixed depth and over none, in alternating runs of one process.

    python tools/bench_depth.py --seconds 300 --plot depth.png            # the checkpoint that ships
    python tools/bench_depth.py --accept 1.1,2.1,2.6,3.3 --batches 1,8,32 --shape 4b     # a GPU

Texts are code, prose and random ids, greedy. --accept names synthetic acceptances instead, as mean tokens a
round at depth 3; "change" goes from 3.3 to 1.1 and back every 200 rounds (uncompiled only: a compiled round
has its rate inside). A block decodes a batch for --rounds rounds, or to the end of --max-tokens where texts
are compared; blocks of auto and of each fixed depth take turns, and every ratio is of two blocks of the same
turn. Where a synthetic round verified what was no draft, nothing beyond its drafts counts.
Before anything is timed the tokens of auto must be those of depth 0; else nothing is printed. Ends in one
JSON line: medians, and the ratios' medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_step import fill_random, model_config, rate_for

from compiled_mtp.config import EngineConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
CHANGE_ROUNDS, CHANGE_ACCEPTS = 200, (3.3, 1.1)
PROMPT_TOKENS, CHECKED_TOKENS = 48, 40


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
    """What is decoded: prompts of a text, or synthetic acceptance by the number of the round."""

    name: str
    prompts: list[list[int]]
    accept: Callable[[int], float] | None = None


class Bench:
    """A runner with every depth ready, and a scheduler whose depths come from the way that is tried."""

    def __init__(self, config: EngineConfig, shape: str | None, clock: Callable[[], float]) -> None:
        model = model_config(shape) if shape is not None else read_model_config(config.model)
        fill = None if shape is None else fill_random
        self.runner = Runner(config, model, model.vocab_size, fill=fill)
        programs, depths = self.runner.programs, config.depths
        if programs.is_compiled:
            for depth in depths:
                if depth != first_depth(depths):
                    programs.warm_up(depth=depth)
        sizes = [b.groups for b in programs.buckets if b.verify_step == b.draft_step == first_depth(depths)]
        self._depths, self._sizes = depths, sizes
        self.clock = clock
        self.policy = DepthPolicy(depths, sizes, clock)
        self.way = Way(None)
        self.scheduler = Scheduler(
            max_batch=config.max_batch,
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
            max_model_len=self.runner.max_model_len,
            prefill_chunk=config.prefill_chunk,
            mtp_step=self.runner.step.mtp_step,
            max_in_flight=self.runner.max_in_flight,
            depth=self._choose,
        )
        self.num_rounds = 0

    def begin_case(self) -> None:
        """Forget what was learnt."""
        self.policy = DepthPolicy(self._depths, self._sizes, self.clock)

    def decode(
        self, way: Way, case: Case, rounds: int | None, max_tokens: int
    ) -> tuple[float, list[list[int]]]:
        """Decode the case's prompts together until one ends, or for `rounds`; tokens a second, and tokens."""
        self.way, self.num_rounds = way, 0
        requests = []
        for index, prompt in enumerate(case.prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=index)
            requests.append(Request(f"{index}", prompt, params))
            self.scheduler.add(requests[-1])
        while len(self.scheduler.running) < len(requests):
            self._step(case)
        self.num_rounds = num_tokens = 0
        begin = self.clock()
        while all(one.finish_reason is None for one in requests) and self.num_rounds != rounds:
            num_tokens += self._step(case)
        seconds = self.clock() - begin
        self.scheduler.forget_all()
        while (result := self.runner.run(None)) is not None:
            self.scheduler.update(result)
        self.policy.forget_launches()
        self.scheduler.take_outputs()
        return num_tokens / seconds, [request.output_token_ids for request in requests]

    def _step(self, case: Case) -> int:
        """One step as `Engine` makes it; tokens of the round whose result has come."""
        if case.accept is not None:
            limit = round(rate_for(case.accept(self.num_rounds), 3) * 2**16)
            assert self.runner.step.hash_limit == limit or not self.runner.programs.is_compiled
            self.runner.step.hash_limit = limit
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
        most = result.plan.num_drafts + 1 if case.accept is not None else 99
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
    parser.add_argument("--accept", default="", help="synthetic: mean tokens a round, or change, by commas")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--depths", default="0,1,2,3,5", help="what auto may choose")
    parser.add_argument("--fixed", default="0,3", help="depths to compare with, by commas")
    parser.add_argument("--rounds", type=int, default=400, help="of a block of synthetic acceptance")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a block of a text")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's time, on a CPU that others use too"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for all blocks together")
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
    batches = [int(batch) for batch in arguments.batches.split(",")]
    fixed = [int(depth) for depth in arguments.fixed.split(",")]
    width = max(int(depth) for depth in arguments.depths.split(",")) + 1
    most = arguments.rounds * width if accepts else arguments.max_tokens
    given: dict[str, Any] = {
        "mtp_step": "auto",
        "mtp_depths": arguments.depths,
        "device": arguments.device,
        "compile": arguments.compile,
        "max_batch": max(batches),
        "max_model_len": most + PROMPT_TOKENS + 2 * width,
        "prefill_chunk": 64,
    }
    given |= {"batch_sizes": arguments.batches} if torch.cuda.is_available() else {}
    given |= {"model": arguments.model} if arguments.shape is None else {"model": Path(__file__)}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    bench = Bench(EngineConfig(**given), arguments.shape, clock)
    check(bench, arguments)
    rows = []
    todo = [(accept, batch) for accept in accepts or ("code", "prose", "random ids") for batch in batches]
    for accept, batch in todo:
        if accepts and bench.runner.programs.is_compiled:
            # A compiled round has its rate inside.
            if accept == "change":
                print("change: left out, it needs uncompiled rounds", flush=True)
                continue
            given["synthetic_acceptance"] = rate_for(float(accept), 3)
            del bench
            bench = Bench(EngineConfig(**given), arguments.shape, clock)
        case = make_case(accept, batch, arguments)
        ways = [Way(None), *map(Way, fixed)]
        rounds = arguments.rounds if accepts else None
        share_s = arguments.seconds / len(todo)
        rows.append(time_case(bench, case, ways, rounds, most, share_s) | {"batch": batch})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def check(bench: Bench, arguments: argparse.Namespace) -> None:
    """Raise AssertionError unless auto gives depth 0's tokens, also with another depth every second round."""
    case = make_case("random ids", 1, arguments)
    _, expected = bench.decode(Way(0), case, None, CHECKED_TOKENS)
    assert bench.decode(Way(None), case, None, CHECKED_TOKENS)[1] == expected, "tokens depend on the depth"
    numbers = iter(range(1 << 20))
    depths = [int(depth) for depth in arguments.depths.split(",")]
    bench.policy.controller.choose = lambda bucket, context: depths[next(numbers) // 2 % len(depths)]  # type: ignore[method-assign]
    assert bench.decode(Way(None), case, None, CHECKED_TOKENS)[1] == expected, "tokens depend on switches"


def make_case(name: str, batch: int, arguments: argparse.Namespace) -> Case:
    """The case of a text or of a synthetic acceptance."""
    vocab_size = 1000 if arguments.shape else read_model_config(arguments.model).vocab_size
    generator = torch.Generator().manual_seed(batch)
    random_ids = torch.randint(0, vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    if name == "change":
        return Case(name, random_ids, lambda n: CHANGE_ACCEPTS[n // CHANGE_ROUNDS % 2])
    if name == "random ids":
        return Case(name, random_ids)
    if name in ("code", "prose"):
        file = ROOT / "compiled_mtp" / "engine.py" if name == "code" else ROOT / "docs" / "design.md"
        ids = Tokenizer(arguments.model).encode(file.read_text(encoding="utf-8"))
        return Case(name, [ids[40 * i : 40 * i + PROMPT_TOKENS] for i in range(batch)])
    return Case(f"accept {name}", random_ids, lambda n: float(name))


def time_case(
    bench: Bench, case: Case, ways: list[Way], rounds: int | None, max_tokens: int, seconds: float
) -> dict[str, Any]:
    """Blocks of every way by turns, at least one turn, and no new turn once the time would be over."""
    bench.begin_case()
    for way in ways:
        # Untimed, and of auto not the rounds in which it learns what the machine takes.
        bench.decode(way, case, min(rounds or 64, 64), max_tokens)
    begin, turns = time.perf_counter(), 0
    while not turns or (time.perf_counter() - begin) * (turns + 1) / turns < seconds:
        for index in range(len(ways)):
            way = ways[(index + turns) % len(ways)]
            way.speeds.append(bench.decode(way, case, rounds, max_tokens)[0])
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
        "rounds_by_depth": {d: sum(why.values()) for d, why in bench.policy.rounds().items()},
        "switches": bench.policy.controller.num_switches,
    }
    none = [way for way in fixed if way.depth == 0]
    return row | ({"auto_over_none": _ratio(auto, none[0])} if none else {})


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
