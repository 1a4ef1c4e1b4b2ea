"""Routed experts on a GPU, with graphs: equal over depth and batch, near transformers' own, and cheap."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.ops.moe_router import moe_router, recorded_router
from compiled_mtp.request import SamplingParams
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.ops.harness import check_launch

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {"moe": {"family": "qwen3_5_moe"}, "fp8": dict(FP8_FAMILIES)["moe"]}


@pytest.mark.parametrize("experts, top_k", [(8, 2), (256, 8), (512, 10)])
def test_the_kernel_records_what_it_chooses(experts: int, top_k: int) -> None:
    logits = torch.randn(70, experts + 1, device="cuda") * 3
    slots = torch.randperm(4 * 64, device="cuda")[:70]
    slots[::5] = -1
    record = torch.full((4, 64 * top_k), -7, dtype=torch.int16, device="cuda")
    check_launch(recorded_router, (logits, top_k, True, slots, record), rtol=1e-5, atol=1e-7, mutated=(4,))
    recorded, plain = recorded_router(logits, top_k, True, slots, record), moe_router(logits, top_k, True)
    for one, other in zip(recorded, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_do_not_depend_on_depth_or_batch(kind: str, compile: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, **KINDS[kind])
    settings: dict[str, Any] = {"device": "cuda", "block_size": 64, "prefill_chunk": 128, "compile": compile}
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=2, ignore_eos=True)
    asking = params.model_copy(update={"return_routed_experts": True})
    prompts = [prompt_of(length, length, 500) for length in (1, 40, 130, 200)]
    expected = None
    for mtp_step, max_batch in ((0, 1), (3, 8), (7, 2)):
        silent = make_engine(directory, mtp_step=mtp_step, max_batch=max_batch, **settings)
        tokens = [one.new_token_ids for one in silent.generate(prompts, params)]
        silent.close()
        engine = make_engine(
            directory, mtp_step=mtp_step, max_batch=max_batch, routed_experts=True, **settings
        )
        for _ in range(2):
            outputs = engine.generate(prompts, asking)
            # The record changes no token.
            assert [one.new_token_ids for one in outputs] == tokens
            found = [one.routed_experts for one in outputs]
            expected = expected or found
            assert found == expected
        engine.close()
    assert expected is not None
    for prompt, one in zip(prompts, expected, strict=True):
        assert one is not None
        assert one.shape[0] == len(prompt) + 39
        ids = array("h")
        ids.frombytes(one.data)
        assert 0 <= min(ids) <= max(ids) < 8
