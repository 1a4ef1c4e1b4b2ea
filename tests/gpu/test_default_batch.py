"""On a GPU the default max_batch follows memory, and the engine decodes many requests together."""

from __future__ import annotations

import pytest

from compiled_mtp import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


def test_a_gpu_decodes_many_requests_together() -> None:
    prompts = [f"def f{index}(" for index in range(32)]
    with Engine(EngineConfig(device="cuda", compile="off", mtp_step=1)) as engine:
        assert engine.runner.memory.max_batch == 256
        together = engine.generate(prompts, PARAMS)
        peak = max(bucket.groups for bucket in engine.runner.programs.buckets)
    assert peak >= 32
    with Engine(EngineConfig(device="cuda", compile="off", mtp_step=1, max_batch=8)) as engine:
        assert engine.runner.memory.max_batch == 8
        queued = engine.generate(prompts, PARAMS)
    assert [one.new_token_ids for one in together] == [one.new_token_ids for one in queued]
