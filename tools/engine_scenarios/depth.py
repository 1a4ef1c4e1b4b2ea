"""Throughput of mtp_step "auto" over the best fixed depth and over none.

    python tools/bench_engine.py depth --cpu-time --seconds 300               # the checkpoint that ships
    python tools/bench_engine.py depth --shape 4b --accept 1.1,2.6,3.3,change --batches 1,8,32     # a GPU

Texts are code, prose and random ids, greedy. Each way, auto and the fixed depths, has an engine of its own,
as its user would; they take turns of TURN_TOKENS tokens of the same text, so that what a neighbour of the
machine slows down is all of them. Every block of --max-tokens is another text.

--accept names synthetic acceptances instead, as mean tokens a round at depth 3, on one engine; "change" goes
from 3.3 to 1.1 and back every 200 rounds. In a turn auto has 25 rounds and every fixed depth 5, after two
that do not count; --rounds is how many auto has in a case. How long a fixed depth would have taken for the
text that auto decoded in the turn is computed, from its rounds' time there and then and the hash that decides
what is kept. Where a round of auto verified what was no draft, nothing beyond its drafts counts. On a GPU
the first depth is compiled and the others are captured as they are, as in any engine; with --graph-mode
uncompiled the first is too, so that every depth pays for it alike and the start takes seconds.

In either case auto learns first, for rounds that do not count. --seconds bounds the whole run, its start
included: cases share what is left. A ratio is of all turns' seconds, with the interval that 95 % of
resampled turns give; the median turn is printed beside it, but is not to be quoted: what auto loses in few
turns is no part of it. Before anything is timed the tokens of auto must be those of depth 0. Every record is
printed when it is made, and all of them in the last line; tools/plot.py draws them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_step import rate_for

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.ops.window.reference import position_hash
from compiled_mtp.plan import StepResult
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.spec.policy import DepthPolicy
from engine_scenarios import common

ROOT = Path(__file__).resolve().parents[2]
AUTO = "auto"
TEXTS = ("code", "prose", "random ids")
CHANGE_ROUNDS, CHANGE_ACCEPTS, NUM_CHANGES = 200, (3.3, 1.1), 3
PROMPT_TOKENS, CHECKED_TOKENS, WARM_UP_ROUNDS = 48, 40, 64
# Of texts, the tokens of a request in a turn.
TURN_TOKENS = 24
# Of synthetic acceptance, rounds of a turn; after so many turns other requests begin, so that contexts stay
# in the shortest class.
AUTO_ROUNDS, FIXED_ROUNDS, SKIPPED_ROUNDS, BLOCK_TURNS = 25, 5, 2, 8
RESAMPLED = 2000


@dataclass(frozen=True)
class Case:
    """What is decoded: prompts by the number of the block, or rates of synthetic acceptance, each for some
    rounds in turn."""

    name: str
    batch: int
    prompts: Callable[[int], list[list[int]]]
    rates: tuple[float, ...] = ()

    def rate(self, rounds: int) -> float:
        """The rate after so many rounds of auto."""
        return self.rates[rounds // CHANGE_ROUNDS % len(self.rates)]


@dataclass(frozen=True)
class Stretch:
    """What one way did in a turn: rounds, seconds, tokens that count, and (slot, position before, position
    after) of each request."""

    rounds: int
    seconds: float
    num_tokens: int
    spans: list[tuple[int, int, int]]


@dataclass
class Turns:
    """Of every turn the tokens of its text, and each way's seconds for it."""

    tokens: list[int]
    seconds: dict[str, list[float]]

    def ratio(self, way: str) -> dict[str, Any]:
        """The throughput of auto over that of `way`."""
        pairs = list(zip(self.seconds[way], self.seconds[AUTO], strict=True))
        chance, found = random.Random(0), []
        for _ in range(RESAMPLED):
            theirs, mine = zip(*chance.choices(pairs, k=len(pairs)), strict=True)
            found.append(sum(theirs) / sum(mine))
        found.sort()
        whole = sum(theirs for theirs, _ in pairs) / sum(mine for _, mine in pairs)
        interval = [round(found[round(share * (RESAMPLED - 1))], 3) for share in (0.025, 0.975)]
        median = statistics.median(theirs / mine for theirs, mine in pairs)
        return {"ratio": round(whole, 3), "interval_95": interval, "median_turn": round(median, 3)}

    def row(self, case: Case) -> dict[str, Any]:
        """The record of a case."""
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
    """A runner with every depth of its config ready, and a scheduler whose depths come from the way that is
    tried: the number of drafts, or AUTO."""

    def __init__(self, config: EngineConfig, shape: str | None, clock: Callable[[], float]) -> None:
        model = common.shape_config(shape) if shape is not None else read_model_config(config.model)
        fill = None if shape is None else common.fill_same
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
            max_batch=config.max_batch,
            num_blocks=self.runner.memory.num_blocks,
            block_size=config.block_size,
            max_model_len=self.runner.memory.max_model_len,
            prefill_chunk=spec.prefill_chunk,
            mtp_step=spec.mtp_step,
            max_in_flight=spec.max_in_flight,
        )
        self.scheduler = Scheduler(limits, depth=self._choose)
        self.requests: list[Request] = []
        self._rounds = self._num_tokens = 0
        self._rate: float | None = config.synthetic_acceptance

    def forget_what_was_learnt(self) -> None:
        """Let auto begin anew."""
        self.policy = DepthPolicy(self._depths, self._sizes, self.clock)

    def begin(self, way: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Prefill requests in the place of those before; they are to be left before they have max_tokens."""
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

    def advance(
        self,
        way: str,
        *,
        rounds: int | None = None,
        num_tokens: int = 0,
        skipped: int = 0,
        rate: float | None = None,
    ) -> Stretch:
        """Decode in one way: `rounds` behind those that are skipped, with the next one launched meanwhile; or
        until there are so many tokens, with nothing left in flight."""
        if rate != self._rate:
            self.runner.step.accept_at(rate)
            self._rate = rate
        self.way, self._rounds = way, 0
        while self._rounds < skipped:
            self._step()
        self._rounds = self._num_tokens = 0
        before, begin = self._positions(), self.clock()
        while self._rounds < rounds if rounds is not None else self._num_tokens < num_tokens:
            self._step()
        if rounds is None:
            self._drain()
        seconds, after = self.clock() - begin, self._positions()
        spans = [(slot, pos, after[slot]) for slot, pos in before.items()]
        found = Stretch(self._rounds, seconds, self._num_tokens, spans)
        self._drain()
        return found

    def token_ids(self) -> list[list[int]]:
        """All tokens of each request so far."""
        return [list(one.output_token_ids) for one in self.requests]

    def _positions(self) -> dict[int, int]:
        """Of each slot's last token."""
        running = self.scheduler.running.items()
        found = {slot: one.prompt_len + len(one.output_token_ids) - 1 for slot, one in running}
        assert len(found) == len(self.requests), "requests ended before they were to"
        return found

    def _step(self) -> None:
        """One step as `Engine` makes it."""
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
            self._rounds += 1
            most = result.plan.num_drafts + 1 if self._rate is not None else 99
            self._num_tokens += sum(min(len(new), most) for new in result.token_ids)

    def _choose(self, num_requests: int, context_tokens: int, is_halved: bool) -> int:
        if self.way != AUTO:
            return int(self.way)
        return self.policy.choose(num_requests, context_tokens, is_halved)


def texts(text: str) -> list[str]:
    """A flag's names of TEXTS, by commas."""
    names = text.split(",")
    if wrong := [name for name in names if name not in TEXTS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(TEXTS)}, got {', '.join(wrong)}; correct it")
    return names


def accepts(text: str) -> dict[str, tuple[float, ...]]:
    """A flag's mean tokens a round, or "change", by commas: the rates of each, which follow one another."""
    found = {}
    for name in text.split(","):
        try:
            means = CHANGE_ACCEPTS if name == "change" else (float(name),)
            found[name] = tuple(rate_for(mean, 3) for mean in means)
        except ValueError as error:
            rule = f"must hold mean tokens a round, or change, got {name!r}: {error}"
            raise argparse.ArgumentTypeError(rule) from error
    return found


def whole_turns(text: str) -> int:
    """A flag's number of tokens that a turn does not exceed."""
    if (number := common.count(text)) < TURN_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at least {TURN_TOKENS}, those of a turn, got {number}")
    return number


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    common.add_clock_flag(parser)
    parser.set_defaults(graph_mode="replay")
    parser.add_argument("--texts", type=texts, default=TEXTS, help="which, by commas")
    parser.add_argument(
        "--first-text",
        type=int,
        default=0,
        help="number of the first: runs side by side can have others each",
    )
    parser.add_argument(
        "--accept", type=accepts, default={}, help="synthetic: mean tokens a round, or change, by commas"
    )
    parser.add_argument("--batches", type=common.numbers, default=[1])
    parser.add_argument("--depths", type=common.numbers, default=[0, 1, 2, 3, 5], help="what auto may choose")
    parser.add_argument(
        "--fixed",
        type=common.numbers,
        help="depths to compare with, by commas; default: 0,3 for texts, else --depths",
    )
    parser.add_argument("--rounds", type=int, default=200, help="of auto in a case of synthetic acceptance")
    parser.add_argument("--max-tokens", type=whole_turns, default=240, help="of a block of a text")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the whole run, its start included")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check, time every case, and print a record of each."""
    end_s = time.perf_counter() + flags.seconds
    fixed = flags.fixed or (flags.depths if flags.accept else [0, 3])
    cases = [make_case(name, batch, flags) for batch in flags.batches for name in flags.accept or flags.texts]
    benches = {AUTO: make_bench("auto", flags)}
    check(benches[AUTO], make_case("random ids", 1, flags), flags.depths)
    if not flags.accept:
        benches |= {str(depth): make_bench(depth, flags) for depth in fixed}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        share_s = (end_s - time.perf_counter()) / (len(cases) - number)
        bench = benches[AUTO]
        bench.forget_what_was_learnt()
        if flags.accept:
            rounds = flags.rounds if len(case.rates) == 1 else NUM_CHANGES * CHANGE_ROUNDS
            turns, found = time_acceptance(bench, case, fixed, rounds, share_s)
        else:
            turns, found = time_texts(benches, case, flags.max_tokens, share_s), {}
        rows.append(turns.row(case) | found | what_auto_chose(bench))
        print(json.dumps(rows[-1]), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"device": device, "model": flags.shape or flags.model.name, "cases": rows}


def make_bench(mtp_step: int | str, flags: argparse.Namespace) -> Bench:
    """The engine of one way, or of all of them."""
    batch, width = max(flags.batches), max(flags.depths) + 1
    max_model_len, block_size = most_tokens(flags) + PROMPT_TOKENS + 2 * width, EngineConfig().block_size
    given = common.settings(flags) | {
        "mtp_step": mtp_step,
        "mtp_depths": ",".join(map(str, flags.depths)),
        "max_batch": batch,
        "max_model_len": max_model_len,
        # No more than they need, for engines stand side by side.
        "num_blocks": batch * (max_model_len // block_size + 2) + 1,
        "prefill_chunk": 64,
        "synthetic_acceptance": 0.0 if flags.accept else None,
    }
    if torch.cuda.is_available():
        given |= {"batch_sizes": tuple(flags.batches), "graph_mode": "replay"}
    return Bench(EngineConfig(**given), flags.shape, common.clock(flags))


def most_tokens(flags: argparse.Namespace) -> int:
    """What no request of a block reaches; the earlier ones decode while later ones are prefilled."""
    batch, width = max(flags.batches), max(flags.depths) + 1
    if not flags.accept:
        return int(2 * flags.max_tokens + batch * width)
    ways = len(flags.fixed or flags.depths)
    turn = AUTO_ROUNDS + ways * (FIXED_ROUNDS + 1) + (ways + 1) * (SKIPPED_ROUNDS + 1)
    return int((WARM_UP_ROUNDS + BLOCK_TURNS * turn + batch) * width)


def check(bench: Bench, case: Case, depths: Sequence[int]) -> None:
    """Raise AssertionError unless auto gives depth 0's tokens, also with another depth every second round."""

    def decode(way: str) -> list[int]:
        bench.begin(way, case.prompts(0), 2 * CHECKED_TOKENS)
        bench.advance(way, num_tokens=CHECKED_TOKENS - 1)
        return bench.token_ids()[0][:CHECKED_TOKENS]

    expected = decode("0")
    assert decode(AUTO) == expected, "tokens depend on the depth"
    steps = iter(range(1 << 20))
    bench.policy.controller.choose = lambda bucket, context: depths[next(steps) // 2 % len(depths)]  # type: ignore[method-assign]
    assert decode(AUTO) == expected, "tokens depend on switches"


def make_case(name: str, batch: int, flags: argparse.Namespace) -> Case:
    """The case of a text or of a synthetic acceptance."""
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


def time_texts(benches: Mapping[str, Bench], case: Case, max_tokens: int, seconds: float) -> Turns:
    """Every way decodes the same texts, by turns; no new text once the time would be over."""
    turns = Turns([], {way: [] for way in benches})
    begin, block = time.perf_counter(), 0
    # The first text is not timed: auto learns what the machine takes.
    while block < 2 or (time.perf_counter() - begin) * (block + 1) / block < seconds:
        for way, bench in benches.items():
            bench.begin(way, case.prompts(block), 2 * max_tokens + case.batch)
        for turn in range(max_tokens // TURN_TOKENS):
            for way in common.in_turn(list(benches), turn):
                found = benches[way].advance(way, num_tokens=TURN_TOKENS * case.batch)
                if block:
                    # What a round gives beyond the turn's text costs its part of the time.
                    share = TURN_TOKENS * case.batch / found.num_tokens
                    turns.seconds[way].append(found.seconds * share)
            turns.tokens += [TURN_TOKENS * case.batch] * (block > 0)
        for streams in zip(*(bench.token_ids() for bench in benches.values()), strict=True):
            least = min(map(len, streams))
            assert len({tuple(stream[:least]) for stream in streams}) == 1, "tokens depend on the depth"
        block += 1
    return turns


def time_acceptance(
    bench: Bench, case: Case, fixed: Sequence[int], rounds: int, seconds: float
) -> tuple[Turns, dict[str, Any]]:
    """Turns of auto and of every fixed depth, until auto has had its rounds or the time would be over; and
    the milliseconds of the fixed depths' rounds."""
    turns, spent = Turns([], {AUTO: [], **{str(depth): [] for depth in fixed}}), dict.fromkeys(fixed, 0.0)
    begin, done, most = time.perf_counter(), 0, 10**6
    bench.begin(AUTO, case.prompts(0), most)
    bench.advance(AUTO, rounds=min(WARM_UP_ROUNDS, rounds), rate=case.rate(0))
    while done * AUTO_ROUNDS < rounds:
        if done and (time.perf_counter() - begin) * (done + 1) / done > seconds:
            break
        if done and done % BLOCK_TURNS == 0:
            bench.begin(AUTO, case.prompts(done), most)
        rate = case.rate(done * AUTO_ROUNDS)
        found: dict[str, Stretch] = {}
        for way in common.in_turn(list(turns.seconds), done):
            counted = AUTO_ROUNDS if way == AUTO else FIXED_ROUNDS
            found[way] = bench.advance(way, rounds=counted, skipped=SKIPPED_ROUNDS, rate=rate)
        auto = found[AUTO]
        text = sum(after - before for _, before, after in auto.spans)
        turns.tokens.append(text)
        # Positions that a round has gained by what was no draft are text that is still to be decoded.
        turns.seconds[AUTO].append(auto.seconds * text / auto.num_tokens)
        for depth in fixed:
            one = found[str(depth)]
            round_s = one.seconds / one.rounds
            spent[depth] += round_s
            turns.seconds[str(depth)].append(round_s * rounds_of(depth, rate, auto.spans) / case.batch)
        done += 1
    return turns, {"ms_by_depth": {depth: round(1e3 * sum_s / done, 3) for depth, sum_s in spent.items()}}


def rounds_of(depth: int, rate: float, spans: Sequence[tuple[int, int, int]]) -> float:
    """Rounds that requests of a fixed depth need for texts, all together; the last ones in part."""
    total, limit = 0.0, round(rate * 2**16)
    for slot, start, end in spans:
        hashes = position_hash(torch.arange(start, end + depth + 1), slot).tolist()
        at = rounds = 0
        while at < end - start:
            kept = 0
            while kept < depth and hashes[at + kept + 1] < limit:
                kept += 1
            at += kept + 1
            rounds += 1
        total += rounds * (end - start) / at
    return total


def what_auto_chose(bench: Bench) -> dict[str, Any]:
    """Of the case so far, what it learnt from included."""
    counts, controller = bench.policy.rounds(), bench.policy.controller
    return {
        "rounds_by_depth": {depth: sum(why.values()) for depth, why in counts.items()},
        "switches": controller.num_switches,
        "probes": controller.num_probes,
        "retries": controller.num_retries,
    }
