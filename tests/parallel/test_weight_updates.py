"""Ranks take new weights together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
PROMPTS = [prompt_of(length, length, 500) for length in (5, 70)]


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_q_heads": 4, "num_value_heads": 4, "tied": True}
    paths = [write_checkpoint(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)]
    options: dict[str, Any] = {"device": "cpu", "mtp_step": 3, "max_model_len": 256, "block_size": 16}
    with Engine(paths[1], **options) as alone:
        expected = [one.new_token_ids for one in alone.generate(PROMPTS, PARAMS)]
    with Engine(paths[0], tensor_parallel=2, **options) as engine:
        assert [one.new_token_ids for one in engine.generate(PROMPTS, PARAMS)] != expected
        with pytest.raises(ValueError, match="weights must be a directory with several ranks, got tensors"):
            engine.update_weights(({}, iter(())))
        engine.update_weights(paths[1])
        assert [one.new_token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
