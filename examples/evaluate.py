"""Multiple choice by scores: which of the given continuations does the model find likeliest?

python examples/evaluate.py
python examples/evaluate.py --model Qwen/Qwen3.5-4B --file questions.jsonl

A line of the file is an object like those of QUESTIONS.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compiled_mtp import Engine, EngineConfig, RequestOutput

QUESTIONS = [
    {"context": "def add(a, b):\n    return a ", "choices": ["+ b\n", "import b\n"], "answer": 0},
    {"context": "for i in ", "choices": ["while(10):\n", "range(10):\n"], "answer": 1},
    {"context": "if x is None:\n    raise ", "choices": ["ValueError(", "def 3", "[]"], "answer": 0},
]


def log_likelihood(output: RequestOutput) -> float:
    """The model's log probability of all tokens of a continuation; a sum over tokens, as lm-eval's."""
    return sum(entry.logprob for entry in output.logprobs or ())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=EngineConfig().model, help="default: the checkpoint that ships")
    parser.add_argument("--file", type=Path, help="questions, one JSON object per line")
    flags = parser.parse_args(argv)
    questions = QUESTIONS
    if flags.file is not None:
        questions = [json.loads(line) for line in flags.file.read_text(encoding="utf-8").splitlines()]
    pairs = [(question["context"], choice) for question in questions for choice in question["choices"]]
    with Engine(flags.model, scoring=True) as engine:
        # One call for all pairs: the engine batches them, and reads a shared context once.
        outputs = iter(engine.score([context for context, _ in pairs], [choice for _, choice in pairs]))
    num_right = 0
    for question in questions:
        scores = [log_likelihood(next(outputs)) for _ in question["choices"]]
        best = scores.index(max(scores))
        num_right += best == question["answer"]
        print(f"{question['context']!r} -> {question['choices'][best]!r}, {max(scores):.2f}")
    print(f"{num_right} of {len(questions)} right")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # A mistake of the caller's, in one line.
        raise SystemExit(f"error: {error}") from None
