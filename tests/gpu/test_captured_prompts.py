"""On a GPU a prompt leaves the same bits whether its launches are uncompiled, captured or compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.graphs.compile import compile_program, compiler_settings
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.rounds.prefill import prefill
from compiled_mtp.runner.runner import Runner
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.drivers import Driver, make_runner
from tests.engines import make_engine, prompt_of
from tests.step.test_prompt_chunks import left_by

pytestmark = pytest.mark.gpu

# A chunk that fills a launch, a last one that does not, one token, and a launch of three rows.
LENGTHS = (100, 64, 1, 67)
GIVEN: dict[str, Any] = {"device": "cuda", "prefill_chunk": 64, "max_batch": 1, "compile": "on"}


def bits_of(runner: Runner) -> list[torch.Tensor]:
    """Return prompts' states, each in a slot that was full of NaN, and their first tokens."""
    found = []
    for length in LENGTHS:
        driver = Driver(runner)
        tiny.poison(runner.step)
        driver.start("a", 1, prompt_of(length, length, 512), chunk=64)
        found += [torch.tensor(driver.drain()["a"]), *left_by(runner.step, 1, length)]
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_prompts_have_the_same_bits_captured_compiled_and_uncompiled(
    tmp_path: Path, family: str, dtype: str, graph_mode: str
) -> None:
    write_checkpoint(tmp_path, family)
    runner = make_runner(tmp_path, dtype=dtype, graph_mode=graph_mode, **GIVEN)
    programs = runner.programs
    with torch.compiler.set_stance("fail_on_recompile"):
        captured = bits_of(runner)
    step = runner.step
    for key in programs._first_token:
        programs._first_token[key] = torch.no_grad()(partial(first_token, step))
    programs._prefill[64] = torch.no_grad()(partial(prefill, step))
    as_code = bits_of(runner)
    with compiler_settings():
        program = compile_program(partial(prefill, step), "prefill_compiled", None)
        programs._prefill[64] = torch.no_grad()(program)
        compiled = bits_of(runner)
    for index, (one, *others) in enumerate(zip(captured, as_code, compiled, strict=True)):
        assert all(torch.equal(one, other) for other in others), f"number {index}"


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_prompts_of_every_length_between_rounds(tmp_path: Path, graph_mode: str) -> None:
    """Four lengths of launches, one prompt or several in each, beside running rounds."""
    write_checkpoint(tmp_path)
    prompts = [prompt_of(length, length, 512) for length in (3, 300, 64, 129, 511, 200, 65, 450)]
    params = [
        SamplingParams(max_tokens=30, temperature=0.8, seed=n, ignore_eos=True, prompt_logprobs=n % 4 or None)
        for n in range(len(prompts))
    ]
    given: dict[str, Any] = {"device": "cuda", "dtype": "float32", "prefill_chunk": 512, "max_model_len": 600}
    plain = make_engine(tmp_path, mtp_step=0, max_batch=1, compile="off", graph_mode="off", **given)
    expected = [plain.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    engine = make_engine(
        tmp_path, mtp_step=3, max_batch=4, batch_sizes=(1, 4), compile="on", graph_mode=graph_mode, **given
    )
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            for output, wanted in zip(outputs, expected, strict=True):
                assert output.error is None
                assert output.new_token_ids == wanted.new_token_ids
                assert output.prompt_logprobs == wanted.prompt_logprobs
    engine.close()
