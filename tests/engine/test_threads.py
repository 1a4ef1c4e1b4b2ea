"""Requests and aborts from any thread while one steps; seeds by arrival; one stepper at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams, derive_seed
from tests.checkpoints import write_checkpoint
from tests.engines import collect, make_engine, prompt_of, run_to_end
from tests.scheduling import phase_of

VOCAB = 512
PARAMS = SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("front")
    write_checkpoint(directory, tokenizer=True, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, mtp_step=3, max_batch=4)


def in_threads(count: int, work: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_eight_threads_add_and_abort_while_another_steps(checkpoint: Path, engine: Engine) -> None:
    def params(name: str) -> SamplingParams:
        return PARAMS.model_copy(update={"seed": int(name)})

    names = [str(index) for index in range(32)]
    expected = {
        name: output.new_token_ids
        for name, output in zip(
            names,
            engine.generate([prompt_of(9, int(n), VOCAB) for n in names], [params(n) for n in names]),
            strict=True,
        )
    }
    refusals: list[str] = []

    def work(index: int) -> None:
        for name in names[index::8]:
            engine.add_request(
                prompt_token_ids=prompt_of(9, int(name), VOCAB), params=params(name), request_id=name
            )
            for bad in (
                {"request_id": name, "prompt": "x"},
                {"prompt_token_ids": [VOCAB]},
                {"prompt_token_ids": [1] * 512},
                {"prompt": ""},
            ):
                try:
                    engine.add_request(**bad)  # type: ignore[arg-type]
                except ValueError as error:
                    refusals.append(str(error))
        engine.abort(engine.add_request("gone", PARAMS.model_copy(update={"max_tokens": 400})))

    threads = in_threads(8, work)
    outputs: list[RequestOutput] = []
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        outputs += engine.step()
        engine.scheduler.check_integrity()
    tokens: dict[str, list[int]] = {}
    collect(tokens, outputs)
    assert {name: tokens[name] for name in names} == expected
    reasons = [output.finish_reason for output in outputs if output.finish_reason]
    assert (reasons.count("abort"), reasons.count("length"), len(reasons)) == (8, 32, 40)
    # Only "the same" may be free again when another thread is refused; the other three names never are.
    assert len(refusals) >= 3 * 32
    assert engine.stats().blocks_used == engine.stats().waiting == 0


def test_ids_are_unique_across_threads(engine: Engine) -> None:
    ids: list[str] = []
    taken: list[int] = []

    def work(index: int) -> None:
        ids.extend(engine.add_request("x", PARAMS) for _ in range(20))
        try:
            engine.add_request("x", PARAMS, request_id="the same")
        except ValueError:
            taken.append(index)

    for thread in in_threads(8, work):
        thread.join()
    assert len(set(ids)) == len(ids) == 160
    assert len(taken) == 7
    assert engine.stats().waiting == 161
    for name in [*ids, "the same"]:
        engine.abort(name)
    with pytest.raises(ValueError, match="request_id must name a request that has not finished, got 'the sa"):
        engine.abort("the same")
    assert {output.finish_reason for output in engine.step()} == {"abort"}
    assert not engine.has_unfinished_requests()


def test_a_lower_priority_gets_its_slot_sooner(engine: Engine) -> None:
    for wrong in (True, 1.0, "1", 2**31):
        with pytest.raises(ValueError, match="priority must be an integer of at most 31 bits, got "):
            engine.add_request("x", PARAMS, priority=wrong)  # type: ignore[arg-type]
    names = [engine.add_request("x", PARAMS, priority=priority) for priority in (0, 2, -1)]
    engine.step()
    # The two slots go to the requests with the lowest numbers.
    assert [phase_of(engine.scheduler, name).value for name in names] == ["running", "waiting", "running"]
    for name in names:
        engine.abort(name)
    engine.step()


def test_a_late_abort_does_not_end_the_next_request_of_the_same_id(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = engine.scheduler.take_outputs

    def take_and_abort(*given: object) -> list[RequestOutput]:
        if engine.scheduler._live.outputs:
            # Another thread aborts while the request ends in this very step.
            engine._inbox._aborts.add("same")
        return take()

    engine.add_request("x", PARAMS.model_copy(update={"max_tokens": 1}), request_id="same")
    monkeypatch.setattr(engine.scheduler, "take_outputs", take_and_abort)
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    assert outputs[-1].finish_reason == "length"
    monkeypatch.undo()
    engine.add_request("x", PARAMS, request_id="same")
    assert len(run_to_end(engine)["same"]) == PARAMS.max_tokens


def test_a_second_thread_that_steps_gets_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()
    run = engine.runner.run

    def slow(plan: object) -> object:
        is_inside.set()
        assert may_go_on.wait(60)
        return run(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", slow)
    engine.add_request("x", PARAMS, request_id="a")
    (thread,) = in_threads(1, lambda _: engine.step() and None)
    assert is_inside.wait(60)
    for call in (engine.step, lambda: engine.generate(["x"]), engine.close):
        with pytest.raises(
            ValueError, match="engine must be stepped, asked to generate and closed by one th"
        ):
            call()
    may_go_on.set()
    thread.join()
    run_to_end(engine)


def test_one_seed_gives_every_request_its_own_noise(checkpoint: Path) -> None:
    seeds, streams = [], []
    for _ in range(2):
        engine = make_engine(checkpoint, mtp_step=0, seed=11)
        with pytest.raises(ValueError, match="must lie in"):
            engine.add_request(prompt_token_ids=[VOCAB])
        own = PARAMS.model_copy(update={"seed": 5})
        outputs = engine.generate([[1, 2, 3]] * 4, [PARAMS, PARAMS, own, PARAMS])
        seeds.append([output.metrics.seed for output in outputs])
        streams.append([output.new_token_ids for output in outputs])
    assert seeds[0] == seeds[1] == [11, derive_seed(11, 1), 5, derive_seed(11, 3)]
    assert streams[0] == streams[1]
    assert len({tuple(stream) for stream in streams[0]}) > 1


def test_metrics_of_ended_requests_do_not_change(engine: Engine) -> None:
    engine.add_request("x", PARAMS, request_id="m")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    counts = [output.metrics.output_tokens for output in outputs]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert [output.metrics.rounds for output in outputs] == list(range(len(outputs)))


def test_an_empty_id_and_a_long_one_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="request_id must not be empty, got ''; leave it out"):
        engine.add_request("x", PARAMS, request_id="")
    for call in (engine.abort, lambda value: engine.add_request(messages=value)):
        with pytest.raises(ValueError, match="must") as error:
            call("\x1b\n" * 10**6)  # type: ignore[no-untyped-call]
        assert len(str(error.value)) < 600
        assert str(error.value).isprintable()
