"""Which prompts share a launch: as many as fit, in order, unless one waits for the prefix of another."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_mtp.request import Request
from compiled_mtp.scheduler import Scheduler
from tests.fake_runner import FakeRunner
from tests.scheduler.test_prefix import request_of
from tests.scheduling import expected_tokens, make_request, make_scheduler, step, stream

NUMBERS = {"prefill_chunk": 40, "prefix_step": 8, "max_prompt_chunks": 4, "max_batch": 8, "num_blocks": 200}


def make(delay: int = 1, **numbers: Any) -> tuple[Scheduler, FakeRunner]:
    scheduler = make_scheduler(max_in_flight=delay, **(NUMBERS | {"max_model_len": 100} | numbers))
    return scheduler, FakeRunner(scheduler, delay)


def run(scheduler: Scheduler, runner: FakeRunner, *requests: Request) -> list[list[tuple[str, int]]]:
    """Decode requests; return, for each prefill launch, its requests and their numbers of tokens."""
    num_before = len(runner.plans)
    for request in requests:
        scheduler.add(request)
    owners: dict[tuple[int, int], str] = {}
    while scheduler.has_unfinished():
        step(scheduler, runner)
        held = scheduler._resources.owners.values()
        owners |= {(one.slot, one.generation): one.request.request_id for one in held}
    limit = scheduler.limits.max_model_len
    assert [one.output_token_ids for one in requests] == [expected_tokens(one, limit) for one in requests]
    prefills = [plan for plan in runner.plans[num_before:] if plan.kind == "prefill"]
    return [
        [
            (owners[owner], len(prompt_chunk.token_ids))
            for *owner, prompt_chunk in zip(plan.slots, plan.generations, plan.prompt_chunks, strict=True)
            for owner in [tuple(owner)]
        ]
        for plan in prefills
    ]


def requests_of(**lengths: int) -> list[Request]:
    """Prompts that have nothing in common."""
    return [
        request_of(name, [1000 * number + i for i in range(length)], 4, number)
        for number, (name, length) in enumerate(lengths.items(), start=1)
    ]


@pytest.mark.parametrize("delay", [0, 1])
def test_prompts_share_a_launch_in_order_and_none_is_cut_for_it(delay: int) -> None:
    scheduler, runner = make(delay)
    found = run(scheduler, runner, *requests_of(a=3, b=9, c=20, d=1, e=2, f=50, g=8, h=8))
    # Chunks begin at multiples of 8 rows: 8 + 16 and 16 left. Four at most. No part of f; none overtakes it.
    assert found[0] == [("a", 3), ("b", 9)]
    assert found[1:] == [[("c", 20), ("d", 1), ("e", 2)], [("f", 40)], [("f", 10), ("g", 8), ("h", 8)]]


PADDED = {"prefill_chunk": 256, "prompt_lengths": (64, 128, 256), "max_model_len": 400}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_part_of_a_prompt_fills_the_rows_that_a_launch_has_anyway(delay: int) -> None:
    scheduler, runner = make(delay, **PADDED)
    # 64 + 128 rows take 256: 64 more are free. The rest of c and d take 256 too, and no prompt is left.
    found = run(scheduler, runner, *requests_of(a=60, b=125, c=200, d=30))
    assert found == [[("a", 60), ("b", 125), ("c", 64)], [("c", 136), ("d", 30)]]
    # 8 rows take 64: a part has 56. Nothing comes after a part.
    found = run(scheduler, runner, *requests_of(b=5, d=300, e=7))
    assert found == [[("b", 5), ("d", 56)], [("d", 244), ("e", 7)]]


def test_no_part_makes_a_launch_longer() -> None:
    scheduler, runner = make(**PADDED)
    # 64 rows hold two chunks: with a third the launch would have 128.
    assert run(scheduler, runner, *requests_of(b=5, c=6, d=300)) == [
        [("b", 5), ("c", 6)],
        [("d", 256)],
        [("d", 44)],
    ]
    # Without programs no launch has empty rows.
    scheduler, runner = make(**(PADDED | {"prompt_lengths": ()}))
    found = run(scheduler, runner, *requests_of(a=60, b=125, c=200, d=30))
    assert found == [[("a", 60), ("b", 125)], [("c", 200), ("d", 30)]]


def test_a_prompt_with_log_probabilities_gives_no_part() -> None:
    scheduler, runner = make(**PADDED)
    first, second = requests_of(b=5, d=300)
    alone = request_of("alone", list(range(300)), 4, 9, prompt_logprobs=1)
    assert run(scheduler, runner, first, alone, second)[:2] == [[("b", 5)], [("alone", 256)]]


def test_a_launch_has_at_most_max_prompt_chunks() -> None:
    short = dict.fromkeys("abcde", 3)
    one, four = (run(*make(max_prompt_chunks=most), *requests_of(**short)) for most in (1, 4))
    assert [len(prompt_chunks) for prompt_chunks in one] == [1, 1, 1, 1, 1]
    assert [len(prompt_chunks) for prompt_chunks in four] == [4, 1]


@pytest.mark.parametrize("delay", [0, 1])
def test_while_rounds_wait_a_launch_is_short_for_all_together(delay: int) -> None:
    scheduler, runner = make(delay, busy_chunk=16)
    scheduler.add(make_request("old", 3, 60, ignore_eos=True))
    while not any(plan.kind == "decode" for plan in runner.plans):
        step(scheduler, runner)
    num_before = len(runner.plans)
    for request in requests_of(a=8, b=8, c=8):
        scheduler.add(request)
    stream(scheduler, runner)
    kinds = [(plan.kind, len(plan.slots)) for plan in runner.plans[num_before : num_before + 4]]
    assert [kind for kind in kinds if kind[0] == "prefill"] == [("prefill", 2), ("prefill", 1)]


@pytest.mark.parametrize(
    ("num_waiting", "rows"), [(1, 8), (7, 8), (8, 16), (15, 16), (16, 32), (31, 32), (60, 32)]
)
def test_while_rounds_wait_launches_grow_with_the_prompts_to_start(num_waiting: int, rows: int) -> None:
    numbers = {"busy_chunk": 8, "prefill_chunk": 32, "max_batch": 64, "num_blocks": 4000}
    scheduler, runner = make(**numbers)
    scheduler.add(make_request("old", 3, 60, ignore_eos=True))
    while not any(plan.kind == "decode" for plan in runner.plans):
        step(scheduler, runner)
    num_before = len(runner.plans)
    for request in requests_of(**{f"r{number}": 40 for number in range(num_waiting)}):
        scheduler.add(request)
    while (plan := runner.plans[-1]).kind != "prefill" or len(runner.plans) == num_before:
        step(scheduler, runner)
    assert [len(prompt_chunk.token_ids) for prompt_chunk in plan.prompt_chunks] == [rows]
    stream(scheduler, runner)


def test_prompts_without_a_free_slot_make_no_launch_longer() -> None:
    scheduler, runner = make(busy_chunk=8, prefill_chunk=32, max_batch=3, num_blocks=4000)
    scheduler.add(make_request("old", 3, 60, ignore_eos=True))
    scheduler.add(make_request("older", 3, 60, ignore_eos=True))
    while not any(plan.kind == "decode" for plan in runner.plans):
        step(scheduler, runner)
    num_before = len(runner.plans)
    for request in requests_of(**{f"r{number}": 20 for number in range(20)}):
        scheduler.add(request)
    stream(scheduler, runner)
    prefills = [plan for plan in runner.plans[num_before:] if plan.kind == "prefill"]
    counts = [len(prompt_chunk.token_ids) for plan in prefills for prompt_chunk in plan.prompt_chunks]
    # The old ones end before the last prompts: then no round waits.
    assert counts[:9] == [8, 8, 4] * 3


@pytest.mark.parametrize("delay", [0, 1])
def test_first_tokens_apart_follow_the_launch_one_by_one(delay: int) -> None:
    """Two-phase requests share a launch; a prompt with log probabilities of its own does not."""
    scheduler, runner = make(delay)
    prompts = [[1000 * n] * 3 for n in range(5)]
    fields: list[dict[str, Any]] = [{"logprobs": 1}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {}]
    requests = [
        request_of(str(i), prompt, 4, i, **own)
        for i, (prompt, own) in enumerate(zip(prompts, fields, strict=True))
    ]
    found = run(scheduler, runner, *requests)
    assert [[name for name, _ in prompt_chunks] for prompt_chunks in found] == [["0", "1", "2"], ["3"], ["4"]]
    kinds = [plan.kind for plan in runner.plans]
    assert kinds[:3] == ["prefill", "first", "first"]


def test_prompts_with_a_common_beginning_wait_for_one_another() -> None:
    """The second shows where they part, the third resumes there; others share the launch of the first."""
    scheduler, runner = make(num_snapshots=8, prefix_step=8)
    prompts = {"a": [*range(8), 50, 51], "other": [9] * 7, "b": [*range(8), 60], "c": [*range(8), 70, 71]}
    found = run(
        scheduler, runner, *(request_of(name, p, 4, i) for i, (name, p) in enumerate(prompts.items()))
    )
    assert found[0] == [("a", 10), ("other", 7)]
    assert sum(len(prompt_chunks) for prompt_chunks in found) <= 5
    again = run(
        scheduler, runner, request_of("d", [*range(8), 80], 4, 7), request_of("e", [*range(8), 90], 4, 8)
    )
    assert again == [[("d", 1), ("e", 1)]]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_snapshot_filled_by_a_move_is_not_overwritten_after_the_launch(delay: int) -> None:
    """There is one snapshot: the first prompt takes it, and the second brings its state from the host into
    it.
    """
    host = {"prefix_host_records": 8, "prefix_host_blocks": 40}
    scheduler, runner = make(delay, num_snapshots=1, **host)
    known, *others = requests_of(a=19, b=19, c=17)
    run(scheduler, runner, known)
    run(scheduler, runner, others[0])
    again = [request_of(name, known.prompt_token_ids, 4, index) for index, name in enumerate("de", 7)]
    assert run(scheduler, runner, others[1], again[0]) == [[("c", 17), ("d", 3)]]
    assert scheduler.prefix.num_host_hits == 1
    assert run(scheduler, runner, again[1]) == [[("e", 3)]]
    assert scheduler.prefix.num_host_hits == 1


@pytest.mark.parametrize("delay", [0, 1])
def test_an_error_ends_the_requests_of_its_launch_alone_with_shared_prompts(delay: int) -> None:
    scheduler, runner = make(delay)
    for request in requests_of(a=3, b=3, c=40):
        scheduler.add(request)
    runner.fail_next = True
    reasons = {o.request_id: o.finish_reason for o in stream(scheduler, runner) if o.finish_reason}
    assert reasons == {"a": "error", "b": "error", "c": "length"}
    assert scheduler.pool.num_used == 0
