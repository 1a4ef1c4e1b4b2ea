"""Scores on a GPU, with graphs, are the bits of decoding: dense, mixtures of experts, FP8 weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engine.test_request_features import MIXES as RANDOM_MIXES
from tests.engine.test_request_features import write_small_checkpoint
from tests.engine.test_score import check_scores
from tests.engines import make_engine, prompt_of

pytestmark = pytest.mark.gpu

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3_5"},
    "moe": {"family": "qwen3_5_moe"},
    **{f"fp8_{name}": options for name, options in FP8_FAMILIES},
}
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_p": 0.9},
    {"allowed_token_ids": tuple(range(100, 180)), "min_p": 0.01},
    {"logit_bias": {7: 8.0, 9: -8.0}, "top_k": 20, "temperature": 0.3},
    {"min_tokens": 6, "stop_token_ids": (3, 4, 5)},
]


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "prefill_chunk": 128, "block_size": 64, "compile": "off"}
    return make_engine(directory, **(defaults | {"scoring": True} | options))


def logprobs_of(outputs: list[RequestOutput]) -> list[Any]:
    for output in outputs:
        assert output.finish_reason == "length", output.error
        assert all(entry.processed is not None for entry in output.logprobs or ())
    return [output.logprobs for output in outputs]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scores_are_those_of_decoding(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, **CHECKPOINTS[name])
    plain = gpu_engine(directory, mtp_step=0, max_batch=1)
    prompts = [prompt_of(length, index, 512) for index, length in enumerate((1, 40, 130, 65, 20, 90))]
    params = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, logprobs=5, logprobs_mode="both", **mix)
        for i, mix in enumerate(MIXES)
    ]
    params[5] = params[5].model_copy(update={"stop_token_ids": ()})
    decoded = [plain.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    expected = logprobs_of(decoded)
    tokens = [output.new_token_ids for output in decoded]
    plain.close()
    for mtp_step, max_batch, compile in ((3, 8, "off"), (7, 8, "off"), ("auto", 4, "off"), (3, 2, "on")):
        engine = gpu_engine(directory, mtp_step=mtp_step, max_batch=max_batch, compile=compile)
        # Compiled programs give the bits of the operators in the phases, which are captured from them.
        for _ in range(2):
            scored = engine.score(prompts, tokens, params)
            if compile == "off":
                assert logprobs_of(scored) == expected, (mtp_step, max_batch)
        again = engine.generate(prompts, params)
        if compile == "on":
            # A GPU promises equal bits within one compile mode.
            tokens_on = [output.new_token_ids for output in again]
            assert logprobs_of(engine.score(prompts, tokens_on, params)) == logprobs_of(again)
        else:
            assert [output.new_token_ids for output in again] == tokens
        engine.close()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scores_of_random_mixes_are_those_of_decoding(name: str, tmp_path: Path) -> None:
    """A hundred mixes of each kind of checkpoint, at depths 0, 3, 7 and auto, in batches of 1 and 8."""
    directory = write_small_checkpoint(tmp_path, **CHECKPOINTS[name])

    @cache
    def engine_of(directory: Path, mtp_step: int | str, max_batch: int, max_in_flight: int) -> Engine:
        sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "max_in_flight": max_in_flight}
        return gpu_engine(directory, max_model_len=128, **sizes)

    @given(mixes=st.lists(RANDOM_MIXES, min_size=20, max_size=20))
    @settings(
        max_examples=5,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def check(mixes: list[dict[str, Any]]) -> None:
        check_scores(directory, mixes, engine_of)

    check()
