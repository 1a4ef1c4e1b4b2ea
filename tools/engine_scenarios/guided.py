"""How many drafts are kept with a grammar and without one, where JSON is what a model writes.

    python tools/bench_engine.py guided --prompts 24 --mtp-step 3

Each prompt holds some records of one schema; with the grammar one more is decoded, and without it as many
tokens. The draft is not masked, so a grammar costs acceptance where it forbids what the model would write.
`ratio` is the acceptance rate with the grammar over that without. Nothing is printed where a request failed,
or where what a grammar has ended is no record.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

from compiled_mtp import Engine, RequestOutput, SamplingParams
from compiled_mtp.spec.stats import SpeculationStats
from engine_scenarios import common

SCHEMA: dict[str, Any] = {
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
RECORDS = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument("--prompts", type=common.count, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)


def make_prompt(number: int) -> str:
    """Records of SCHEMA, one a line, as a list of them begins."""
    rng = random.Random(number)
    records = [
        {
            "name": rng.choice(NAMES),
            "size": rng.choice(["small", "large"]),
            "parts": [rng.randrange(100) for _ in range(rng.randint(0, 4))],
            "is_done": rng.random() < 0.5,
        }
        for _ in range(RECORDS)
    ]
    return "records = [\n" + "".join(f"    {json.dumps(record)},\n" for record in records) + "    "


def count_drafts(engine: Engine, outputs: Sequence[RequestOutput]) -> SpeculationStats:
    """How well drafting worked in these requests."""
    total = SpeculationStats.empty(engine.runner.step.mtp_step)
    for output in outputs:
        total = total.plus(output.metrics)
    return total


def check(guided: Sequence[RequestOutput]) -> None:
    """Raise AssertionError unless each request went on to its end, a record if the grammar ended it."""
    for output in guided:
        assert output.finish_reason != "error", output.error
        if output.finish_reason == "stop":
            record = json.loads(output.new_text)
            assert list(record) == SCHEMA["required"], f"the grammar let through {output.new_text}"


def measure(engine: Engine, temperature: float, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Acceptance with the grammar and without, and how many requests it left as they were."""
    prompts = [make_prompt(number) for number in range(num_prompts)]

    def decode(lengths: Sequence[int], **given: Any) -> list[RequestOutput]:
        params = [
            SamplingParams(max_tokens=length, temperature=temperature, seed=number, **given)
            for number, length in enumerate(lengths)
        ]
        return engine.generate(prompts, params)

    guided = decode(
        [max_tokens] * num_prompts,
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    )
    check(guided)
    plain = decode([len(output.new_token_ids) for output in guided], ignore_eos=True)
    counts = {"guided": count_drafts(engine, guided), "plain": count_drafts(engine, plain)}
    rates = {name: one.acceptance_rate for name, one in counts.items()}
    pairs = zip(guided, plain, strict=True)
    return {
        "temperature": temperature,
        "acceptance": {name: round(rate, 3) for name, rate in rates.items()},
        "mean_new_tokens": {name: round(one.mean_new_tokens, 3) for name, one in counts.items()},
        "ratio": round(rates["guided"] / rates["plain"], 3) if rates["plain"] else None,
        "ended_by_grammar": sum(output.finish_reason == "stop" for output in guided),
        "same_tokens": sum(one.new_token_ids == other.new_token_ids for one, other in pairs),
        "tokens": sum(len(output.new_token_ids) for output in guided),
    }


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure at temperature 0 and 1."""
    engine = common.open_engine(flags, kind=Engine, max_batch=8, max_model_len=1024)
    results = [measure(engine, temperature, flags.prompts, flags.max_tokens) for temperature in (0.0, 1.0)]
    return {"mtp_step": flags.mtp_step, "prompts": flags.prompts, "by_temperature": results}
