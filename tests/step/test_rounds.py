"""Rounds of any depth, in one phase or in two with other launches between them: the same tokens."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import StepPlan
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.programs import Programs
from tests.checkpoints import write_checkpoint
from tests.drivers import Driver, make_runner, with_rounds
from tests.engines import prompt_of

VOCAB = 512
PROMPTS = {"a": prompt_of(20, 1, VOCAB), "b": prompt_of(70, 2, VOCAB), "c": prompt_of(65, 3, VOCAB)}
DEPTHS = (3, 1, 0, 7, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rounds")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture(scope="module")
def streams(checkpoint: Path) -> dict[str, list[int]]:
    """The tokens of each request, decoded one token at a time."""
    driver = Driver(make_runner(checkpoint, mtp_step=0))
    for slot, (name, prompt) in enumerate(PROMPTS.items(), start=1):
        driver.start(name, slot, prompt, chain=0)
        for _ in range(40):
            driver.decode(name, verify=0, chain=0)
    return driver.drain()


def check(driver: Driver, streams: dict[str, list[int]]) -> None:
    for name, tokens in driver.drain().items():
        assert len(tokens) > 6
        assert tokens == streams[name][: len(tokens)]


def two_phase_round(driver: Driver, *names: str, between: str | None = None) -> None:
    """Run a round in two phases; `between` is prefilled between them."""
    depth = {"shape": RoundShape(3, 3)}
    driver.run("verify", names, **depth)
    if between is not None:
        driver.start(between, 3, PROMPTS[between])
    driver.run("accept", names, **depth)


def mixed_rounds(driver: Driver) -> None:
    """Run rounds in one phase and in two by turns, with prompts before, between and after."""
    driver.start("a", 1, PROMPTS["a"])
    two_phase_round(driver, "a")
    driver.start("b", 2, PROMPTS["b"])
    driver.decode("b", "a")
    two_phase_round(driver, "a", "b", between="c")
    driver.decode("a", "b")
    two_phase_round(driver, "c", "a")
    for _ in range(3):
        two_phase_round(driver, "b", "c")
        driver.decode("a", "c")


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_rounds_in_one_phase_and_in_two_by_turns(
    checkpoint: Path, streams: dict[str, list[int]], max_in_flight: int
) -> None:
    runner = make_runner(checkpoint, max_in_flight=max_in_flight)
    driver = Driver(runner)
    mixed_rounds(driver)
    check(driver, streams)
    assert all(not any(r.token_ids) for r in driver.results if r.plan.kind == "verify")


def test_rounds_in_one_phase_and_in_two_compiled(checkpoint: Path, streams: dict[str, list[int]]) -> None:
    runner = make_runner(checkpoint, compile="on", batch_sizes=(2,), lookup="off")
    # Two and three requests share a program; phases run uncompiled.
    names = {shape.name for shape in runner.programs.shapes()}
    assert (runner.programs.count, len(names)) == (5, 4)
    driver = Driver(runner)
    with torch.compiler.set_stance("fail_on_recompile"):
        mixed_rounds(driver)
    check(driver, streams)


def deep_and_shallow(driver: Driver) -> None:
    """Run depths 3, 1, 0, 7, 3 in a request's life, each verified in the next round; then 7 with 1 draft."""
    driver.start("a", 1, PROMPTS["a"], chain=3)
    driver.start("b", 2, PROMPTS["b"], chain=0)
    for verify, chain in pairwise(DEPTHS):
        driver.decode("a", "b", verify=verify, chain=chain)
    for verify, chain in ((3, 1), (7, 0), (1, 3)):
        driver.decode("b", "a", verify=verify, chain=chain)


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_depth_changes_from_round_to_round(
    checkpoint: Path, streams: dict[str, list[int]], max_in_flight: int
) -> None:
    runner = make_runner(checkpoint, mtp_step=7, max_in_flight=max_in_flight)
    driver = Driver(with_rounds(runner, product({*DEPTHS}, repeat=2)))
    deep_and_shallow(driver)
    check(driver, streams)


def test_compiled_programs_have_the_configured_depths(
    checkpoint: Path, streams: dict[str, list[int]]
) -> None:
    runner = make_runner(checkpoint, mtp_step=2, batch_sizes=(3,))
    with_rounds(runner, product((0, 2), repeat=2), is_compiled=True)
    # Four rounds, first tokens of one and of two prompts, a chunk, and the deferral of a round without
    # drafts.
    assert runner.programs.count == 4 + 4 + 1 + 1
    driver = Driver(runner)
    with torch.compiler.set_stance("fail_on_recompile"):
        driver.start("a", 1, PROMPTS["a"], chain=2)
        driver.start("b", 2, PROMPTS["b"], chain=0)
        for verify, chain in ((2, 0), (0, 0), (0, 2), (2, 2), (2, 2), (2, 2)):
            driver.decode("a", "b", verify=verify, chain=chain)
        result = runner.run(StepPlan(0, "decode", (1,), (0,), shape=RoundShape(1, 2)))
    assert result is not None
    assert result.error is not None
    assert "must have a shape that programs were made for, got RoundShape" in result.error
    check(driver, streams)


def test_drafts_are_returned_if_asked_for(checkpoint: Path) -> None:
    for with_drafts in (False, True):
        runner = make_runner(checkpoint, lookup="off")
        driver = Driver(with_rounds(runner, product((0, 2, 3), repeat=2)))
        driver.start("a", 1, PROMPTS["a"], chain=2)
        slots = driver.runner.step.slots
        for chain in (2, 3, 0):
            driver.decode("a", verify=3, chain=chain, wants_drafts=with_drafts)
            expected = [slots.drafts[1, :chain].tolist()] if with_drafts else []
            assert list(driver.results[-1].drafts) == expected


def test_the_phases_of_a_round_belong_together(checkpoint: Path) -> None:
    driver = Driver(make_runner(checkpoint))
    driver.start("a", 1, PROMPTS["a"])
    driver.start("b", 2, PROMPTS["b"])
    driver.run("verify", ("a", "b"), shape=RoundShape(3, 3))
    for slots, verify in (((2, 1), 3), ((1, 2), 2)):
        plan = StepPlan(0, "accept", slots, (0, 1), shape=RoundShape(verify, 3))
        result = driver.runner.run(plan)
        assert result is not None
        assert "accept must follow the verify of its own round, got" in str(result.error)
    driver.run("accept", ("a", "b"), shape=RoundShape(3, 3))
    result = driver.runner.run(StepPlan(0, "accept", (1, 2), (0, 1), shape=RoundShape(3, 3)))
    assert result is not None
    assert "after None; plan both phases" in str(result.error)


def test_kernels_beside_the_programs_can_be_launched_ahead(
    checkpoint: Path, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a round with masks and log probabilities, at every depth, without a change to any
    request."""
    runner = with_rounds(make_runner(checkpoint), product(range(4), repeat=2))
    rows: dict[str, list[int]] = {}

    def record(module: str, name: str) -> None:
        plain = getattr(import_module(f"compiled_mtp.{module}"), name)

        def recorded(logits: torch.Tensor, *args: Any, **named: Any) -> Any:
            is_masked = name == "sample" and named["masks"] is not None
            rows.setdefault(f"{name} masked" if is_masked else name, []).append(logits.shape[0])
            return plain(logits, *args, **named)

        monkeypatch.setattr(f"compiled_mtp.{module}.{name}", recorded)

    record("rounds.logprobs", "row_logprobs")
    record("rounds.logprobs", "filter_logits")
    record("step", "sample")
    record("rounds.prompt_logprobs", "row_logprobs")
    runner.programs.launch_apart()
    buckets = runner.programs.buckets
    shapes = {bucket.shape for bucket in buckets}
    least = {shape: min(b.rows for b in buckets if b.shape == shape) for shape in shapes}
    rounds = sorted(least.values(), reverse=True)
    firsts = [1] * len({bucket.shape.chain for bucket in buckets})
    assert len(rounds) == 16
    assert sorted(rows["filter_logits"], reverse=True) == rounds + firsts + firsts
    assert sorted(rows["sample masked"], reverse=True) == rounds + firsts
    # Of raw and of processed logits.
    assert sorted(rows["row_logprobs"]) == sorted([*rounds, *firsts, *firsts] * 2 + [SLICE_ROWS])
    assert runner.programs.two_phase.num_rows == 0
    driver = Driver(runner)
    mixed_rounds(driver)
    check(driver, streams)


@pytest.mark.parametrize("can_capture", [True, False])
def test_phases_are_captured_after_their_first_run(
    checkpoint: Path,
    streams: dict[str, list[int]],
    can_capture: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    captured: list[tuple[Any, ...]] = []
    replayed: list[tuple[Any, ...]] = []

    def capture(program: Any, inputs: tuple[Any, ...], pool: Any) -> Any:
        name = (program.__name__, *(i if isinstance(i, int) else len(i) for i in inputs))
        captured.append(name)
        if not can_capture:
            raise RuntimeError("out of memory")

        def replay(*given: Any) -> Any:
            assert all(one is static for one, static in zip(given, inputs, strict=True))
            replayed.append(name)
            return program(*given)

        return replay

    monkeypatch.setattr("compiled_mtp.runner.program_maker.capture", capture)
    runner = make_runner(checkpoint)
    runner.programs = Programs(
        runner.step, runner.programs.buckets, 64, is_compiled=False, graph_mode="replay"
    )
    driver = Driver(runner)
    mixed_rounds(driver)
    check(driver, streams)
    # Six two-phase rounds, in buckets of one request and of two.
    assert len(captured) == len(set(captured)) == 4
    assert len(replayed) == (12 - 4 if can_capture else 0)
    warnings = [text for text in caplog.messages if "runs without a graph: out of memory" in text]
    assert len(warnings) == (0 if can_capture else 4)


def test_the_buffers_between_phases_have_one_length_and_serve_no_one_phase_round(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = make_runner(checkpoint).programs
    two_phase = programs.two_phase

    def lengths() -> set[int]:
        buffers = (two_phase.hidden, two_phase.logits, two_phase.masks, *two_phase.window)
        return {len(buffer) for buffer in buffers}

    (tmp_path / "layout.json").write_text(json.dumps(programs.maker.layout()))

    def no_memory(*given: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_full", no_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            two_phase.reserve(8)
    assert lengths() == {0}
    two_phase.reserve(8)
    assert lengths() == {8}
    programs.maker.check_layout(tmp_path)


def test_phases_run_without_preparation(checkpoint: Path, streams: dict[str, list[int]]) -> None:
    driver = Driver(make_runner(checkpoint))
    assert driver.runner.programs.two_phase.num_rows == 0
    mixed_rounds(driver)
    check(driver, streams)
