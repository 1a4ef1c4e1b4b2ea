"""Prompts that resume at multiples of a step shorter than a launch."""

from __future__ import annotations

import random

import pytest

from tests.fake_runner import FakeRunner
from tests.scheduler.test_prefix import make, request_of, run
from tests.scheduling import expected_tokens, make_request, make_scheduler, step, stream


@pytest.mark.parametrize("chunk", [8, 32, 64])
def test_a_parting_within_a_launch_is_a_resume_point(chunk: int) -> None:
    """It is before the prompt's own resume point, often in the same launch."""
    scheduler, runner = make(prefill_chunk=chunk, prefix_step=4)
    common = list(range(100, 120))
    requests = [request_of(str(n), [*common, *[n] * 9], seed=n) for n in range(5)]
    cached = [run(scheduler, runner, one)[0] for one in requests]
    # The first launch of short chunks ends at 16, where the second resumes.
    assert cached == [0, 16 if chunk == 8 else 0, 20, 20, 20]


def test_a_launch_leaves_a_resume_point_only_where_that_saves_enough() -> None:
    """And never ends because of it."""
    scheduler, runner = make(prefill_chunk=32, prefix_step=4, least_saved=16)
    for length, marks in ((15, [0]), (18, [16]), (40, [0, 0]), (51, [0, 16])):
        before = len(runner.plans)
        run(scheduler, runner, request_of(str(length), [length] * length))
        chunks = [plan.prompt_chunks[0] for plan in runner.plans[before:] if plan.kind == "prefill"]
        assert [prompt_chunk.start for prompt_chunk in chunks] == list(range(0, length, 32))
        assert [prompt_chunk.snapshot_offset for prompt_chunk in chunks] == marks


@pytest.mark.parametrize(("length", "kept"), [(12, []), (16, [16]), (20, [16]), (48, [32, 44])])
def test_a_prompt_leaves_its_very_end_only_where_that_saves_enough(length: int, kept: list[int]) -> None:
    """The end has a key if the prompt is whole chunks long; of 48 tokens the end of the first launch is kept,
    and the last resume point before the end."""
    scheduler, runner = make(prefill_chunk=32, prefix_step=4, least_saved=12 if length == 48 else 16)
    run(scheduler, runner, request_of("a", [1] * length))
    chunks = scheduler.prefix.index._chunks.values()
    assert [4 * chunk.number for chunk in chunks if chunk.snapshot is not None] == kept


def test_a_launch_has_one_snapshot_offset() -> None:
    """A second snapshot position in a chunk ends it; so does the first one in another prompt's chunk."""
    scheduler, runner = make(prefill_chunk=64, prefix_step=4, max_batch=3, max_prompt_chunks=3)
    common = list(range(100, 120))
    run(scheduler, runner, request_of("0", [*common, *[0] * 9]))
    before = len(runner.plans)
    assert run(scheduler, runner, request_of("1", [*common, *[1] * 9])) == [0]
    chunks = [plan.prompt_chunks[0] for plan in runner.plans[before:] if plan.kind == "prefill"]
    assert [
        (prompt_chunk.start, len(prompt_chunk.token_ids), prompt_chunk.snapshot_offset)
        for prompt_chunk in chunks
    ] == [(0, 28, 20), (28, 1, 0)]
    before = len(runner.plans)
    for n in (2, 3):
        scheduler.add(request_of(str(n), [n] * 21))
    stream(scheduler, runner)
    plans = [plan for plan in runner.plans[before:] if plan.kind == "prefill"]
    prompt_chunks = [
        [(one.start, len(one.token_ids), one.snapshot_offset) for one in plan.prompt_chunks] for plan in plans
    ]
    assert prompt_chunks == [[(0, 21, 20), (0, 20, 0)], [(20, 1, 0)]]


def test_a_prompt_with_little_in_common_does_not_wait() -> None:
    """Four common tokens without a snapshot after them are no reason to wait for another prompt."""
    expected = []
    for common in (4, 16):
        scheduler, runner = make(1, prefill_chunk=16, prefix_step=4, max_batch=2)
        for n in range(2):
            scheduler.add(request_of(str(n), [*range(100, 100 + common), *[n] * (22 - common)], 9, n))
        while not any(one.is_first_token_due for one in scheduler._resources.owners.values()):
            step(scheduler, runner)
        (waiting,) = scheduler._planner.admission.waiting.values()
        expected.append(scheduler.prefix.is_expected(waiting))
        stream(scheduler, runner)
    assert expected == [False, True]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("length", [1, 4, 5, 15, 16, 17, 30, 33])
def test_a_prompt_resumes_at_any_multiple_of_prefix_step(length: int, delay: int) -> None:
    """Chunks of 16 tokens, steps of 4."""
    scheduler, runner = make(delay, prefill_chunk=16, prefix_step=4)
    assert run(scheduler, runner, make_request("a", length, 6, 1)) == [0]
    assert run(scheduler, runner, make_request("b", length, 6, 2)) == [(length - 1) // 4 * 4]
    starts = [plan.prompt_chunks[0].start for plan in runner.plans if plan.kind == "prefill"]
    rest = (length - 1) // 4 * 4
    assert starts == [*range(0, length, 16), rest]
    assert scheduler.pool.num_used == 0


def test_a_chunk_is_short_while_rounds_wait_for_it() -> None:
    scheduler, runner = make(1, prefill_chunk=32, prefix_step=4, busy_chunk=8)
    first, second = make_request("a", 33, 30, 1), request_of("b", list(range(300, 340)), 3)
    scheduler.add(first)
    for _ in range(4):
        step(scheduler, runner)
    scheduler.add(second)
    stream(scheduler, runner)
    lengths = [len(plan.prompt_chunks[0].token_ids) for plan in runner.plans if plan.kind == "prefill"]
    assert lengths[:2] == [32, 1]
    assert lengths[2:6] == [8, 8, 8, 8]
    limit = scheduler.limits.max_model_len
    for one in (first, second):
        assert one.output_token_ids == expected_tokens(one, limit)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_with_steps_shorter_than_chunks(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_snapshots=rng.randint(2, 6),
        num_blocks=rng.randint(16, 40),
        max_model_len=60,
        prefill_chunk=16,
        prefix_step=4,
        busy_chunk=rng.choice([0, 4, 8]),
        prefix_host_records=rng.randint(0, 8),
        prefix_host_blocks=2 * rng.randint(2, 10),
        max_batch=rng.randint(1, 3),
        max_in_flight=(delay := rng.randint(0, 1)),
    )
    runner = FakeRunner(scheduler, delay, seed)
    for number in range(40):
        chunks = [1, *(rng.randrange(2) for _ in range(rng.randint(0, 7)))]
        prompt = [100 + chunk for chunk in chunks for _ in range(rng.choice([4, 6]))]
        scheduler.add(request_of(f"r{number}", prompt, rng.choice([3, 8, 9]), number))
        for _ in range(rng.randint(0, 9)):
            step(scheduler, runner)
    stream(scheduler, runner)
    assert scheduler.pool.num_used == 0
    assert scheduler.prefix.num_hits > 5
    scheduler.check_integrity()
