"""The prefix cache's host tier against a runner that checks what every launch reads."""

from __future__ import annotations

import random

import pytest

from compiled_mtp.plan import Copy, StepPlan
from tests.fake_runner import FakeRunner
from tests.scheduler.prefixes import make, request_of, run
from tests.scheduling import make_request, make_scheduler, step, stream


def evictions_of(plan: StepPlan) -> list[Copy]:
    return [move for move in plan.moves if isinstance(move, Copy) and move.target.tier == "prefix_host"]


PREFIX_HOST = {"prefix_host_records": 20, "prefix_host_blocks": 40}


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("copy_delay", [0, 2])
def test_what_the_device_evicts_comes_back_from_the_host(delay: int, copy_delay: int) -> None:
    scheduler, runner = make(delay, num_blocks=21, mtp_step=0, **PREFIX_HOST)
    runner.copy_delay = copy_delay
    prompts = [[n] * 17 for n in range(3)]
    for i, prompt in enumerate(prompts):
        run(scheduler, runner, request_of(str(i), prompt))
    run(scheduler, runner, request_of("big", list(range(60)), 6))
    prefix = scheduler.prefix
    assert prefix.prefix_host.num_blocks_used > 0
    cached = [run(scheduler, runner, request_of(f"late {i}", p, 2))[0] for i, p in enumerate(prompts)]
    assert cached == [16, 16, 16]
    assert prefix.num_host_hits >= 2
    # The state that came back is on the device again.
    hits = prefix.num_host_hits
    assert run(scheduler, runner, request_of("again", prompts[2], 2)) == [16]
    assert prefix.num_host_hits == hits


@pytest.mark.parametrize("delay", [0, 1])
def test_a_snapshot_that_was_evicted_alone_comes_back_to_its_blocks(delay: int) -> None:
    scheduler, runner = make(delay, num_snapshots=1, **PREFIX_HOST)
    run(scheduler, runner, make_request("a", 30, 2, 1))
    # Inner chunks never got the only snapshot; a second prompt takes it from the first one's end.
    run(scheduler, runner, request_of("b", [5] * 20, 2, 2))
    before = len(runner.plans)
    assert run(scheduler, runner, make_request("c", 30, 2, 3)) == [24]
    restored = [m for plan in runner.plans[before:] for m in plan.moves if isinstance(m, Copy)]
    (back,) = [copy for copy in restored if copy.source.tier == "prefix_host"]
    assert scheduler.prefix.num_host_hits == 1
    assert back.has_rows


def test_nothing_is_found_in_the_host_tier_before_its_copy_is_done_or_if_it_was_lost() -> None:
    for is_lost in (False, True):
        scheduler, runner = make(0, num_snapshots=1, **PREFIX_HOST)
        runner.copy_delay = 1000
        run(scheduler, runner, make_request("a", 30, 2, 1))
        scheduler.add(request_of("b", [5] * 20, 2, 2))
        while not (runner.plans and evictions_of(runner.plans[-1])):
            plan = scheduler.schedule()
            runner.fail_next = is_lost and plan is not None and bool(evictions_of(plan))
            scheduler.update(runner.run(plan))
            scheduler.check_integrity()
        assert scheduler.prefix.prefix_host.num_records_used == (not is_lost)
        stream(scheduler, runner)
        (cached,) = run(scheduler, runner, make_request("c", 30, 2, 3))
        assert cached == 0
        scheduler.check_integrity()


def test_a_host_without_memory_shrinks_the_host_tier() -> None:
    scheduler, runner = make(1, num_snapshots=1, **PREFIX_HOST)
    runner.fails_evictions = True
    for name in "abc":
        run(scheduler, runner, request_of(name, [ord(name)] * 20, 2, ord(name)))
    prefix_host = scheduler.prefix.prefix_host
    assert (prefix_host.num_records_used, prefix_host.num_blocks_used) == (0, 0)
    runner.fails_evictions = False
    run(scheduler, runner, request_of("d", [7] * 20, 2, 4), request_of("e", [8] * 20, 2, 5))
    assert (prefix_host.num_records_used, prefix_host.num_blocks_used) == (0, 0)


# Those of the first 400 seeds that lose blocks if host entries are released before the first chunk is
# planned.
@pytest.mark.parametrize("seed", [43, 104, 127, 162, 185, 200, 266, 281, 303, 342, 366, 373, 378, 396, 399])
def test_what_comes_back_from_a_small_host_tier_is_what_went_there(seed: int) -> None:
    """Few snapshots, a tree of chunks, and a host tier that a restored prompt nearly fills: what its first
    chunk evicts must not overwrite its own blocks there. The runner checks all that it computes with.
    """
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_snapshots=rng.randint(2, 6),
        num_blocks=rng.randint(16, 40),
        max_model_len=60,
        prefix_host_records=rng.randint(2, 8),
        prefix_host_blocks=2 * rng.randint(2, 10),
        max_batch=rng.randint(1, 3),
        mtp_step=rng.choice([0, 3]),
        max_in_flight=(delay := rng.randint(0, 1)),
    )
    runner = FakeRunner(scheduler, delay, seed)
    for number in range(40):
        chunks = [1, *(rng.randrange(2) for _ in range(rng.randint(0, 5)))]
        prompt = [100 + chunk for chunk in chunks for _ in range(8)]
        prompt += [200 + rng.randrange(2)] * rng.randint(1, 3)
        scheduler.add(request_of(f"r{number}", prompt, rng.choice([3, 8, 9]), number))
        if rng.random() < 0.6:
            stream(scheduler, runner)
        else:
            for _ in range(rng.randint(0, 9)):
                step(scheduler, runner)
    stream(scheduler, runner)
    assert scheduler.pool.num_used == 0
    scheduler.check_integrity()
