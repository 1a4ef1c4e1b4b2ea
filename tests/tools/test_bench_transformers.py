"""tools/bench_transformers.py: both sides compute the same, and the line that it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_transformers

from compiled_mtp import Engine
from tests.ops.gdn_cases import torch_threads

REPEATS, PROMPT = 1, "import os\n" * 25


def test_every_turn_computes_the_whole_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    engines: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(bench_transformers, "Engine", make)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT}))
    sizes = ["--max-tokens=2", "--mtp-step=1", f"--repeats={REPEATS}", "--num-threads=1"]
    with torch_threads(1):
        bench_transformers.main([f"--prompt-file={path}", *sizes])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["ratio_to_transformers"]["transformers"] == 1
    assert len(engines) == 2
    for engine in engines:
        assert engine.tokenizer is not None
        stats = engine.stats()
        # Otherwise no prompt could resume.
        assert len(engine.tokenizer.encode(PROMPT)) > engine.config.resume_step
        assert stats.cached_tokens == 0
        assert stats.prompt_tokens == (1 + REPEATS) * len(engine.tokenizer.encode(PROMPT))


def test_a_clear_choice_that_differs_is_no_speed() -> None:
    """Positions 0 and 1 of the output choose id 2 clearly; position 2 is nearly a tie between 0 and 1."""
    logits = torch.tensor([[[9.0, 0, 0], [0, 0, 5], [0, 0, 5], [1, 1.0001, 0], [0, 0, 0]]])

    def model(ids: torch.Tensor) -> SimpleNamespace:
        assert ids.shape == (1, 5)
        return SimpleNamespace(logits=logits)

    bench_transformers.check_same(model, [4, 4], [2, 2, 0])
    bench_transformers.check_same(model, [4, 4], [2, 2, 1])
    with pytest.raises(AssertionError, match="token 1 differs from transformers"):
        bench_transformers.check_same(model, [4, 4], [2, 0, 1])
