"""The contract with as many requests as an engine may run: the tokens of each are those that it has alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_mtp.config.engine_config import MOST_BATCH
from compiled_mtp.graphs.buckets import prefill_lengths
from compiled_mtp.plan import StepPlan
from compiled_mtp.request import SamplingParams
from compiled_mtp.runner.spec import EngineSpec
from tests.checkpoints import write_checkpoint
from tests.engines import collect, make_engine, prompt_of, run_to_end

# A launch takes 16 prompts: all requests run before the first one ends.
COUNT = 20


def params_of(index: int) -> SamplingParams:
    """Greedy and sampled requests, some with penalties, log probabilities or a grammar."""
    return SamplingParams(
        max_tokens=COUNT,
        temperature=0.0 if index % 3 == 0 else 0.9,
        seed=index,
        ignore_eos=True,
        presence_penalty=0.5 if index % 5 == 0 else 0.0,
        logprobs=2 if index % 32 == 1 else None,
        guided_regex="[a-z0-9 ]{99}" if index % 32 == 2 else None,
    )


def test_as_many_requests_as_an_engine_takes_have_the_tokens_of_each_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, num_layers=4, tokenizer=True)
    prompts = [prompt_of(1 + index % 23, index, 512) for index in range(MOST_BATCH)]
    # Poisoned slots show a row that reads another request's.
    sizes = {"max_batch": MOST_BATCH, "max_model_len": 64, "prefill_chunk": 512}
    engine = make_engine(directory, mtp_step="auto", **sizes)
    # As on a GPU: rounds of many requests leave states unfolded.
    states = engine.runner.step.state_cache
    for each in (states, *states.layers):
        each.max_unfolded = states.ring_length // 2
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt_token_ids=prompt, params=params_of(index), request_id=str(index))
    tokens: dict[str, list[int]] = {}
    most = 0
    while engine.has_unfinished_requests():
        most = max(most, engine.stats().running)
        collect(tokens, engine.step())
    assert most == MOST_BATCH
    assert engine.stats().blocks_used == 0
    alone = make_engine(directory, max_batch=1, max_model_len=64, mtp_step=0)
    for index in range(0, MOST_BATCH, 11):
        name = str(index)
        alone.add_request(prompt_token_ids=prompts[index], params=params_of(index), request_id=name)
        assert run_to_end(alone) == {name: tokens[name]}


def test_prompts_that_are_cut_to_fill_launches_have_the_tokens_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose programs have fixed numbers of rows."""
    directory = write_checkpoint(tmp_path, num_layers=4)
    prompts = [prompt_of(20 + 67 * index % 240, index, 512) for index in range(24)]
    params = [
        SamplingParams(max_tokens=8, temperature=0.9, seed=index, ignore_eos=True) for index in range(24)
    ]
    alone = make_engine(directory, mtp_step=0)
    expected = [
        alone.generate([prompt], one)[0].new_token_ids for prompt, one in zip(prompts, params, strict=True)
    ]
    monkeypatch.setattr(EngineSpec, "prompt_lengths", prefill_lengths(256, has_middles=True))
    engine = make_engine(directory, prefill_chunk=256, max_batch=12)
    plans = list[StepPlan]()
    launch = engine.runner._launch
    monkeypatch.setattr(engine.runner, "_launch", lambda plan: (plans.append(plan), launch(plan))[1])
    assert [output.new_token_ids for output in engine.generate(prompts, params)] == expected
    chunks = [plan.prompt_chunks for plan in plans if len(plan.prompt_chunks) > 1]
    parts = [own[-1] for own in chunks if own[-1].start == 0 and not own[-1].is_last]
    assert parts
    assert all(len(part.token_ids) % 64 == 0 for part in parts)
