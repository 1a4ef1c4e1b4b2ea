"""What drafts from the text gain on edits and cost on other texts: tokens per round and per second, with and
without.

    python tools/bench_engine.py lookup --shape 4b --device cuda --mtp-step 3
    python tools/bench_engine.py lookup --shape tiny --device cpu --texts 20 --most-tokens 400 --rates 2.6
    python tools/bench_engine.py lookup --kind prose,random --batch 8,32 --shape 4b --device cuda
    python tools/bench_engine.py lookup --save-edits edits.jsonl --texts 200     # then --edits edits.jsonl

Edits: the prompt holds an old version of a file from this repository's history, and the output is forced to
be the new one. Prose: both are real text, one part of a file after the other. Random: both are random ids.
Looked-up drafts are compared with the forced ids. A chain's drafts are kept by a hash, each so often that a
chain of three alone gives --rates tokens per round on average; --own-chain compares the model's own drafts
too. "none" is a chain that is never right: what the text gives by itself. Texts are in the ids of the
tokenizer that ships, for every shape. Tokens per second count the steps in which --batch texts are decoded.
Rows go to stderr as soon as they are known.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.plan import Admit, StepPlan
from compiled_mtp.request import RequestMetrics, SamplingParams
from compiled_mtp.runner import spec
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("edits", "prose", "random")
LOOKUPS = ("off", "auto")
QUESTION = "\n# The same file after the change:\n"
LEAST_TOKENS = 60
# The chain whose tokens per round --rates names.
RATED_DEPTH = 3


class Edit(NamedTuple):
    """A file before and after a commit."""

    old: str
    new: str


class Text(NamedTuple):
    """A prompt and the output that is forced after it."""

    prompt: list[int]
    output: list[int]


class Speed(NamedTuple):
    """A group of texts: tokens and seconds of the steps in which all were decoded; what each request took."""

    tokens: int
    seconds: float
    metrics: list[RequestMetrics]


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the parser of a flag that lists some of `names`."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(names):
            raise argparse.ArgumentTypeError(f"must name some of {', '.join(names)}, got {text!r}")
        return found

    return parse


def chains(text: str) -> dict[str, float | None]:
    """Parse the flag --rates: acceptance rates by name."""
    names = text.split(",")
    return {name: 0.0 if name == "none" else rate_for(float(name), RATED_DEPTH) for name in names}


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser, may_be_auto=True)
    common.add_clock_flag(parser)
    parser.add_argument("--kind", type=some_of(KINDS), default=["edits"], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--texts", type=count, default=200, help="how many of each kind")
    parser.add_argument("--batch", type=common.numbers, default=[1], help="texts decoded at a time")
    parser.add_argument("--max-batch", type=count, help="slots; default: the largest --batch")
    parser.add_argument(
        "--lookup", type=some_of(LOOKUPS), default=[*LOOKUPS], help=f"of {', '.join(LOOKUPS)}"
    )
    parser.add_argument("--most-tokens", type=count, default=2000, help="of prompt or output")
    parser.add_argument(
        "--most-output", type=count, help="decode so many tokens from a random place of each output on"
    )
    parser.add_argument(
        "--rates",
        type=chains,
        default=chains("none,2.6,3.3,3.7"),
        help="tokens per round of a chain of three alone, or none",
    )
    parser.add_argument("--own-chain", action="store_true", help="compare the model's own drafts, too")
    parser.add_argument(
        "--at-depth", type=int, help="with --mtp-step auto: the depth of every round, so that engines agree"
    )
    parser.add_argument(
        "--tuning", action="store_true", help="take the half of the edits that thresholds may be tuned on"
    )
    parser.add_argument("--edits", type=Path, metavar="FILE", help="read edits from a file of --save-edits")
    parser.add_argument("--save-edits", type=Path, metavar="FILE", help="only write the edits into a file")


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def find_edits(rng: random.Random, *, is_tuning: bool) -> Iterator[Edit]:
    """Yield old and new versions of Python files from the history, in random order: half of all edits."""
    found, commit = [], ""
    listed = ("log", "--no-merges", "--diff-filter=M", "--name-only", "--format=:%H", "--", "*.py")
    for line in git(*listed).splitlines():
        if line.startswith(":"):
            commit = line[1:]
        elif line:
            digest = hashlib.sha256(f"{commit}{line}".encode()).digest()
            if digest[0] % 2 == is_tuning:
                found.append((commit, line))
    rng.shuffle(found)
    for commit, path in found:
        yield Edit(git("show", f"{commit}^:{path}"), git("show", f"{commit}:{path}"))


def choose_edits(flags: argparse.Namespace, tokenizer: Tokenizer) -> list[Edit]:
    """Return --texts edits of at most --most-tokens. Raises AssertionError if there are fewer."""
    if flags.edits is None:
        every = find_edits(random.Random(0), is_tuning=flags.tuning)
    else:
        every = (Edit(**json.loads(line)) for line in flags.edits.read_text(encoding="utf-8").splitlines())
    chosen = []
    for edit in every:
        sizes = [len(tokenizer.encode(text)) for text in (edit.old + QUESTION, edit.new)]
        if max(sizes) <= flags.most_tokens and sizes[1] >= LEAST_TOKENS:
            chosen.append(edit)
        if len(chosen) == flags.texts:
            return chosen
    raise AssertionError(f"there are {len(chosen)} such edits; lower --texts or raise --most-tokens")


def make_texts(
    kind: str, flags: argparse.Namespace, edits: Sequence[Edit], tokenizer: Tokenizer, vocab_size: int
) -> list[Text]:
    """Return the texts of a kind; ids beyond a small vocabulary are folded into it."""

    def encode(text: str) -> list[int]:
        return [token_id % vocab_size for token_id in tokenizer.encode(text)]

    rng, most = random.Random(0), flags.most_tokens
    if kind == "edits":
        texts = [Text(encode(edit.old + QUESTION), encode(edit.new)) for edit in edits]
    else:
        words = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        ids = encode(words)
        if kind == "random":
            ids = [rng.randrange(vocab_size) for _ in range(max(len(ids), 4 * most))]
        begins = [rng.randrange(len(ids) - 2 * most) for _ in range(flags.texts)]
        texts = [Text(ids[at : at + most], ids[at + most : at + 2 * most]) for at in begins]
    if flags.most_output is None:
        return texts
    cut = []
    for prompt, output in texts:
        at = rng.randrange(max(len(output) - flags.most_output, 0) + 1)
        cut.append(Text(prompt + output[:at], output[at : at + flags.most_output]))
    return cut


def force_outputs(engine: Engine) -> dict[int, Text]:
    """Return a mapping, empty at first: the engine, made for scoring, forces the output of the request with
    seed n to that of entry n."""
    texts: dict[int, Text] = {}
    carry_out, slots = engine.runner.moves.carry_out, engine.runner.step.slots
    assert slots.forced_ids is not None
    forced = slots.forced_ids

    def force(plan: StepPlan) -> tuple[int, ...]:
        failed = carry_out(plan)
        for move in plan.moves:
            if isinstance(move, Admit):
                prompt, output = texts[move.sampling.seed]
                ids = torch.tensor(output, dtype=torch.int32)
                forced[move.slot, len(prompt) : len(prompt) + len(ids)] = ids.to(forced.device)
        return failed

    engine.runner.moves.carry_out = force  # type: ignore[method-assign]
    return texts


def open_engine(flags: argparse.Namespace, lookup: str) -> tuple[Engine, dict[int, Text]]:
    """Return an engine, and what forces its outputs."""
    # Scoring forces outputs. Without its own rounds, whose rings have 32 entries, rings are those of users.
    with patch.object(spec, "_GIVEN_DRAFTS", ()):
        engine = common.open_engine(
            flags,
            kind=Engine,
            max_batch=flags.max_batch or max(flags.batch),
            max_model_len=2 * flags.most_tokens + 64,
            lookup=lookup,
            scoring=True,
            synthetic_acceptance=0.0,
        )
    if flags.at_depth is not None:
        assert flags.mtp_step == "auto", f"--at-depth needs --mtp-step auto, got {flags.mtp_step}"
        assert engine._steps.depths is not None
        engine._steps.depths.controller.choose = lambda *_: flags.at_depth  # type: ignore[method-assign]
    return engine, force_outputs(engine)


def decode(
    engine: Engine,
    forced: dict[int, Text],
    group: Sequence[Text],
    rate: float | None,
    clock: Callable[[], float],
) -> Speed:
    """Decode texts together with a chain of that rate, None for the model's own.

    Raises AssertionError for other tokens.
    """
    engine.runner.step.accept_at(rate)
    forced.clear()
    forced.update(enumerate(group))
    for index, text in enumerate(group):
        params = SamplingParams(max_tokens=len(text.output), temperature=0.0, ignore_eos=True, seed=index)
        engine.add_request(prompt_token_ids=text.prompt, params=params, request_id=str(index))
    made: dict[str, list[int]] = {str(index): [] for index in forced}
    metrics, tokens, seconds = list[RequestMetrics](), 0, 0.0
    while engine.has_unfinished_requests():
        are_all_decoded, begin = all(made.values()) and not metrics, clock()
        outputs = engine.step()
        took = clock() - begin
        for output in outputs:
            made[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                metrics.append(output.metrics)
        if are_all_decoded:
            tokens, seconds = tokens + sum(len(output.new_token_ids) for output in outputs), seconds + took
    assert all(made[str(index)] == text.output for index, text in enumerate(group)), (
        "the output is not the forced one"
    )
    return Speed(tokens, seconds, metrics)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Decode every text in every way."""
    tokenizer = Tokenizer(EngineConfig().model)
    edits = choose_edits(flags, tokenizer) if "edits" in flags.kind else []
    if flags.save_edits is not None:
        lines = "".join(json.dumps(edit._asdict()) + "\n" for edit in edits)
        flags.save_edits.write_text(lines, encoding="utf-8")
        return {"edits": len(edits), **sizes(edits)}
    engines = {lookup: open_engine(flags, lookup) for lookup in flags.lookup}
    engine = next(iter(engines.values()))[0]
    rates = {"none": 0.0, "own": None} if flags.own_chain else flags.rates
    ways = [(name, lookup) for name in rates for lookup in engines if (name, lookup) != ("none", "off")]
    rows = []
    for kind in flags.kind:
        texts = make_texts(kind, flags, edits, tokenizer, engine.model_config.vocab_size)
        for batch in flags.batch:
            groups = [texts[at : at + batch] for at in range(0, len(texts) - batch + 1, batch)]
            found: dict[tuple[str, str], list[Speed]] = {way: [] for way in ways}
            for turn, group in enumerate(groups):
                for name, lookup in common.in_turn(ways, turn):
                    decoded = decode(*engines[lookup], group, rates[name], common.clock(flags))
                    found[name, lookup].append(decoded)
            for (name, lookup), speeds in found.items():
                case = {"kind": kind, "batch": batch, "texts": len(groups) * batch, "chain": name}
                rows.append(case | {"lookup": lookup} | row(speeds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    line = {
        "shape": flags.shape or flags.model.name,
        "device": common.device_name(engine),
        "mtp_step": flags.mtp_step,
        "max_drafts": max(engine.runner.spec.max_drafts for engine, _ in engines.values()),
        "rows": rows,
    }
    for engine, _ in engines.values():
        engine.close()
    return line | (sizes(edits) if edits else {})


def sizes(edits: Sequence[Edit]) -> dict[str, Any]:
    """Return how large the edits are: quartiles of the lines, and edits that only add lines."""
    counts: dict[str, list[int]] = {"removed": [], "added": []}
    for edit in edits:
        lines = list(difflib.ndiff(edit.old.splitlines(), edit.new.splitlines()))
        for name, sign in (("removed", "-"), ("added", "+")):
            counts[name].append(sum(line.startswith(sign) for line in lines))
    quartiles = {
        f"{name}_lines": statistics.quantiles(found, n=4) if len(found) > 1 else found
        for name, found in counts.items()
    }
    return quartiles | {"only_insertions": counts["removed"].count(0)}


def row(speeds: Sequence[Speed]) -> dict[str, Any]:
    """Return the sums of one way. Raises AssertionError if no step decoded every text of a group."""
    every = [metrics for speed in speeds for metrics in speed.metrics]
    rounds, tokens = sum(m.rounds for m in every), sum(m.output_tokens - 1 for m in every)
    seconds = sum(speed.seconds for speed in speeds)
    assert seconds, "texts end before others begin; lower --batch or raise --most-output"
    return {
        "tokens_per_round": round(tokens / rounds, 3),
        "tokens_per_s": round(sum(speed.tokens for speed in speeds) / seconds, 1),
        "lookup_rounds": sum(m.lookup_rounds for m in every),
        "lookup_drafted": sum(m.lookup_drafted for m in every),
        "lookup_accepted": sum(m.lookup_accepted for m in every),
        "rounds": rounds,
    }
