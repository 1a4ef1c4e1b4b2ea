"""Ranks on a CPU compile every depth at the start and choose among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of

PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)


def decode(directory: Path, **options: Any) -> tuple[list[int], set[int]]:
    """Return the tokens of one request and the depths of its rounds."""
    sizes = {"device": "cpu", "block_size": 16, "prefill_chunk": 64, "max_model_len": 128, "num_blocks": 20}
    config = EngineConfig(model=directory, max_batch=1, num_threads=1, offload_gb=0.0, **(sizes | options))
    with Engine(config) as engine:
        (output,) = engine.generate([prompt_of(20, 1, 300)], PARAMS)
        found = engine.stats().rounds_by_depth
    return output.new_token_ids, {depth for depth, counts in found.items() if sum(counts.values())}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_compiled_ranks_on_a_cpu_choose_depths(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tokenizer=True)
    wanted, _ = decode(directory, compile="off", mtp_step=0)
    given = {"compile": "on", "mtp_step": "auto", "mtp_depths": "0,1"}
    tokens, depths = decode(directory, tensor_parallel=2, **given)
    assert tokens == wanted
    assert depths == {0, 1}
