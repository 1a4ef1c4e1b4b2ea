"""As many requests as an engine takes, captured and compiled: each has the tokens that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.config.engine_config import MOST_BATCH
from tests.engines import collect, prompt_of, run_to_end

pytestmark = pytest.mark.gpu
# A launch takes 16 prompts of at most 32 tokens: all requests run before the first one ends.
COUNT = 160


def engine_of(compile: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 512}
    return Engine(EngineConfig(compile=compile, **(defaults | options)))


def params_of(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=COUNT,
        temperature=0.0 if index % 2 else 0.8,
        seed=index,
        ignore_eos=True,
        logprobs=2 if index % 64 == 3 else None,
        guided_regex="([a-z]+ = [0-9]+\n){99}" if index % 64 == 5 else None,
    )


@pytest.mark.parametrize(("compile", "mtp_step"), [("off", "auto"), ("on", 3)])
def test_256_requests_have_the_tokens_of_each_alone(compile: str, mtp_step: Any) -> None:
    prompts = [prompt_of(1 + 7 * index % 31, index, 1000) for index in range(MOST_BATCH)]
    many = {"mtp_depths": (1, 3), "max_batch": MOST_BATCH, "batch_sizes": (1, 96, MOST_BATCH)}
    with engine_of(compile, mtp_step=mtp_step, **many) as engine:
        for index, prompt in enumerate(prompts):
            engine.add_request(prompt_token_ids=prompt, params=params_of(index), request_id=str(index))
        tokens: dict[str, list[int]] = {}
        most = 0
        with torch.compiler.set_stance("fail_on_recompile"):
            while engine.has_unfinished_requests():
                most = max(most, engine.stats().running)
                collect(tokens, engine.step())
        assert most == MOST_BATCH
    with engine_of(compile, mtp_step=0, max_batch=1) as engine:
        for index in range(0, MOST_BATCH, 11):
            engine.add_request(
                prompt_token_ids=prompts[index], params=params_of(index), request_id=str(index)
            )
        alone = run_to_end(engine)
    assert alone == {name: tokens[name] for name in alone}
