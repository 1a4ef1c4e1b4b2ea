"""Prompts that share a launch: each has the bits that it has alone, in every packing and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import lay_out
from compiled_mtp.graphs.compile import compile_program, compiler_settings, mark_static
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.rounds.prefill import prefill
from compiled_mtp.step import Step
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.step.test_prompt_chunks import left_by

CONFIGS = {"dense": tiny.tiny_config(), "moe": tiny.tiny_config(**tiny.MOE)}
PROMPTS = {1: 150, 2: 1, 3: 64, 4: 9, 5: 331}


def prompt(slot: int) -> list[int]:
    return prompt_of(PROMPTS[slot], slot, 96)


@torch.no_grad()
def launch(
    step: Step,
    cuts: Sequence[tuple[int, int, int]],
    padding: int = 0,
    unused: int = 0,
    snapshot_offset: tuple[int, int] = (0, 0),
    run: Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor] = prefill,
) -> None:
    """Prefill the tokens (slot, start, end) side by side; rows of no chunk have any id.

    snapshot_offset: a slot, and the position at which its state is copied to the last slot.
    """
    first_rows, end = lay_out([last - first for _, first, last in cuts])
    tokens = torch.full((end + padding,), 17)
    for (slot, first, last), row in zip(cuts, first_rows, strict=True):
        tokens[row : row + last - first] = torch.tensor(prompt(slot)[first:last])
    columns = [
        (s, first, last - first, row, snapshot_offset[1] - first if s == snapshot_offset[0] else 0)
        for (s, first, last), row in zip(cuts, first_rows, strict=True)
    ]
    columns += [(0, 0, 0, end, 0)] * unused
    run(step, tokens, torch.tensor(columns).t().contiguous())


def make_step(family: str, slots: Sequence[int]) -> Step:
    step = tiny.build_step(CONFIGS[family], 3, max_batch=max(PROMPTS), max_model_len=512)
    for slot in slots:
        tiny.admit(step, slot, seed=slot, temperature=0.8)
    return step


@torch.no_grad()
def first_tokens(step: Step, slots: Sequence[int]) -> dict[int, list[int]]:
    packed = first_token(step, torch.tensor(slots, dtype=torch.int32), 3)
    return {slot: row for slot, row in zip(slots, packed.tolist(), strict=True) if slot}


# Every launch, as (slot, start, end).
PACKINGS = {
    "all in one, except later chunks of one prompt": [
        [(2, 0, 1), (4, 0, 9), (1, 0, 128), (3, 0, 64), (5, 0, 320)],
        [(5, 320, 331), (1, 128, 150)],
    ],
    "one after another's end": [
        [(5, 0, 64)],
        [(5, 64, 192), (3, 0, 64), (2, 0, 1)],
        [(1, 0, 64), (5, 192, 331)],
        [(4, 0, 9), (1, 64, 150)],
    ],
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_other_prompts_change_no_bit(family: str, num_threads: int) -> None:
    """Compare prompts' states and keys, first tokens and drafts, with slots and blocks full of NaN."""
    with tiny.threads(num_threads):
        alone, told = {}, {}
        for slot, length in PROMPTS.items():
            step = make_step(family, [slot])
            for start in range(0, length, 128):
                launch(step, [(slot, start, min(start + 128, length))])
            told |= first_tokens(step, [slot])
            alone[slot] = left_by(step, slot, length)
        for name, launches in PACKINGS.items():
            step = make_step(family, list(PROMPTS))
            for number, cuts in enumerate(launches):
                launch(step, cuts, padding=3 * number, unused=number)
            assert first_tokens(step, [4, 1, 0, 5, 2, 3, 0]) == told, name
            for slot, length in PROMPTS.items():
                for index, (one, other) in enumerate(
                    zip(left_by(step, slot, length), alone[slot], strict=True)
                ):
                    assert torch.equal(one, other), f"{name}: number {index} of slot {slot}"
            assert not step.slots.last_hidden[0].any()
            assert not any(
                int(table[0]) for table in (step.slots.pos, step.slots.base, step.slots.last_token)
            )


@pytest.mark.parametrize("offset", [64, 128, 256])
def test_a_snapshot_equals_the_state_of_a_chunk_that_ends_there(offset: int) -> None:
    """Equal in the rows that a snapshot holds, in the last slot; nothing else changes by a bit."""
    ending, saved, plain = (make_step("dense", [3, 5]) for _ in range(3))
    tiny.poison(saved)
    for slot in (3, 5):
        tiny.admit(saved, slot, seed=slot, temperature=0.8)
    launch(ending, [(5, 0, offset)])
    launch(plain, [(3, 0, 64), (5, 0, 331)], unused=1)
    launch(saved, [(3, 0, 64), (5, 0, 331)], unused=1, snapshot_offset=(5, offset))
    kept = [entry for entry in saved.slot_tensors if entry.is_in_snapshot]
    assert [entry.name for entry in kept] == ["last_hidden", "gdn.state", "gdn.conv_ring"]
    positions = [position % saved.state_cache.ring_length for position in range(offset - 3, offset)]
    for entry in kept:
        one, other = entry.tensor[-1], ending.slot_tensors[entry.name][5]
        if entry.name == "gdn.conv_ring":
            one, other = one[:, positions], other[:, positions]
        assert torch.equal(one, other), entry.name
    assert not saved.slots.last_hidden[0].any()
    for slot, length in ((3, 64), (5, 331)):
        for one, other in zip(left_by(saved, slot, length), left_by(plain, slot, length), strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def test_compiled_launches_leave_the_state_of_uncompiled_ones() -> None:
    """One program of 128 rows and four chunks serves any number of chunks."""
    step, twin = (make_step("dense", list(PROMPTS)) for _ in range(2))
    tokens, prompt_chunks = torch.zeros(128, dtype=torch.int64), torch.zeros((5, 4), dtype=torch.int64)
    mark_static([*step.parameters(), *step.buffers(), tokens, prompt_chunks])
    with compiler_settings():
        program = compile_program(partial(prefill, step), "packed", None)
        program(tokens, prompt_chunks)

        def both(step: Step, *given: torch.Tensor) -> torch.Tensor:
            for static, value in zip((tokens, prompt_chunks), given, strict=True):
                static.copy_(value)
            program(tokens, prompt_chunks)
            return prefill(step, *given)

        with torch.compiler.set_stance("fail_on_recompile"):
            for cuts in ([(2, 0, 1), (4, 0, 9), (3, 0, 64)], [(1, 0, 128)], [(1, 128, 150)]):
                _, end = lay_out([last - first for _, first, last in cuts])
                launch(twin, cuts, padding=128 - end, unused=4 - len(cuts), run=both)
    for slot in (1, 2, 3, 4):
        for one, other in zip(
            left_by(step, slot, PROMPTS[slot]), left_by(twin, slot, PROMPTS[slot]), strict=True
        ):
            assert torch.equal(one, other)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("packing"))


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> tuple[Engine, Engine]:
    """One engine runs one request at a time, without drafts and cache; the other packs six."""
    options: dict[str, Any] = {"prefill_chunk": 128, "max_model_len": 512}
    plain = make_engine(checkpoint, prefix_cache=False, max_batch=1, mtp_step=0, **options)
    return plain, make_engine(checkpoint, mtp_step=3, max_batch=6, **options)


def record_plans(engine: Engine) -> list[Any]:
    """Return the list to which an engine's plans are appended from now on."""
    plans: list[Any] = []
    run = type(engine.runner).run.__get__(engine.runner)

    def recorded(plan: Any) -> Any:
        plans.append(plan)
        return run(plan)

    engine.runner.run = recorded  # type: ignore[method-assign]
    return plans


lengths = st.one_of(st.integers(1, 40), st.integers(1, 300))
wishes = st.sampled_from(["nothing", "nothing", "nothing", "logprobs", "prompt", "grammar", "drafts"])
traffic = st.lists(
    st.tuples(lengths, wishes, st.integers(0, 3), st.integers(1, 3), st.integers(0, 9)),
    min_size=1,
    max_size=9,
)


def params_of(wish: str, seed: int, max_tokens: int) -> SamplingParams:
    wanted: dict[str, Any] = {
        "logprobs": {"logprobs": 2},
        "prompt": {"prompt_logprobs": 1},
        "drafts": {"include_drafts": True},
    }.get(wish, {})
    temperature = 0.8 * (seed % 2)
    if wish == "grammar":
        wanted = {"allowed_token_ids": tuple(range(5, 60)), "logprobs": 0}
    return SamplingParams(
        max_tokens=max_tokens, seed=seed, temperature=temperature, ignore_eos=True, **wanted
    )


def check_traffic(
    engines: tuple[Engine, Engine], requests: list[tuple[int, str, int, int, int]]
) -> list[int]:
    """Check that prompts of few families, arriving at random, each have the output that they have alone.

    Returns how many prompts the launches had.
    """
    plain, packing = engines
    plans = record_plans(packing)
    told: list[dict[str, Any]] = [{}, {}]

    def take(outputs: list[Any], into: dict[str, Any]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            entry = into.setdefault(output.request_id, ([], [], []))
            entry[0].extend(output.new_token_ids)
            entry[1].extend(output.logprobs or ())
            entry[2].extend(output.prompt_logprobs or ())

    for number, (length, wish, family, max_tokens, wait) in enumerate(requests):
        # Prompts of one family begin alike.
        given: dict[str, Any] = {
            "prompt_token_ids": prompt_of(length, family, plain.model_config.vocab_size),
            "params": params_of(wish, number, max_tokens),
            "request_id": f"{number}",
        }
        plain.add_request(**given)
        while plain.has_unfinished_requests():
            take(plain.step(), told[0])
        packing.add_request(**given)
        for _ in range(max(wait - 7, 0)):
            take(packing.step(), told[1])
    while packing.has_unfinished_requests():
        take(packing.step(), told[1])
        packing.scheduler.check_integrity()
    assert told[1] == told[0]
    assert packing.stats().blocks_used == 0
    return [len(plan.slots) for plan in plans if plan.kind == "prefill"]


@settings(max_examples=12, deadline=None)
@given(requests=traffic)
def test_random_prompts_have_the_tokens_that_they_have_alone(
    engines: tuple[Engine, Engine], requests: list[tuple[int, str, int, int, int]]
) -> None:
    check_traffic(engines, requests)


def test_prompts_that_arrive_together_share_launches(engines: tuple[Engine, Engine]) -> None:
    """Up to four prompts in 128 rows; a prompt with log probabilities of its own goes alone."""
    short = [(9, "nothing", family, 3, 0) for family in (20, 21, 22)]
    assert check_traffic(engines, short) == [3]
    assert check_traffic(engines, [*short, (9, "nothing", 23, 3, 0), (9, "drafts", 24, 3, 0)]) == [4, 1]
    assert check_traffic(engines, [(9, "logprobs", 25, 3, 0), (9, "grammar", 26, 3, 0), *short]) == [4, 1]
    # The first prompt's chunk goes as far as it can, past its resume point; others are not cut and not
    # overtaken.
    sizes = [(200, "nothing", 30, 3, 0), (20, "nothing", 31, 3, 0), (60, "nothing", 32, 3, 0), *short]
    assert check_traffic(engines, sizes) == [1, 2, 4]
    assert check_traffic(engines, [short[0], (9, "prompt", 33, 3, 0), *short[1:]]) == [1, 1, 2]
