"""Random bounded JSON schemas through engines of the default model.

Outputs end by their grammar, parse and validate, with and without drafts, with and without a reasoning part.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.engines import make_engine
from tests.sampling.grammars import (
    END_THINK,
    MODEL,
    THINK,
    TOKENIZER,
    most_bytes,
    random_schema,
    write_thinking_tokenizer,
)

# The test's bounds on a reasoning part and a recursion, which grammars do not bound.
REASONING_TOKENS, NODES = 64, 8
# A model of this size would repeat its last node without end; a bias ends a recursion after a few nodes.
NUDGE = 6.0
ENDS_A_LIST = {TOKENIZER.encode(text)[0]: NUDGE for text in ("null", " null")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, whose vocabulary has spare rows for the tokens around a reasoning part."""
    directory = tmp_path_factory.mktemp("schemas")
    for file in MODEL.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors") and not file.name.startswith("tokenizer"):
            (directory / file.name).symlink_to(file)
    write_thinking_tokenizer(directory)
    return directory


@dataclass(frozen=True)
class Case:
    """One request. end_bias: the logit bias that ends its reasoning part; None without such a part."""

    number: int
    schema: dict[str, Any] = field(repr=False)
    temperature: float
    end_bias: float | None

    @property
    def prompt(self) -> list[int]:
        prompt = TOKENIZER.encode(f"def f{self.number}(self):\n    ")
        return prompt if self.end_bias is None else [*prompt, THINK]

    @property
    def max_tokens(self) -> int:
        """The tokens of the schema's longest text, if every byte is a token."""
        reasoning = 0 if self.end_bias is None else REASONING_TOKENS
        return reasoning + most_bytes(self.schema, NODES)

    @property
    def must_end(self) -> bool:
        """Whether the schema alone bounds the output."""
        return self.end_bias is None and "$defs" not in self.schema

    @property
    def params(self) -> SamplingParams:
        bias = dict(ENDS_A_LIST) if "$defs" in self.schema else {}
        if self.end_bias is not None:
            bias[END_THINK] = self.end_bias + (NUDGE if bias else 0.0)
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.number,
            logit_bias=bias,
            response_format={"type": "json_schema", "json_schema": {"schema": self.schema}},
        )

    def check(self, text: str) -> None:
        """Check that the text after the reasoning part is JSON of the schema."""
        body = text
        if self.end_bias is not None:
            _, end, body = text.partition("</think>")
            assert end
            body = body.removeprefix("\n\n")
        jsonschema.validate(json.loads(body), self.schema)


def random_cases(count: int, temperatures: Sequence[float]) -> Iterator[Case]:
    """Yield cases at every temperature for each schema; every other schema comes after a reasoning part."""
    rng = random.Random(7)
    for number in range(count):
        # The model never saw the token that ends reasoning: its logit is 22 below the likeliest one.
        bias = rng.choice([20.0, 21.5, 23.0]) if number % 2 else None
        schema = random_schema(rng)
        yield from (Case(number, schema, temperature, bias) for temperature in temperatures)


@dataclass
class Decoded:
    """The tokens, text and end of each case, and a count of windows.

    It counts those in which a reasoning part ended before the last emitted row.
    """

    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    num_inside: int = 0


def decode_all(engine: Engine, cases: Sequence[Case]) -> Decoded:
    done = Decoded([[] for _ in cases], [""] * len(cases), [None] * len(cases))
    for index, case in enumerate(cases):
        engine.add_request(prompt_token_ids=case.prompt, params=case.params, request_id=str(index))
    while engine.has_unfinished_requests():
        for output in engine.step():
            take(done, cases[int(output.request_id)], output)
    return done


def take(done: Decoded, case: Case, output: RequestOutput) -> None:
    index, new = int(output.request_id), output.new_token_ids
    is_in_reasoning = case.end_bias is not None and END_THINK not in done.tokens[index]
    done.num_inside += is_in_reasoning and END_THINK in new[:-1]
    done.tokens[index] += new
    done.texts[index] += output.new_text
    assert output.error is None, (case, output.error)
    done.reasons[index] = output.finish_reason


def check_cases(checkpoint: Path, cases: Sequence[Case], max_batch: int) -> dict[str, int]:
    """Decode at depths 0 and 3, compare, validate the outputs that the grammar ended; return counts."""
    longest = max(len(case.prompt) + case.max_tokens for case in cases)
    options = {"max_batch": max_batch, "max_in_flight": 1, "max_model_len": longest}
    done = {
        mtp_step: decode_all(make_engine(checkpoint, mtp_step=mtp_step, **options), cases)
        for mtp_step in (0, 3)
    }
    num_ended = 0
    for case, tokens, other, text, reason in zip(
        cases, done[0].tokens, done[3].tokens, done[3].texts, done[3].reasons, strict=True
    ):
        assert tokens == other, case
        assert reason == "stop" or not case.must_end, (case, case.schema, text)
        if reason == "stop":
            num_ended += 1
            case.check(text)
    assert done[0].texts == done[3].texts
    assert done[0].reasons == done[3].reasons
    return {
        "cases": len(cases),
        "ended": num_ended,
        "tokens": sum(map(len, done[0].tokens)),
        "inside": done[3].num_inside,
        "recursive": sum(text.count('"next"') > 1 for text in done[0].texts),
    }


def test_a_sample_ends_by_its_grammar_and_validates(checkpoint: Path) -> None:
    cases = [case for case in random_cases(12, (0.0, 1.0)) if case.temperature == float(case.number // 2 % 2)]
    counts = check_cases(checkpoint, cases, max_batch=12)
    assert counts["ended"] >= 11
    assert counts["inside"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_300_schemas_at_both_temperatures(checkpoint: Path) -> None:
    counts = check_cases(checkpoint, list(random_cases(300, (0.0, 1.0))), max_batch=64)
    print(json.dumps(counts))
    assert counts["ended"] >= 0.95 * counts["cases"]
    assert counts["inside"] >= 20
