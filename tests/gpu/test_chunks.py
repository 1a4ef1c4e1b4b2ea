"""On a GPU too, the ends of a prompt's chunks change no bit, however few rows the last chunk has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.drivers import Driver, make_runner
from tests.engines import prompt_of
from tests.step.test_prompt_chunks import left_by

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_short_uncompiled_tail_has_the_bits_of_a_longer_chunk(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """Rounds of as few rows multiply and attend by another route, whose bits differ."""
    write_checkpoint(tmp_path, family)
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype, "compile": "off", "max_batch": 1}
    given |= {"graph_mode": "off"}
    runners = [make_runner(tmp_path, prefill_chunk=chunk, **given) for chunk in (64, 128)]
    for tail in range(1, 9):
        prompt = prompt_of(64 + tail, tail, 512)
        found = []
        for runner in runners:
            driver = Driver(runner)
            chunk = runner.spec.config.prefill_chunk
            assert chunk is not None
            tiny.poison(runner.step)
            driver.start("a", 1, prompt, chunk=chunk)
            tokens = driver.drain()["a"]
            found.append([torch.tensor(tokens), *left_by(runner.step, 1, len(prompt))])
        for index, (one, other) in enumerate(zip(*found, strict=True)):
            assert torch.equal(one, other), f"{tail} rows: number {index}"
