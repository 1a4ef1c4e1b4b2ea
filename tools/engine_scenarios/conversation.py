"""What drafts from the text gain an agent: through the service, one file is quoted, edited, quoted again.

    python tools/bench_engine.py conversation                               # the checkpoint that ships, a CPU
    python tools/bench_engine.py conversation --shape 4b --rate 2.6 --device cuda --graph-mode uncompiled
    python tools/bench_engine.py conversation --save-versions versions.json   # then --versions versions.json

Each turn sends the whole conversation so far as a stream of /v1/completions. The answers are forced: in turns
1, 3, 5, .. the file as it is, in turns 2, 4, .. its next version in this repository's history. The first
question is about a file that the conversation does not hold yet. The model's own drafts are compared with
them or, with --rate, kept so often that a chain of three alone gives that many tokens per round. For each
turn and way: tokens per round, tokens per second from the first chunk to the last, and milliseconds to the
first chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.runner import spec
from compiled_mtp.terminal.flags import count
from engine_scenarios import common
from engine_scenarios.lookup import RATED_DEPTH, Text, force_outputs, git
from engine_scenarios.overhead import Client, serving

QUESTIONS = ("\n# Quote the file:\n", "\n# Make the next change and quote the file:\n")


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser, may_be_auto=True)
    parser.add_argument("--turns", type=count, default=10)
    parser.add_argument("--rate", type=float, help="tokens per round of a chain of three alone")
    parser.add_argument(
        "--most-tokens", type=count, default=340, help="of an answer, the beginning of a version"
    )
    parser.add_argument("--path", default="tools/bench_engine.py", help="a file of this repository")
    parser.add_argument(
        "--versions",
        type=Path,
        metavar="FILE",
        help="read versions from a file of --save-versions",
    )
    parser.add_argument("--save-versions", type=Path, metavar="FILE", help="only write its versions")


def read_versions(flags: argparse.Namespace) -> list[str]:
    """Return the file's versions, oldest first. Raises AssertionError if there are too few for the turns."""
    if flags.versions is not None:
        versions = json.loads(flags.versions.read_text(encoding="utf-8"))
    else:
        commits = git("log", "--no-merges", "--format=%H", "--", flags.path).split()
        versions = [git("show", f"{commit}:{flags.path}") for commit in reversed(commits)]
    needed = flags.turns // 2 + 1
    assert len(versions) >= needed, f"{flags.turns} turns take {needed} versions, got {len(versions)}"
    return list(versions[-needed:])


def make_turns(flags: argparse.Namespace, versions: Sequence[str]) -> list[Text]:
    """Return each turn's prompt, all that was said before and its question, and its answer.

    Ids are those of the tokenizer that ships; those beyond a small vocabulary are folded into it.
    """
    tokenizer, said, made = Tokenizer(EngineConfig().model), list[int](), []

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return (
            ids if flags.shape is None else [one % common.shape_config(flags.shape).vocab_size for one in ids]
        )

    for turn in range(flags.turns):
        said = said + encode(QUESTIONS[turn % 2])
        answer = encode(versions[(turn + 1) // 2])[: flags.most_tokens]
        made.append(Text(said, answer))
        said = said + answer
    return made


def converse(engine: Engine, turns: Sequence[Text], rate: float | None) -> list[dict[str, Any]]:
    """Have the conversation; return a row for each turn. Raises AssertionError for other tokens."""
    engine.runner.step.accept_at(rate)
    force_outputs(engine).update(enumerate(turns))
    fields = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    rows = []
    with serving(engine, engine.frontend.path) as port, contextlib.closing(Client(port, None)) as client:
        for turn, (prompt, output) in enumerate(turns):
            before = engine.stats().speculation
            found = client.stream([fields | {"prompt": prompt, "seed": turn, "max_tokens": len(output)}])
            (stream,) = found["streams"]
            chunks = [ids for ids in stream["token_ids"] if ids]
            assert [one for ids in chunks for one in ids] == output, "the answer is not the forced one"
            after, times = engine.stats().speculation, stream["times"]
            tokens, rounds = len(output) - 1, after.rounds - before.rounds
            rows.append(
                {
                    "turn": turn + 1,
                    "prompt_tokens": len(prompt),
                    "tokens": len(output),
                    "tokens_per_round": round(tokens / rounds, 3),
                    "tokens_per_s": round((len(output) - len(chunks[0])) / (times[-1] - times[0]), 1),
                    "first_ms": round(1e3 * (found["seconds"] - (times[-1] - times[0])), 1),
                    "lookup_accepted": after.lookup_accepted - before.lookup_accepted,
                }
            )
    return rows


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Have the conversation without and with drafts from the text."""
    versions = read_versions(flags)
    if flags.save_versions is not None:
        flags.save_versions.write_text(json.dumps(versions), encoding="utf-8")
        return {"versions": len(versions)}
    turns = make_turns(flags, versions)
    rate = None if flags.rate is None else rate_for(flags.rate, RATED_DEPTH)
    rows: dict[str, list[dict[str, Any]]] = {}
    for lookup in ("off", "auto"):
        with tempfile.TemporaryDirectory() as name, patch.object(spec, "_GIVEN_DRAFTS", ()):
            engine = common.open_engine(
                flags,
                kind=Engine,
                folder=Path(name),
                max_batch=1,
                max_model_len=len(turns[-1].prompt) + len(turns[-1].output) + 1,
                lookup=lookup,
                scoring=True,
                synthetic_acceptance=0.0,
            )
            device = common.device_name(engine)
            rows[lookup] = converse(engine, turns, rate)
    return {
        "model": flags.shape or flags.model.name,
        "device": device,
        "mtp_step": flags.mtp_step,
        "chain": flags.rate or "own",
        "speedup": [
            round(one["tokens_per_s"] / other["tokens_per_s"], 2)
            for one, other in zip(rows["auto"], rows["off"], strict=True)
        ],
        "rows": rows,
    }
