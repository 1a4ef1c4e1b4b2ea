"""Ctrl-C and out-of-memory errors at any line: the engine goes on and loses no output.

Every request is told how it ended, and later requests have exactly the tokens that a fresh engine gives them.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepPlan
from compiled_mtp.request import RequestOutput
from compiled_mtp.rounds.two_phase import TwoPhaseRound
from tests.aimed import Aim, Line
from tests.checkpoints import write_checkpoint
from tests.engine.interrupts import (
    NAMES,
    PLAIN,
    REQUESTS,
    SCORED,
    VOCAB,
    Scenario,
    Told,
    add_all,
    attack,
    by_generate,
    by_steps,
    by_stream,
    check,
    drain,
    salted,
    sample,
)
from tests.engines import make_engine, prompt_of

HOST = (
    "engine.py",
    "request",
    "runner",
    "rounds",
    "step.py",
    "scheduler",
    "cache",
    "spec",
    "sampling/grammar.py",
)
PROGRAMS = ("runner/programs.py", "runner/static_inputs.py", "rounds")
LAUNCHES = (*PROGRAMS, "step.py", "cache/moves.py", "cache/slot_sampling.py")
CHEAP, SOAK = 2, 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("interrupts")
    write_checkpoint(directory, tokenizer=True, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[list[int]]]:
    """The tokens of every choice, from an engine without faults."""
    fresh, tokens = make_engine(checkpoint, mtp_step=0), {}
    for name, (prompt, params) in REQUESTS.items():
        tokens[name] = [output.new_token_ids for output in fresh.generate([prompt], params)]
    return tokens


@pytest.fixture(
    scope="module", params=[1, pytest.param(0, marks=pytest.mark.soak)], ids=["1_in_flight", "0_in_flight"]
)
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Engine:
    """One engine for many interrupts: each test must leave it usable."""
    return make_engine(
        checkpoint, mtp_step=3, max_in_flight=request.param, max_batch=2, prefix_cache_gb=0.01, num_blocks=40
    )


SCENARIOS: dict[str, Scenario] = {"step": by_steps, "generate": by_generate, "stream": by_stream}


@pytest.mark.parametrize("how", SCENARIOS)
@pytest.mark.parametrize("count", [CHEAP, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_an_interrupt_at_any_line_loses_nothing(
    engine: Engine, expected: dict[str, list[list[int]]], how: str, count: int
) -> None:
    scenario = SCENARIOS[how]
    watch = Aim(HOST)
    attack(engine, scenario, watch, Told())
    for target in sample(watch.targets(), count, seed=len(how)):
        aim, told = Aim(HOST, target=target), Told()
        attack(engine, scenario, aim, told)
        check(engine, told, expected, target)


HANDING_OVER = ("hand_over", "add", "enter", "put", "discard", "forget", "_tidy", "_queue_all", "generate")
STEPPING = ("step", "take", "leave", "is_over", "_tidy", "_advance", "_take_outputs")
STREAMING = ("_stream", "_next_outputs", "put", "end_left_streams")
LAUNCHING = ("accept", "write_masks", "verify", "set_masks", "first")
FEW = {
    "keys of a prompt": (by_steps, ("scheduler/prefix.py",), ("_keys_of",)),
    "hand-over": (by_generate, ("engine.py", "scheduler"), HANDING_OVER),
    "step": (by_steps, ("engine.py", "scheduler/turn.py"), STEPPING),
    "stream": (by_stream, ("engine.py", "scheduler/inbox.py"), STREAMING),
    "accept": (by_steps, (*PROGRAMS, "runner/runner.py"), LAUNCHING),
}


@pytest.mark.parametrize("what", FEW)
@pytest.mark.parametrize("count", [CHEAP, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_an_interrupt_at_each_line_that_changes_shared_state(
    engine: Engine, expected: dict[str, list[list[int]]], what: str, count: int
) -> None:
    """At the first and the last time that each line runs."""
    scenario, files, functions = FEW[what]
    watch = Aim(files, functions)
    attack(engine, scenario, watch, Told())
    assert {function for _, function, _ in watch.lines} <= set(functions)
    for target in sample(watch.targets(), count):
        aim, told = Aim(files, functions, target=target), Told()
        attack(engine, scenario, aim, told)
        check(engine, told, expected, target)


def test_a_waiting_prompt_keeps_all_its_keys_or_none(engine: Engine) -> None:
    """A waiting prompt keeps its keys; if some were missing, its request would fail at every later step."""
    files, prompt = ("scheduler/prefix.py",), prompt_of(300, 9, VOCAB)
    wanted = [output.new_token_ids for output in engine.generate([prompt], salted(PLAIN, "keys"))]
    for time in (2, 4):
        salt = f"keys {next(NAMES)}"
        watch = Aim(files, ("_keys_of",))
        with watch.watching():
            engine.generate([prompt], salted(PLAIN, f"keys {next(NAMES)}"))
        for key in [key for key, count in watch.lines.items() if count >= time]:
            name, told = f"{salt} {key[2]}", Told()
            engine.add_request(prompt_token_ids=prompt, params=salted(PLAIN, name), request_id=name)
            with Aim(files, ("_keys_of",), target=Line(*key, time)).watching(), suppress(KeyboardInterrupt):
                told.take(engine.step())
            drain(engine, told)
            assert told.reasons == {(name, 0): "length"}, key
            assert list(told.tokens.values()) == wanted, key


def test_an_interrupt_of_an_idle_step_leaves_the_engine_free(engine: Engine) -> None:
    """At any line: neither this thread nor another is blocked."""
    files = ("engine.py", "runner/step_loop.py", "scheduler/turn.py", "scheduler/inbox.py")
    watch = Aim(files)
    with watch.watching():
        engine.step()
    for target in watch.targets():
        aim = Aim(files, target=target)
        with aim.watching(), pytest.raises(KeyboardInterrupt):
            engine.step()
        stepped: list[list[RequestOutput]] = []
        thread = threading.Thread(target=lambda found=stepped: found.append(engine.step()))
        thread.start()
        thread.join()
        assert stepped == [[]], target
        assert engine.step() == []


def test_an_interrupt_of_a_hand_over_leaves_no_request(engine: Engine) -> None:
    """For `generate`, whose caller has no request ids to abort."""
    files = (
        "engine.py",
        *(f"scheduler/{name}.py" for name in ("inbox", "scheduler", "waiting_queue", "admission")),
    )
    functions = {"hand_over", "add", "enter", "put", "discard", "_queue_all", "_advance"}
    prompts = [prompt_of(20, 1, VOCAB), prompt_of(9, 2, VOCAB)]
    params = [PLAIN, SCORED.model_copy(update={"max_tokens": 1, "n": 3})]
    watch = Aim(files, functions)
    with watch.watching():
        engine.generate(prompts, params)
    for target in sample(watch.targets(), 30):
        aim = Aim(files, functions, target=target)
        with aim.watching(), pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, params)
        assert not engine.has_unfinished_requests(), target
        assert engine.step() == []
        assert engine.stats().waiting == engine.stats().running == 0, target
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_grammars_mask_does_not_outlive_its_round(
    engine: Engine,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    is_late: bool,
) -> None:
    """For failed and for interrupted launches; rounds without masks write none."""
    programs = engine.runner.programs
    call = programs._call_phase

    def failing(name: str, *given: Any) -> Any:
        if name == "accept":
            if is_late:
                call(name, *given)
            raise error
        return call(name, *given)

    prompt, params = REQUESTS["guided"]
    engine.add_request(prompt_token_ids=prompt, params=salted(params, str(next(NAMES))))
    monkeypatch.setattr(programs, "_call_phase", failing)
    told = Told()
    with suppress(KeyboardInterrupt):
        drain(engine, told)
    monkeypatch.undo()
    drain(engine, told)
    assert list(told.reasons.values()) == ["error"]
    prompt, params = REQUESTS["scored"]
    outputs = engine.generate([prompt], salted(params, str(next(NAMES))))
    assert [output.new_token_ids for output in outputs] == expected["scored"]
    assert bool((engine.runner.programs.two_phase.masks == -1).all())


@pytest.mark.parametrize(
    ("what", "error"), [("making", RuntimeError("no memory")), ("copying", MemoryError("no memory"))]
)
def test_a_failure_to_fill_masks_ends_only_its_own_requests(
    engine: Engine,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    error: Exception,
) -> None:
    """`step` must not raise: the server would end with it."""
    owner, name = (engine._steps.masks, "fill") if what == "making" else (engine.runner, "_upload_masks")
    work, calls = getattr(owner, name), itertools.count()

    def failing(plan: StepPlan, *given: object) -> object:
        if plan.is_guided and next(calls) < 2:
            raise error
        return work(plan, *given)

    monkeypatch.setattr(owner, name, failing)
    told = Told()
    add_all(engine, told)
    add_all(engine, told)
    drain(engine, told)
    assert next(calls) >= 2
    assert 1 <= list(told.reasons.values()).count("error") < len(told.reasons)
    check(engine, told, expected, what)


def buffer_lengths(two_phase: TwoPhaseRound) -> set[int]:
    return {len(buffer) for buffer in (two_phase.hidden, two_phase.masks, *two_phase.window)}


@pytest.mark.parametrize("is_growing", [True, False])
def test_buffers_of_two_phase_rounds_have_one_length_or_are_made_again(
    engine: Engine, is_growing: bool
) -> None:
    """The logits are allocated last: after an interrupt, the next verify finds too few rows and allocates
    again."""
    two_phase = engine.runner.programs.two_phase
    rows = two_phase.num_rows
    before, after = (0, 8) if is_growing else (8, 2)
    files, functions = ("rounds/two_phase.py",), ("reserve",)
    watch = Aim(files, functions)
    with watch.watching():
        two_phase.reserve(after)
    for target in watch.targets():
        aim = Aim(files, functions, target=target)
        two_phase.reserve(before)
        with aim.watching(), pytest.raises(KeyboardInterrupt):
            two_phase.reserve(after)
        assert two_phase.num_rows == 0 or buffer_lengths(two_phase) == {two_phase.num_rows}, target
    two_phase.reserve(rows)


def out_of_memory() -> RuntimeError:
    return RuntimeError("out of memory")


@pytest.mark.parametrize("count", [CHEAP, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_a_launch_that_fails_at_any_line_leaves_no_state_on_the_device(
    engine: Engine, expected: dict[str, list[list[int]]], count: int
) -> None:
    """Above all no masks: those of an ended request would forbid its neighbours' tokens."""
    attack(engine, by_steps, Aim(LAUNCHES), Told())
    # Lines that only a first launch runs, as those that allocate its buffers, are not among these.
    watch = Aim(LAUNCHES)
    attack(engine, by_steps, watch, Told())
    accepts = [one for one in watch.targets() if one.function in ("accept", "write_masks")]
    for target in [*sample(accepts, CHEAP), *sample(watch.targets(), count)]:
        aim, told = Aim(LAUNCHES, target=target, error=out_of_memory), Told()
        try:
            attack(engine, by_steps, aim, told)
        except RuntimeError:  # The line runs when a result is read.
            drain(engine, told)
        assert aim.is_hit, target
        check(engine, told, expected, target)
        assert not engine.runner._masks


@pytest.mark.parametrize("count", [CHEAP, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_a_second_interrupt_inside_recover_loses_nothing(
    engine: Engine, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    run, calls, is_down = engine.runner.run, itertools.count(1), threading.Event()
    due = [0]

    def interrupted(plan: object) -> object:
        result = run(plan)  # type: ignore[arg-type]
        if next(calls) == due[0]:
            is_down.set()
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(engine.runner, "run", interrupted)

    def fail_twice(aim: Aim) -> Told:
        """Fail in the middle of a step, with two requests running and one waiting, and again where `aim`
        says."""
        nonlocal calls
        told = Told()
        calls, due[0] = itertools.count(1), 6
        is_down.clear()
        add_all(engine, told)
        with aim.watching():
            for _ in range(200):
                try:
                    if not engine.has_unfinished_requests():
                        break
                    told.take(engine.step())
                except KeyboardInterrupt:
                    assert is_down.is_set()
        drain(engine, told)
        return told

    files = ("runner/step_loop.py", "runner/runner.py", *PROGRAMS, "scheduler", "request", "cache")
    armed = partial(Aim, files, is_armed=is_down.is_set)
    watch = armed()
    fail_twice(watch)
    inside = {
        "recover",
        "drop_launches",
        "forget_batches",
        "reset",
        "reset_progress",
        "last_output",
    }
    targets = [one for one in watch.targets() if one.function in inside and one.time == 1]
    for target in sample(targets, count):
        aim = armed(target=target)
        told = fail_twice(aim)
        assert aim.is_hit, target
        due[0] = 0
        check(engine, told, expected, target)


def told_text(engine: Engine, name: str, aim: Aim) -> tuple[list[int], str, list[int], int]:
    """Return what all outputs of the request told, with Ctrl-C in the fourth step and an error where `aim`
    says.

    Returns its tokens, its text, the ids with log probabilities, and the token count of its metrics.
    """
    outputs: list[RequestOutput] = []
    with aim.watching():
        for _ in range(200):
            if not engine.has_unfinished_requests():
                break
            with suppress(KeyboardInterrupt):
                outputs += engine.step()
    ended = [output for output in outputs if output.finish_reason is not None]
    assert [output.request_id for output in ended] == [name]
    tokens = [token_id for output in outputs for token_id in output.new_token_ids]
    listed = [entry.token_id for output in outputs for entry in output.logprobs or ()]
    return tokens, "".join(o.new_text for o in outputs), listed, ended[0].metrics.output_tokens


@pytest.mark.parametrize("is_recovering", [False, True], ids=["taking_tokens", "recovering"])
@pytest.mark.parametrize("count", [24, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_text_held_for_stop_strings_comes_once_with_its_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_recovering: bool, count: int
) -> None:
    """An interrupt between a token and its output, and a second one inside the code that ends the request."""
    prompt = prompt_of(20, 4, VOCAB)
    plain = PLAIN.model_copy(update={"max_tokens": 24, "logprobs": 1})
    whole = engine.generate([prompt], plain)[0]
    # All of the text after its first character may begin the stop string.
    params = plain.model_copy(update={"stop": [whole.new_text[1:] + "!"]})
    update, is_down, due, calls = engine.scheduler.update, threading.Event(), [0], itertools.count()

    def interrupted(result: Any) -> None:
        update(result)
        if result is not None and any(result.token_ids) and next(calls) == due[0]:
            is_down.set()
            if is_recovering:
                raise KeyboardInterrupt

    def arm(result: Any) -> None:
        if result is not None and any(result.token_ids) and next(calls) == due[0]:
            is_down.set()
        update(result)

    monkeypatch.setattr(engine.scheduler, "update", interrupted if is_recovering else arm)
    files = ("scheduler", "request", "sampling/stop_strings.py", "sampling/logprobs.py", "frontend")
    functions = {"recover", "cut_short", "finish", "last_output", "flush", "take_logprobs"}
    if not is_recovering:
        functions |= {"_take_tokens", "append", "_take_text", "add", "take", "commit"}

    def play(target: Line | None = None) -> Aim:
        nonlocal calls
        calls, due[0] = itertools.count(), 2
        is_down.clear()
        name = f"held {next(NAMES)}"
        engine.add_request(prompt_token_ids=prompt, params=salted(params, name), request_id=name)
        aim = Aim(files, functions, target=target, is_armed=is_down.is_set)
        tokens, text, listed, count = told_text(engine, name, aim)
        assert tokens == whole.new_token_ids[: len(tokens)], target
        assert text == engine.tokenizer.decode(tokens), target  # type: ignore[union-attr]
        assert listed == tokens, target
        assert count == len(tokens), target
        return aim

    watch = play()
    for target in sample([one for one in watch.targets() if one.time == 1], count):
        assert play(target).is_hit
