"""mtp_step "auto": the same tokens whatever depth each round has, and the statistics of depths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepResult
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of, run_to_end

VOCAB, COUNT = 512, 12
LENGTHS = (1, 30, 64)
DEPTHS = (0, 1, 2, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adaptive")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


def add_all(engine: Engine) -> None:
    """Add greedy and sampled requests, one with log probabilities, whose rounds have two phases."""
    for length in LENGTHS:
        fields = {"logprobs": 2} if length == 30 else {}
        temperature = 0.0 if length == 64 else 0.8
        params = SamplingParams(
            max_tokens=COUNT, temperature=temperature, seed=length, ignore_eos=True, **fields
        )
        prompt = prompt_of(length, length, VOCAB)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(length))


@pytest.fixture(scope="module")
def streams(checkpoint: Path) -> dict[str, list[int]]:
    engine = make_engine(checkpoint, mtp_step=0, max_batch=1)
    add_all(engine)
    return run_to_end(engine)


@pytest.fixture(scope="module", params=[0, 1])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    options = {"mtp_depths": DEPTHS, "max_in_flight": request.param, "max_batch": 2, "max_model_len": 96}
    return make_engine(checkpoint, mtp_step="auto", **options)


def force(engine: Engine, depths: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine._steps.depths is not None
    monkeypatch.setattr(engine._steps.depths.controller, "choose", lambda bucket, context: next(depths))


@given(depths=st.lists(st.sampled_from(DEPTHS), min_size=1, max_size=30))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_tokens_at_any_depth_in_any_round(
    engine: Engine, streams: dict[str, list[int]], depths: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        force(engine, cycle(depths), monkeypatch)
        add_all(engine)
        assert run_to_end(engine) == streams


def test_the_draft_reads_only_written_keys_after_rounds_without_drafts(
    engine: Engine, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    force(engine, cycle([0] * 9 + [5, 1]), monkeypatch)
    add_all(engine)
    step, tokens, checked = engine.runner.step, dict[str, list[int]](), 0
    assert step.kv_cache.draft is not None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        for slot in engine.scheduler.running:
            if step.slots.num_deferred[slot] == 0:
                table = step.slots.block_table[slot].long().clamp(min=0)
                keys = step.kv_cache.draft.kv[table, 0].transpose(1, 2).flatten(0, 1)
                assert not keys[1 : int(step.slots.pos[slot]) + 1].isnan().any()
                checked += 1
    assert tokens == streams
    assert checked > 5


def test_a_result_that_is_ready_before_its_read_is_late(
    engine: Engine, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events as on a GPU, some already done when the host asks."""
    assert engine._steps.depths is not None
    runner, turns, expected, found = engine.runner, cycle([True, False, False]), [], []
    make, read = runner._make_buffer, engine._steps.depths.read

    class Event:
        def query(self) -> bool:
            expected.append(next(turns))
            return expected[-1]

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    def note(result: StepResult) -> None:
        found.append(result.is_late)
        read(result)

    monkeypatch.setattr(runner, "_free_buffers", {})
    monkeypatch.setattr(runner, "_make_buffer", lambda shape: replace(make(shape), ready=Event()))
    monkeypatch.setattr(engine._steps.depths, "read", note)
    add_all(engine)
    assert run_to_end(engine) == streams
    assert found == expected
    assert {True, False} == set(found)


def test_auto_chooses_by_itself_and_counts_what_it_chose(
    engine: Engine, streams: dict[str, list[int]]
) -> None:
    before = engine.stats().rounds_by_depth
    assert set(before) == set(DEPTHS)
    add_all(engine)
    launched = []
    run = engine.runner.run

    def note(plan: object) -> object:
        launched.append(plan)
        return run(plan)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine.runner, "run", note)
        assert run_to_end(engine) == streams
    after = engine.stats().rounds_by_depth
    for depth in DEPTHS:
        rounds = [p for p in launched if getattr(p, "kind", "") in ("decode", "verify")]
        mine = sum(plan.shape.verify == depth for plan in rounds)
        assert sum(after[depth].values()) - sum(before[depth].values()) == mine
    assert sum(why["only"] for why in after.values()) == 0


def test_buffers_are_made_for_the_largest_depth_and_one_depth_is_no_choice(checkpoint: Path) -> None:
    options = {"max_batch": 1, "max_model_len": 96}
    engine = make_engine(checkpoint, mtp_step="auto", mtp_depths=(2,), **options)
    assert (engine.runner.step.mtp_step, engine.scheduler.limits.mtp_step) == (2, 2)
    add_all(engine)
    run_to_end(engine)
    (counts,) = engine.stats().rounds_by_depth.values()
    assert counts["only"] > 0 == counts["best"]
    assert make_engine(checkpoint, mtp_step=1, **options).stats().rounds_by_depth == {}


def test_an_interrupted_step_leaves_the_depths_usable(
    engine: Engine, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_all(engine)
    for _ in range(6):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda plan: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run_to_end(engine)
    add_all(engine)
    assert run_to_end(engine) == streams
    torch.testing.assert_close(engine.runner.step.slots.num_deferred[0], torch.tensor(0))
