"""On a GPU: resumed, offloaded, replayed and drafted requests of any depth have the same tokens."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.engines import prompt_of

pytestmark = pytest.mark.gpu

DEFAULT = Path(__file__).parents[2] / "compiled_mtp" / "default_model"
DEVICE = "cuda"
LONGEST = 512
BASE = {
    "prefill_chunk": 64,
    "block_size": 64,
    "max_model_len": LONGEST,
    "max_batch": 4,
    "batch_sizes": (1, 4),
}
MODES: tuple[dict[str, Any], ...] = ({"compile": "off"}, {"compile": "on", "graph_mode": "replay"})
# Six prompts, of which three have more than two chunks in common.
PROMPTS = tuple(prompt_of(150, 1, 4000)[:140] + prompt_of(9, n, 4000) for n in range(3)) + tuple(
    prompt_of(30 + 40 * n, 10 + n, 4000) for n in range(3)
)
PARAMS = [
    SamplingParams(max_tokens=70, temperature=0.7 * (n % 2), seed=n, ignore_eos=True, logprobs=n % 3 or None)
    for n in range(len(PROMPTS))
]


def make(**options: Any) -> Engine:
    return Engine(EngineConfig(model=DEFAULT, device=DEVICE, **(BASE | options)))


@cache
def alone() -> list[RequestOutput]:
    """Return each request's output alone, without a prefix cache and drafts."""
    engine = make(
        mtp_step=0, max_batch=1, batch_sizes=(1,), prefix_cache=False, compile="off", graph_mode="off"
    )
    outputs = [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    engine.close()
    return outputs


def check(outputs: list[RequestOutput], *, is_same_program: bool) -> None:
    """Check for equal tokens; if the programs are the same, also for equal bits of log probabilities."""
    for output, expected in zip(outputs, alone(), strict=True):
        assert output.new_token_ids == expected.new_token_ids
        assert not is_same_program or output.logprobs == expected.logprobs


@pytest.mark.parametrize("mode", MODES, ids=["off", "replay"])
def test_a_repeated_prompt_resumes_and_gives_the_same_tokens(mode: dict[str, Any]) -> None:
    engine = make(mtp_step=3, **mode)
    for repeat in range(2):
        outputs = engine.generate(PROMPTS, PARAMS)
        check(outputs, is_same_program=mode == MODES[0])
        cached = [output.metrics.cached_tokens for output in outputs]
        assert cached[3:] == [(len(prompt) - 1) // 64 * 64 * repeat for prompt in PROMPTS[3:]]
        assert cached[0] == 128 * repeat
    assert engine.stats().prefix_hits >= len(PROMPTS) - 1
    engine.scheduler.check_integrity()
    engine.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
@pytest.mark.parametrize("mode", MODES, ids=["off", "replay"])
def test_evicted_entries_come_back_from_host_memory(
    mode: dict[str, Any], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks suffice for the longest request alone; requests run one after another."""
    monkeypatch.setattr("compiled_mtp.runner.host_tiers.prefix_tier_bytes", lambda *_: 1 << 28)
    engine = make(mtp_step=3, num_blocks=5, kv_dtype=kv_dtype, **mode)
    turns = [[engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)] for _ in range(3)]
    if kv_dtype == "auto":
        for outputs in turns:
            check(outputs, is_same_program=mode == MODES[0])
    for outputs in turns[1:]:
        assert [o.metrics.cached_tokens for o in outputs] == [(len(p) - 1) // 64 * 64 for p in PROMPTS]
        assert [o.new_token_ids for o in outputs] == [o.new_token_ids for o in turns[0]]
    stats = engine.stats()
    assert stats.prefix_host_hits > 0
    assert 0 < stats.prefix_host_bytes <= engine.runner.moves.host_bytes
    engine.scheduler.check_integrity()
    engine.close()


@pytest.mark.parametrize("mode", MODES, ids=["off", "replay"])
@pytest.mark.parametrize("offload_gb", [1.0, 0.0])
@pytest.mark.parametrize("mtp_step", [0, 3])
def test_requests_are_offloaded_and_come_back_or_are_replayed(
    mode: dict[str, Any], offload_gb: float, mtp_step: int
) -> None:
    """Blocks suffice for one and a half of the longest requests."""
    engine = make(mtp_step=mtp_step, num_blocks=8, offload_gb=offload_gb, lookup="off", **mode)
    engine.scheduler._planner.admission.tokens_ahead = 0
    check(engine.generate(PROMPTS, PARAMS), is_same_program=mode == MODES[0])
    stats = engine.stats()
    assert (stats.offloads > 0, stats.recomputes > 0) == (offload_gb > 0, offload_gb == 0)
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used == 0
    engine.close()


@pytest.mark.parametrize("mode", MODES, ids=["off", "replay"])
def test_the_engine_takes_the_memory_that_it_plans(mode: dict[str, Any]) -> None:
    """Weights and the plan; beside a pool of 4 GiB a launch of this checkpoint needs little, also when
    captured."""
    small = make(mtp_step=3, num_blocks=9, **mode)
    num_blocks = (4 << 30) // small.runner.memory.block_bytes
    small.close()
    del small
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine = make(mtp_step=3, num_blocks=num_blocks, max_model_len=4096, prefill_chunk=512, **mode)
    check(engine.generate(PROMPTS, PARAMS), is_same_program=mode == MODES[0])
    weights = sum(tensor.nbytes for tensor in engine.runner.step.parameters())
    taken = torch.cuda.max_memory_reserved() - before
    assert taken == pytest.approx(weights + engine.runner.memory.total_bytes, rel=0.02)
    engine.close()


@pytest.mark.parametrize("mode", [*MODES, {"compile": "on", "graph_mode": "reduce-overhead"}])
def test_any_depth_gives_the_same_tokens(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, one depth is compiled and the others are captured uncompiled."""
    engine = make(mtp_step="auto", mtp_depths=(0, 1, 3), **mode)
    assert engine.stats().rounds_by_depth.keys() == {0, 1, 3}
    depths = iter([3, 0, 0, 0, 0, 0, 1, 3, 0, 3] * 100)
    monkeypatch.setattr(engine.scheduler._planner._shapes, "_depth", lambda *_: next(depths))
    with torch.compiler.set_stance("fail_on_recompile"):
        check(engine.generate(PROMPTS, PARAMS), is_same_program=mode == MODES[0])
    assert all(engine.stats().rounds_by_depth.values())
    engine.close()
