"""What drafts from the text gain on edits and cost on prose: tokens per round and per second, with and
without.

    python tools/bench_engine.py lookup --shape 4b --device cuda --mtp-step 3
    python tools/bench_engine.py lookup --shape tiny --device cpu --pairs 20 --most-tokens 400 --rates 2.6
    python tools/bench_engine.py lookup --kind prose --own-chain

Edits: the prompt holds an old version of a file from this repository's history, and the output is forced to
be the new one. Prose: both are real text, one part of a file after the other. Looked-up drafts are compared
with the forced ids. A chain's drafts are kept by a hash, so often that a round of the chain alone gives
--rates tokens on average; --own-chain compares the model's own drafts too. "none" is a chain that is never
right: what the text gives by itself. Texts are in the ids of the tokenizer that ships, for every shape.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.plan import Admit, StepPlan
from compiled_mtp.request import SamplingParams
from engine_scenarios import common

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "\n# The same file after the change:\n"
LEAST_TOKENS = 60


class Text(NamedTuple):
    """A prompt and the output that is forced after it; lines that the edit removes and adds."""

    prompt: list[int]
    output: list[int]
    removed: int = 0
    added: int = 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument("--kind", choices=("edits", "prose"), default="edits")
    parser.add_argument("--pairs", type=common.count, default=200, help="texts")
    parser.add_argument("--most-tokens", type=common.count, default=2000, help="of prompt or output")
    parser.add_argument("--rates", default="2.6,3.3,3.7", help="tokens per round of the chain alone")
    parser.add_argument("--own-chain", action="store_true", help="compare the model's own drafts, too")
    parser.add_argument(
        "--tuning", action="store_true", help="take the half of the edits that thresholds may be tuned on"
    )


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def find_edits(rng: random.Random, *, is_tuning: bool) -> Iterator[tuple[str, str]]:
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
        yield git("show", f"{commit}^:{path}"), git("show", f"{commit}:{path}")


def make_texts(flags: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int) -> list[Text]:
    """Return the texts; ids beyond a small vocabulary are folded into it.

    Raises AssertionError if the history has fewer.
    """

    def encode(text: str) -> list[int]:
        return [token_id % vocab_size for token_id in tokenizer.encode(text)]

    rng, texts, most = random.Random(0), list[Text](), flags.most_tokens
    if flags.kind == "prose":
        words = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        ids = encode(words)
        for _ in range(flags.pairs):
            begin = rng.randrange(len(ids) - 2 * most)
            texts.append(Text(ids[begin : begin + most], ids[begin + most : begin + 2 * most]))
        return texts
    for old, new in find_edits(rng, is_tuning=flags.tuning):
        prompt, output = encode(old + QUESTION), encode(new)
        if max(len(prompt), len(output)) <= most and len(output) >= LEAST_TOKENS:
            lines = list(difflib.ndiff(old.splitlines(), new.splitlines()))
            removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
            texts.append(Text(prompt, output, removed, added))
        if len(texts) == flags.pairs:
            return texts
    raise AssertionError(f"the history has {len(texts)} such edits; lower --pairs or raise --most-tokens")


@functools.cache
def rate_of(tokens: float, depth: int) -> float:
    """Return how often each draft is kept if a chain of `depth` drafts gives `tokens` tokens per round."""
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**k for k in range(depth + 1)) < tokens else (low, rate)
    return low


def open_engine(flags: argparse.Namespace, lookup: str) -> tuple[Engine, list[list[int]]]:
    """Return an engine that forces the output of each request it admits to the next of a list of ids."""
    engine = common.open_engine(
        flags,
        kind=Engine,
        max_batch=1,
        max_model_len=2 * flags.most_tokens + 64,
        lookup=lookup,
        scoring=True,
        synthetic_acceptance=0.0,
    )
    outputs: list[list[int]] = []
    carry_out, slots = engine.runner.moves.carry_out, engine.runner.step.slots
    assert slots.forced_ids is not None
    forced = slots.forced_ids

    def force(plan: StepPlan) -> tuple[int, ...]:
        failed = carry_out(plan)
        for move in plan.moves:
            if isinstance(move, Admit):
                begin, ids = plan.prompt_chunks[0].prompt_len, torch.tensor(outputs[-1], dtype=torch.int32)
                forced[move.slot, begin : begin + len(ids)] = ids.to(forced.device)
        return failed

    engine.runner.moves.carry_out = force  # type: ignore[method-assign]
    return engine, outputs


def decode(engine: Engine, outputs: list[list[int]], text: Text, rate: float | None) -> tuple[float, Any]:
    """Decode a text with a chain of that rate, None for the model's own; return seconds and metrics.

    The seconds are those from the first token to the last. Raises AssertionError for other tokens.
    """
    engine.runner.step.accept_at(rate)
    outputs[:] = [text.output]
    params = SamplingParams(max_tokens=len(text.output), temperature=0.0, ignore_eos=True)
    engine.add_request(prompt_token_ids=text.prompt, params=params)
    tokens, begin, metrics = list[int](), 0.0, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            begin = begin or time.perf_counter()
            tokens += output.new_token_ids
            metrics = output.metrics
    seconds = time.perf_counter() - begin
    assert tokens == text.output, "the output is not the forced one"
    return seconds, metrics


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Decode every text in every way."""
    engines = {lookup: open_engine(flags, lookup) for lookup in ("off", "auto")}
    texts = make_texts(flags, Tokenizer(EngineConfig().model), engines["off"][0].model_config.vocab_size)
    rates: dict[str, float | None] = {"none": 0.0}
    if flags.own_chain:
        rates["own"] = None
    else:
        rates |= {name: rate_of(float(name), flags.mtp_step) for name in flags.rates.split(",")}
    ways = [(name, lookup) for name in rates for lookup in engines if (name, lookup) != ("none", "off")]
    found: dict[tuple[str, str], list[tuple[float, Any]]] = {way: [] for way in ways}
    for turn, text in enumerate(texts):
        for way in common.in_turn(ways, turn):
            name, lookup = way
            found[way].append(decode(*engines[lookup], text, rates[name]))
    line = {
        "kind": flags.kind,
        "shape": flags.shape or flags.model.name,
        "device": common.device_name(engines["off"][0]),
        "mtp_step": flags.mtp_step,
        "texts": len(texts),
        "tokens": sum(len(text.output) for text in texts),
        "rows": [row(name, lookup, results) for (name, lookup), results in found.items()],
    }
    for engine, _ in engines.values():
        engine.close()
    return line | (sizes(texts) if flags.kind == "edits" else {})


def sizes(texts: Sequence[Text]) -> dict[str, Any]:
    """Return how large the edits are: quartiles of the lines, and edits that only add lines."""
    quartiles = {
        name: statistics.quantiles([getattr(text, name) for text in texts], n=4) if len(texts) > 1 else []
        for name in ("removed", "added")
    }
    return {f"{name}_lines": found for name, found in quartiles.items()} | {
        "only_insertions": sum(not text.removed for text in texts)
    }


def row(name: str, lookup: str, results: Sequence[tuple[float, Any]]) -> dict[str, Any]:
    """Return the sums of one way."""
    every = [metrics for _, metrics in results]
    rounds, tokens = sum(m.rounds for m in every), sum(m.output_tokens - 1 for m in every)
    return {
        "chain": name,
        "lookup": lookup,
        "tokens_per_round": round(tokens / rounds, 3),
        "tokens_per_s": round(tokens / sum(seconds for seconds, _ in results), 1),
        "lookup_rounds": sum(m.lookup_rounds for m in every),
        "lookup_drafted": sum(m.lookup_drafted for m in every),
        "lookup_accepted": sum(m.lookup_accepted for m in every),
        "rounds": rounds,
    }
