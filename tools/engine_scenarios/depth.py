"""Throughput of mtp_step "auto" over the best fixed depth and over depth 0.

    python tools/bench_engine.py depth --cpu-time --seconds 300               # the checkpoint that ships
    python tools/bench_engine.py depth --shape 4b --accept 1.1,2.6,3.3,change --batches 1,8,32     # a GPU

Texts are code, prose and random ids, decoded greedily. Each way, auto or a fixed depth, has its own engine,
as a user's would. The ways take turns of TURN_TOKENS tokens of the same text, so that other load on the
machine slows all of them. Every block of --max-tokens is another text.

--accept names synthetic acceptances instead, as mean tokens per round at depth 3, on one engine; "change"
goes from 3.3 to 1.1 and back with every block. The ways decode the same block from its start in turn, so that
all keep the same drafts. If a round of auto verifies more than its own drafts, only its own drafts count. On
a GPU the first depth is compiled and the others are captured uncompiled, as in any engine; with --graph-mode
uncompiled the first is captured uncompiled too, so that the depths are alike and the start takes seconds.

The first block does not count, since auto learns in it. --seconds bounds the whole run with its start; the
cases share the time after the start. A ratio compares the seconds of all turns; its interval holds 95 % of
the ratios of resampled turns. Before timing, the tokens of auto are compared with those of depth 0. The tool
prints every record as soon as it is complete, and all of them in the last line; tools/plot.py draws them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.plan import StepResult
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

ROOT = Path(__file__).resolve().parents[2]
AUTO = "auto"
TEXTS = ("code", "prose", "random ids")
CHANGE_ACCEPTS = (3.3, 1.1)
PROMPT_TOKENS, CHECKED_TOKENS = 48, 40
# Tokens of a request in one turn of a text.
TURN_TOKENS = 24
RESAMPLED = 2000


@dataclass(frozen=True)
class Case:
    """What is decoded: prompts by block number, and with --accept the rates of synthetic acceptance."""

    name: str
    batch: int
    prompts: Callable[[int], list[list[int]]]
    rates: tuple[float, ...] = ()


@dataclass
class Turns:
    """The number of tokens of every turn, and each way's seconds for them."""

    tokens: list[int]
    seconds: dict[str, list[float]]

    def ratio(self, way: str) -> dict[str, Any]:
        """Return the throughput of auto over that of `way`, with its interval."""
        pairs = list(zip(self.seconds[way], self.seconds[AUTO], strict=True))
        chance, found = random.Random(0), []
        for _ in range(RESAMPLED):
            theirs, mine = zip(*chance.choices(pairs, k=len(pairs)), strict=True)
            found.append(sum(theirs) / sum(mine))
        found.sort()
        whole = sum(theirs for theirs, _ in pairs) / sum(mine for _, mine in pairs)
        interval = [round(found[round(share * (RESAMPLED - 1))], 3) for share in (0.025, 0.975)]
        return {"ratio": round(whole, 3), "interval_95": interval}

    def row(self, case: Case) -> dict[str, Any]:
        """Return the record of a case."""
        totals = {way: sum(seconds) for way, seconds in self.seconds.items()}
        best = min((way for way in totals if way != AUTO), key=totals.__getitem__)
        row = {
            "case": case.name,
            "batch": case.batch,
            "turns": len(self.tokens),
            "tokens_per_s": {way: round(sum(self.tokens) / total, 1) for way, total in totals.items()},
            "best": best,
            "auto_over_best": self.ratio(best),
        }
        return row | ({"auto_over_none": self.ratio("0")} if "0" in totals else {})


class Bench:
    """A runner with every depth of its config ready, and a scheduler that takes its depths from `way`.

    way: a number of drafts, or AUTO.
    """

    def __init__(
        self, config: EngineConfig, shape: str | None, clock: Callable[[], float], *, is_fp8: bool = False
    ) -> None:
        is_shape = shape is not None
        model = (
            common.shape_config(shape, is_fp8=is_fp8)
            if shape is not None
            else read_model_config(config.model)
        )
        fill = common.fill_same if is_shape else None
        spec = resolve(config, model, model.vocab_size, is_checkpoint=fill is None)
        self.runner = Runner(spec, fill=fill)
        depths, first = config.depths, first_depth(config.depths)
        buckets = self.runner.programs.buckets
        sizes = [b.groups for b in buckets if b.shape == (first, first)]
        self._depths, self._sizes = depths, sizes
        self.clock = clock
        self.policy = DepthPolicy(depths, sizes, clock)
        self.way = AUTO
        limits = Limits(
            max_batch=self.runner.memory.max_batch,
            num_blocks=self.runner.memory.num_blocks,
            block_size=config.block_size,
            max_model_len=self.runner.memory.max_model_len,
            prefill_chunk=spec.prefill_chunk,
            mtp_step=spec.mtp_step,
            max_drafts=spec.max_drafts,
            max_in_flight=spec.max_in_flight,
            max_prompt_chunks=self.runner.programs.most_prompt_chunks,
        )
        self.scheduler = Scheduler(limits, depth=self._choose)
        self.requests: list[Request] = []
        self._num_tokens = 0
        self._rate: float | None = config.synthetic_acceptance

    def forget_what_was_learnt(self) -> None:
        """Reset the policy of auto."""
        self.policy = DepthPolicy(self._depths, self._sizes, self.clock)

    def begin(
        self, way: str, prompts: Sequence[Sequence[int]], max_tokens: int, rate: float | None = None
    ) -> None:
        """Replace the requests by new, prefilled ones; stop stepping before they reach max_tokens."""
        if rate != self._rate:
            self.runner.step.accept_at(rate)
            self._rate = rate
        self.scheduler.forget_all()
        self._drain()
        self.policy.forget_launches()
        self.scheduler.take_outputs()
        self.way, self.requests = way, []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=index)
            self.requests.append(Request(f"{index}", list(prompt), params))
            self.scheduler.limits.fit(self.requests[-1])
            self.scheduler.add(self.requests[-1])
        while len(self.scheduler.running) < len(self.requests):
            self._step()
        self._drain()

    def advance(self, way: str, num_tokens: int) -> float:
        """Return the seconds in which `way` decodes num_tokens tokens; leaves nothing in flight.

        The last round may give more tokens: the time is scaled down to num_tokens.
        """
        self.way, self._num_tokens, begin = way, 0, self.clock()
        while self._num_tokens < num_tokens:
            self._step()
        self._drain()
        seconds = self.clock() - begin
        assert len(self.scheduler.running) == len(self.requests), "requests ended before the turn did"
        return seconds * num_tokens / self._num_tokens

    def token_ids(self) -> list[list[int]]:
        """Return all tokens of each request so far."""
        return [list(one.output_token_ids) for one in self.requests]

    def _step(self) -> None:
        """Run one step as `Engine` does."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.policy.launch(plan)
        result = self.runner.run(plan)
        if result is not None:
            self._take(result)

    def _drain(self) -> None:
        while (result := self.runner.run(None)) is not None:
            self._take(result)

    def _take(self, result: StepResult) -> None:
        assert result.error is None, result.error
        if self.way == AUTO:
            self.policy.read(result)
        self.scheduler.update(result)
        if result.plan.kind == "decode":
            most = result.plan.num_drafts + 1 if self._rate is not None else 99
            self._num_tokens += sum(min(len(new), most) for new in result.token_ids)

    def _choose(self, num_requests: int, context_tokens: int, is_two_phase: bool) -> int:
        if self.way != AUTO:
            return int(self.way)
        return self.policy.choose(num_requests, context_tokens, is_two_phase)


def texts(text: str) -> list[str]:
    """Parse a flag's names of TEXTS, separated by commas."""
    names = text.split(",")
    if wrong := [name for name in names if name not in TEXTS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(TEXTS)}, got {', '.join(wrong)}; correct it")
    return names


def accepts(text: str) -> dict[str, tuple[float, ...]]:
    """Parse mean tokens per round, or "change", separated by commas; return the rates of each by block."""
    found = {}
    for name in text.split(","):
        try:
            means = CHANGE_ACCEPTS if name == "change" else (float(name),)
            found[name] = tuple(rate_for(mean, 3) for mean in means)
        except ValueError as error:
            rule = f"must hold mean tokens per round, or change, got {name!r}: {error}"
            raise argparse.ArgumentTypeError(rule) from error
    return found


def whole_turns(text: str) -> int:
    """Parse a flag's number of tokens, at least those of one turn."""
    if (number := count(text)) < TURN_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at least {TURN_TOKENS}, those of a turn, got {number}")
    return number


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    common.add_clock_flag(parser)
    parser.set_defaults(graph_mode="replay")
    parser.add_argument("--texts", type=texts, default=TEXTS, help="names, separated by commas")
    parser.add_argument(
        "--first-text",
        type=int,
        default=0,
        help="number of the first text, so that parallel runs can use different texts",
    )
    parser.add_argument(
        "--accept",
        type=accepts,
        default={},
        help="synthetic: mean tokens per round, or change, separated by commas",
    )
    parser.add_argument("--batches", type=common.numbers, default=[1])
    parser.add_argument("--depths", type=common.numbers, default=[0, 1, 2, 3, 5], help="what auto may choose")
    parser.add_argument(
        "--fixed",
        type=common.numbers,
        help="depths to compare with, separated by commas; default: 0,3 for texts, else --depths",
    )
    parser.add_argument("--max-tokens", type=whole_turns, default=240, help="per request and block")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the whole run with its start")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check, time every case, and print a record of each."""
    end_s = time.perf_counter() + flags.seconds
    fixed = flags.fixed or (flags.depths if flags.accept else [0, 3])
    cases = [make_case(name, batch, flags) for batch in flags.batches for name in flags.accept or flags.texts]
    auto = make_bench("auto", flags)
    check(auto, make_case("random ids", 1, flags), flags.depths)
    others = {str(depth): auto if flags.accept else make_bench(depth, flags) for depth in fixed}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        share_s = (end_s - time.perf_counter()) / (len(cases) - number)
        auto.forget_what_was_learnt()
        turns = time_case({AUTO: auto} | others, case, flags.max_tokens, share_s)
        rows.append(turns.row(case) | what_auto_chose(auto))
        print(json.dumps(rows[-1]), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"device": device, "model": flags.shape or flags.model.name, "cases": rows}


def make_bench(mtp_step: int | str, flags: argparse.Namespace) -> Bench:
    """Return the engine of one way, or of all ways."""
    batch, width = max(flags.batches), max(flags.depths) + 1
    # The earlier requests of a block decode while later ones are prefilled.
    max_model_len = 2 * flags.max_tokens + batch * width + PROMPT_TOKENS + 2 * width
    block_size = EngineConfig().block_size
    given = common.settings(flags) | {
        "mtp_step": mtp_step,
        "mtp_depths": ",".join(map(str, flags.depths)),
        "max_batch": batch,
        "max_model_len": max_model_len,
        # No more blocks than needed: several engines share the memory.
        "num_blocks": batch * (max_model_len // block_size + 2) + 1,
        # Prompts of many requests share launches, else the first ones gain hundreds of tokens meanwhile.
        "prefill_chunk": 64 if batch <= 32 else 1024,
        "synthetic_acceptance": 0.0 if flags.accept else None,
    }
    if torch.cuda.is_available():
        given |= {"batch_sizes": tuple(flags.batches), "graph_mode": "replay"}
    return Bench(EngineConfig(**given), flags.shape, common.clock(flags), is_fp8=flags.fp8)


def check(bench: Bench, case: Case, depths: Sequence[int]) -> None:
    """Raise AssertionError unless auto gives depth 0's tokens, also with another depth every second round."""

    def decode(way: str) -> list[int]:
        bench.begin(way, case.prompts(0), 2 * CHECKED_TOKENS, rate=case.rates[0] if case.rates else None)
        bench.advance(way, CHECKED_TOKENS - 1)
        return bench.token_ids()[0][:CHECKED_TOKENS]

    expected = decode("0")
    assert decode(AUTO) == expected, "tokens depend on the depth"
    steps = iter(range(1 << 20))
    bench.policy.controller.choose = lambda bucket, context: depths[next(steps) // 2 % len(depths)]  # type: ignore[method-assign]
    assert decode(AUTO) == expected, "tokens depend on switches"


def make_case(name: str, batch: int, flags: argparse.Namespace) -> Case:
    """Return the case of a text or of a synthetic acceptance."""
    vocab_size = 1000 if flags.shape else read_model_config(flags.model).vocab_size
    if name in ("code", "prose"):
        file = ROOT / "compiled_mtp" / "engine.py" if name == "code" else ROOT / "docs" / "design.md"
        ids = Tokenizer(flags.model).encode(file.read_text(encoding="utf-8"))
        starts = range(0, len(ids) - PROMPT_TOKENS, 40)

        def cut(block: int) -> list[list[int]]:
            first = (flags.first_text + block) * batch
            chosen = [starts[(first + index) % len(starts)] for index in range(batch)]
            return [ids[start : start + PROMPT_TOKENS] for start in chosen]

        return Case(name, batch, cut)

    def draw(block: int) -> list[list[int]]:
        rng = random.Random(1000 * (flags.first_text + block) + batch)
        return common.draw_prompts(rng, batch, PROMPT_TOKENS, vocab_size)

    rates = flags.accept.get(name, ())
    return Case(f"accept {name}" if rates else name, batch, draw, rates)


def time_case(benches: Mapping[str, Bench], case: Case, max_tokens: int, seconds: float) -> Turns:
    """Let all ways decode the same texts in turns; start no text that would end after `seconds`."""
    turns = Turns([], {way: [] for way in benches})
    # Ways that share an engine take turns of whole blocks, since each way starts the block again.
    length = max_tokens if case.rates else TURN_TOKENS
    begin, block = time.perf_counter(), 0
    # The first text is not timed: auto learns the machine's times in it.
    while block < 2 or (time.perf_counter() - begin) * (block + 1) / block < seconds:
        rate = case.rates[block % len(case.rates)] if case.rates else None
        for turn in range(max_tokens // length):
            for way in common.in_turn(list(benches), block + turn):
                if turn == 0:
                    benches[way].begin(way, case.prompts(block), 2 * max_tokens + case.batch, rate)
                found = benches[way].advance(way, length * case.batch)
                if block:
                    turns.seconds[way].append(found)
            turns.tokens += [length * case.batch] * (block > 0)
        for streams in zip(*(bench.token_ids() for bench in benches.values()), strict=True):
            least = min(map(len, streams))
            assert len({tuple(stream[:least]) for stream in streams}) == 1, "tokens depend on the depth"
        block += 1
    return turns


def what_auto_chose(bench: Bench) -> dict[str, Any]:
    """Return the depths that auto chose in the case, its first block included."""
    counts, controller = bench.policy.rounds(), bench.policy.controller
    return {
        "rounds_by_depth": {depth: sum(why.values()) for depth, why in counts.items()},
        "switches": controller.num_switches,
        "probes": controller.num_probes,
    }
