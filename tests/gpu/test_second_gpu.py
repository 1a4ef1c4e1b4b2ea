"""An engine on another GPU than the current one gives the first one's tokens, from any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("compile", ["off", "on"])
def test_tokens_on_the_second_gpu(tmp_path: Path, compile: str) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe")
    prompts = [prompt_of(length, length, 512) for length in (3, 70, 130)]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True, logprobs=1)
    tokens = {}
    for device in ("cuda:0", "cuda:1"):
        engine = make_engine(tmp_path, device=device, block_size=64, prefill_chunk=128, compile=compile)
        assert {tensor.device for tensor in engine.runner.step.parameters()} == {torch.device(device)}
        torch.cuda.set_device(0)
        found: list[list[int]] = []

        def run(engine: object = engine, found: list[list[int]] = found) -> None:
            # A new thread's current GPU is the first one.
            found += [one.new_token_ids for one in engine.generate(prompts, params)]  # type: ignore[attr-defined]

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        tokens[device] = found
        engine.close()
    assert len(tokens["cuda:1"]) == 3
    assert tokens["cuda:0"] == tokens["cuda:1"]
