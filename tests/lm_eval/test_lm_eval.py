"""lm-eval, unmodified, gives the accuracy of the service and of transformers: `make lm-eval`.

Two small local tasks over Python of this repository, with the checkpoint that ships and no network. The
harness speaks to the service as to any OpenAI endpoint (`local-completions`), and runs transformers itself.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from tests.server.serving import CHECKPOINT, running

pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "tasks"
NUM_CHOICES, NUM_LINES = 40, 24
# Both compute in float32, in other orders: see "The model" in docs/numerics.md. A choice has up to 40 tokens.
TOLERANCE = 1e-3


def passages(count: int, seed: int) -> list[tuple[str, str]]:
    """Return (context, the line after it) from this repository's Python."""
    rng, found = random.Random(seed), []
    files = [one for one in sorted((ROOT / "compiled_mtp").glob("*.py")) if one.stat().st_size > 4096]
    while len(found) < count:
        lines = rng.choice(files).read_text(encoding="utf-8").splitlines(keepends=True)
        end = rng.randrange(12, len(lines) - 1)
        if 20 < len(lines[end]) < 90:
            found.append(("".join(lines[end - 12 : end]), lines[end]))
    return found


def write_tasks(folder: Path) -> None:
    """Write the tasks and their data into `folder`."""
    rng = random.Random(0)
    every = passages(NUM_CHOICES, 1)
    with (folder / "next_line.jsonl").open("w", encoding="utf-8") as file:
        for index, (context, line) in enumerate(every):
            others = rng.sample([other for _, other in every[:index] + every[index + 1 :]], 3)
            answer = rng.randrange(4)
            choices = [*others[:answer], line, *others[answer:]]
            file.write(json.dumps({"context": context, "choices": choices, "answer": answer}) + "\n")
    with (folder / "finish_line.jsonl").open("w", encoding="utf-8") as file:
        for context, line in passages(NUM_LINES, 2):
            line = line.rstrip()
            file.write(json.dumps({"context": context + line[:-4], "rest": line[-4:]}) + "\n")
    for task in TASKS.glob("*.yaml"):
        text = task.read_text(encoding="utf-8")
        for name in ("next_line", "finish_line"):
            text = text.replace(f"test: {name}.jsonl", f"test: {folder / name}.jsonl")
        (folder / task.name).write_text(text, encoding="utf-8")


def evaluate(folder: Path, model: str, model_args: dict[str, Any]) -> dict[str, Any]:
    """Return what the harness reports of both tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=["next_line", "finish_line"],
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
    )


def test_accuracy_through_the_service_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval", reason="make lm-eval installs it")
    write_tasks(tmp_path)
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len) as server:
        served = evaluate(
            tmp_path,
            "local-completions",
            {
                "model": "m",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(CHECKPOINT),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "batch_size": 2,
                "max_length": 1024,
            },
        )
    theirs = evaluate(
        tmp_path,
        "hf",
        {"pretrained": str(CHECKPOINT), "dtype": "float32", "device": "cpu", "batch_size": 1},
    )
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    for name, metrics in theirs["results"].items():
        print(name, served["results"][name])
        for metric, value in metrics.items():
            if "," in metric and "stderr" not in metric:
                assert served["results"][name][metric] == value, (name, metric)
    assert served["results"]["next_line"]["acc,none"] > 0.5
    assert served["results"]["finish_line"]["exact_match,none"] > 0
    check_samples(served["samples"], theirs["samples"])


def check_samples(served: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare every log likelihood, and every generated text."""
    worst = 0.0
    for one, other in zip(served["next_line"], theirs["next_line"], strict=True):
        assert one["doc"] == other["doc"]
        for (ours, is_greedy), (wanted, is_their_greedy) in zip(
            one["filtered_resps"], other["filtered_resps"], strict=True
        ):
            worst = max(worst, abs(float(ours) - float(wanted)))
            assert is_greedy == is_their_greedy
    print(f"log likelihoods differ by at most {worst:.1e}")
    assert worst < TOLERANCE
    for one, other in zip(served["finish_line"], theirs["finish_line"], strict=True):
        assert one["filtered_resps"] == other["filtered_resps"]
