"""After a failed launch, an interrupted step or a caller's error, other requests go on and lose no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import collect, make_engine, prompt_of, run_to_end

VOCAB = 512
PROMPTS = {"a": prompt_of(20, 1, VOCAB), "b": prompt_of(130, 2, VOCAB), "c": prompt_of(30, 3, VOCAB)}
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
# The number of `add_all` calls: each run has its own cache salt.
RUNS = [0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    write_checkpoint(directory, tokenizer=True)
    return directory


@pytest.fixture(scope="module")
def streams(checkpoint: Path) -> dict[str, list[int]]:
    engine = make_engine(checkpoint, mtp_step=0)
    outputs = engine.generate(list(PROMPTS.values()), PARAMS)
    return {name: output.new_token_ids for name, output in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture(scope="module", params=[0, 1], ids=["0_in_flight", "1_in_flight"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Engine:
    """One engine for many tests: each test must leave it usable."""
    return make_engine(checkpoint, mtp_step=3, max_in_flight=request.param, max_batch=2)


@contextmanager
def raising(
    owner: Any, name: str, call: int, error: BaseException, *, is_late: bool = False
) -> Iterator[None]:
    """Let `owner.name` raise once, at its `call`-th call; is_late: after the call has done its work."""
    method: Callable[..., Any] = getattr(owner, name)
    count = 0

    def wrapped(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not is_late:
            raise error
        result = method(*args)
        if count == call:
            raise error
        return result

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, method)
    assert count >= call, f"{name} was called {count} times"


def add_all(engine: Engine) -> None:
    # Prompts of this run share no cached prefix with earlier tests; `check_end` finds those of this run.
    RUNS[0] += 1
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt_token_ids=prompt, params=own_params(), request_id=name)


def own_params() -> SamplingParams:
    """Return the parameters of this run's requests, which share cached prefixes only with each other."""
    return PARAMS.model_copy(update={"cache_salt": str(RUNS[0])})


def check_end(engine: Engine, streams: dict[str, list[int]], outputs: list[RequestOutput]) -> dict[str, str]:
    """Check that every request ended once, with its own tokens or, after an error, with the first of them."""
    reasons: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    collect(tokens, outputs)
    for output in outputs:
        if output.finish_reason is not None:
            assert output.request_id not in reasons
            assert (output.error is not None) == (output.finish_reason == "error")
            reasons[output.request_id] = output.finish_reason
    assert reasons.keys() == streams.keys()
    for name, stream in streams.items():
        is_error = reasons[name] == "error"
        assert tokens[name] == (stream[: len(tokens[name])] if is_error else stream)
    assert engine.stats().blocks_used == 0
    # The engine goes on and gives the same tokens.
    again = engine.generate([PROMPTS["b"], PROMPTS["a"]], own_params())
    assert [output.new_token_ids for output in again] == [streams["b"], streams["a"]]
    return reasons


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("prefill", 1),
        ("prefill", 2),
        ("prefill", 4),
        ("prefill", 5),
        ("decode", 1),
        ("decode", 4),
        ("decode", 9),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_failed_launch_ends_only_its_own_requests(
    engine: Engine,
    streams: dict[str, list[int]],
    caplog: pytest.LogCaptureFixture,
    where: str,
    call: int,
    is_late: bool,
) -> None:
    outputs: list[RequestOutput] = []
    with raising(engine.runner.programs, where, call, RuntimeError("out of memory"), is_late=is_late):
        add_all(engine)
        while engine.has_unfinished_requests():
            outputs += engine.step()
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= (1 if where == "prefill" else 2)
    assert {output.error for output in failed} == {"RuntimeError: out of memory"}
    assert f"a {where} step failed" in caplog.text
    assert "length" in check_end(engine, streams, outputs).values()


class DoneEvent:
    """An event of a GPU that has already ended the launch when the host asks."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: DoneEvent) -> float:
        return 0.0


@pytest.mark.parametrize("name", ["query", "synchronize", "elapsed_time"])
def test_a_device_that_fails_while_its_result_is_read_fails_the_launch(
    engine: Engine, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A kernel's error may come out of any later call."""
    runner, outputs = engine.runner, []
    make = runner._make_buffer
    monkeypatch.setattr(runner, "_free_buffers", {})
    monkeypatch.setattr(runner, "_make_buffer", lambda shape: replace(make(shape), ready=DoneEvent()))
    monkeypatch.setattr(runner, "_mark_begin", DoneEvent)
    monkeypatch.setattr(runner, "_free_events", [])
    method, calls = getattr(DoneEvent, name), []

    def failing(event: DoneEvent, *others: DoneEvent) -> Any:
        calls.append(name)
        if len(calls) == 4:
            raise RuntimeError("an illegal memory access")
        return method(event, *others)

    monkeypatch.setattr(DoneEvent, name, failing)
    add_all(engine)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    errors = {output.error for output in outputs if output.finish_reason == "error"}
    assert errors == {"RuntimeError: an illegal memory access"}
    check_end(engine, streams, outputs)


@pytest.mark.parametrize("call", [1, 3, 8])
def test_a_failed_install_leaves_other_requests_alone(
    engine: Engine, streams: dict[str, list[int]], call: int
) -> None:
    outputs: list[RequestOutput] = []
    with raising(engine.runner.moves, "carry_out", call, RuntimeError("no pinned memory")):
        add_all(engine)
        while engine.has_unfinished_requests():
            outputs += engine.step()
    check_end(engine, streams, outputs)


@pytest.mark.parametrize(
    ("owner", "where"),
    [("programs", "decode"), ("programs", "prefill"), ("runner", "run"), ("scheduler", "update")],
)
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_ends_running_requests_and_waiting_ones_go_on(
    engine: Engine, streams: dict[str, list[int]], owner: str, where: str, call: int, is_late: bool
) -> None:
    owners = {
        "programs": engine.runner.programs,
        "runner": engine.runner,
        "scheduler": engine.scheduler,
    }
    outputs: list[RequestOutput] = []
    interrupts = 0
    with raising(owners[owner], where, call, KeyboardInterrupt(), is_late=is_late):
        add_all(engine)
        while engine.has_unfinished_requests():
            try:
                outputs += engine.step()
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
    errors = [output.error for output in outputs if output.error]
    assert 1 <= len(errors) <= 2
    assert all("KeyboardInterrupt" in error for error in errors)
    assert "length" in check_end(engine, streams, outputs).values()


def test_progress_that_raises_loses_no_output(checkpoint: Path, streams: dict[str, list[int]]) -> None:
    engine = make_engine(checkpoint, mtp_step=3)
    add_all(engine)

    def progress(what: str, done: int, total: int) -> None:
        raise RuntimeError("the caller's own")

    engine._progress = progress
    outputs: list[RequestOutput] = []
    raised = 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except RuntimeError:
            raised += 1
    engine._progress = None
    assert raised == 3
    assert set(check_end(engine, streams, outputs).values()) == {"length"}


def test_generate_keeps_the_outputs_of_other_requests(
    checkpoint: Path, streams: dict[str, list[int]]
) -> None:
    engine = make_engine(checkpoint, mtp_step=3)
    engine.add_request(prompt_token_ids=PROMPTS["a"], params=PARAMS, request_id="a")
    for name in ("b", "c"):
        assert engine.generate([PROMPTS[name]], PARAMS)[0].new_token_ids == streams[name]
    assert engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="request_id must be unused, got 'a'"):
        engine.add_request("x", request_id="a")
    assert run_to_end(engine) == {"a": streams["a"]}
    assert engine.stats().finished == 3


def test_generate_leaves_no_request_after_an_error(checkpoint: Path, streams: dict[str, list[int]]) -> None:
    engine = make_engine(checkpoint, mtp_step=3, max_batch=2)
    engine.add_request(prompt_token_ids=PROMPTS["c"], params=PARAMS, request_id="c")
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must be text, ids or a chat, got 5"):
        engine.generate(["fine", 5], PARAMS)  # type: ignore[list-item]
    assert engine.stats().waiting == 1
    assert run_to_end(engine) == {"c": streams["c"]}
    interrupt = raising(engine.runner.programs, "decode", 3, KeyboardInterrupt())
    with interrupt, pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPTS["a"], PROMPTS["b"], PROMPTS["c"]], PARAMS)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert engine.generate([PROMPTS["b"]], PARAMS)[0].new_token_ids == streams["b"]


def test_a_second_interrupt_during_the_wait_for_copies(
    checkpoint: Path, streams: dict[str, list[int]]
) -> None:
    engine = make_engine(checkpoint, mtp_step=3, max_in_flight=1, max_batch=1)
    for name in ("a", "b"):
        engine.add_request(prompt_token_ids=PROMPTS[name], params=PARAMS, request_id=name)
    programs, moves = engine.runner.programs, engine.runner.moves
    with (
        raising(programs, "decode", 2, KeyboardInterrupt()),
        raising(moves, "wait", 1, KeyboardInterrupt("again")),
        pytest.raises(KeyboardInterrupt, match="again"),
    ):
        run_to_end(engine)
    waits: list[None] = []
    wait = moves.wait

    def count(*given: Any) -> None:
        waits.append(None)
        wait(*given)

    moves.wait = count  # type: ignore[method-assign]
    # The engine waits for copies once, before the first launch.
    outputs = run_to_end(engine)
    assert len(waits) == 1
    assert outputs["b"] == streams["b"]
    engine.scheduler.check_integrity()


def test_an_interrupt_inside_generate_takes_no_output_of_other_requests(
    checkpoint: Path, streams: dict[str, list[int]]
) -> None:
    """At any statement of generate: here at those that look at its own outputs."""

    class Interrupting(dict[str, list[int]]):
        def __contains__(self, key: object) -> bool:
            raise KeyboardInterrupt

    engine = make_engine(checkpoint, mtp_step=3)
    engine.add_request(prompt_token_ids=PROMPTS["a"], params=PARAMS, request_id="a")
    engine._advance()
    engine._advance()
    assert engine.scheduler._live.outputs
    with pytest.raises(KeyboardInterrupt):
        engine._take_outputs(Interrupting())
    with (
        raising(engine.scheduler, "add", 2, KeyboardInterrupt(), is_late=True),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.generate([PROMPTS["b"], PROMPTS["c"]], PARAMS)
    assert engine.stats().waiting == 0
    assert run_to_end(engine) == {"a": streams["a"]}


@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.parametrize(
    ("owner", "where", "is_late"), [("scheduler", "abort", True), ("planner", "leave", False)]
)
def test_an_interrupted_abort_ends_its_request_once(
    engine: Engine, streams: dict[str, list[int]], victim: str, owner: str, where: str, is_late: bool
) -> None:
    """For a running request and for a waiting one."""
    owners = {"scheduler": engine.scheduler, "planner": engine.scheduler._planner}
    add_all(engine)
    outputs = engine.step() + engine.step()
    engine.abort(victim)
    interrupt = raising(owners[owner], where, 1, KeyboardInterrupt(), is_late=is_late)
    with interrupt, pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = [output.request_id for output in outputs if output.finish_reason is not None]
    assert sorted(ended) == ["a", "b", "c"]
    assert engine.stats().running == engine.stats().waiting == engine.stats().blocks_used == 0
    again = engine.generate([PROMPTS["b"]], PARAMS)
    assert again[0].new_token_ids == streams["b"]


def test_an_interrupt_while_outputs_are_counted_loses_none(
    engine: Engine, streams: dict[str, list[int]]
) -> None:
    finished = engine.stats().finished
    outputs: list[RequestOutput] = []
    add_all(engine)
    with raising(type(engine._totals), "plus", 1, KeyboardInterrupt()):
        while engine.has_unfinished_requests():
            try:
                outputs += engine.step()
            except KeyboardInterrupt:
                assert len(outputs) > 0
    assert engine.stats().finished == finished + 3
    assert set(check_end(engine, streams, outputs).values()) == {"length"}


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=3, max_in_flight=1)
    add_all(engine)
    engine.step()
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("x"), lambda: engine.generate(["x"])):
        with pytest.raises(ValueError, match="engine must be open, got one that was closed"):
            call()
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": [1, 2]}, r"prompt must be a str, got \[1, 2\]; pass ids as prompt_token_ids"),
        ({"prompt": b"x"}, "prompt must be a str, got b'x'"),
        ({"prompt": "x", "params": {"seed": 1}}, "params must be a SamplingParams, got"),
        ({"prompt": "x", "request_id": 5}, "request_id must be a str, got 5"),
        ({"messages": 5}, "messages must be a list of mappings, got 5"),
        ({"messages": ["hi"]}, r"messages must be a list of mappings, got \['hi'\]"),
        ({"prompt_token_ids": 5}, r"prompt_token_ids must be a list of ids, got 5; write \[5\]"),
        ({"prompt_token_ids": "123"}, "prompt_token_ids must hold whole numbers, got '123'"),
        ({"prompt_token_ids": [1.5]}, r"prompt_token_ids must hold whole numbers, got \[1.5\]"),
        ({"prompt_token_ids": [True]}, "a boolean is not an id"),
        ({"prompt_token_ids": [None]}, r"prompt_token_ids must hold whole numbers, got \[None\]"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(
    checkpoint: Path, arguments: dict[str, Any], message: str
) -> None:
    engine = make_engine(checkpoint, mtp_step=0)
    with pytest.raises(ValueError, match=message):
        engine.add_request(**arguments)
    assert not engine.has_unfinished_requests()


def test_a_text_is_one_prompt(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=0)
    (one,), (listed,) = engine.generate("abc", PARAMS), engine.generate(["abc"], PARAMS)
    assert one.new_token_ids == listed.new_token_ids


def test_generated_ids_do_not_collide_with_the_callers(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=0)
    engine.add_request("x", PARAMS, request_id="request-2")
    assert [engine.add_request("x", PARAMS) for _ in range(3)] == ["request-1", "request-3", "request-4"]


def test_a_huge_top_k_keeps_every_token(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=3)
    huge = PARAMS.model_copy(update={"top_k": 2**40})
    tokens = [output.new_token_ids for output in engine.generate([PROMPTS["a"]] * 2, [huge, PARAMS])]
    assert tokens[0] == tokens[1]


def test_ids_that_the_tokenizer_has_and_the_model_has_not_are_refused(tmp_path: Path) -> None:
    """As when tokens were added to a tokenizer but the checkpoint was not resized."""
    write_checkpoint(tmp_path, tokenizer=True)
    file = str(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    new = VOCAB + 1 - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<new {index}>" for index in range(new - 1)])
    tokenizer.add_special_tokens([f"<new {new - 1}>"])
    tokenizer.save(file)
    engine = make_engine(tmp_path, mtp_step=0)
    # A stop id that the model cannot draw has no effect.
    engine.add_request(f"a<new {new - 2}>b", PARAMS.model_copy(update={"stop": (f"<new {new - 1}>",)}))
    with pytest.raises(ValueError, match=f"prompt must lie in 0..{VOCAB - 1}, got {VOCAB}; use the ids"):
        engine.add_request(f"a<new {new - 1}>b")


def test_the_name_of_a_special_token_stops_as_its_id_does(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=0)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    token_id = tokenizer.special_id("<|endoftext|>")
    assert token_id is not None
    assert tokenizer.special_id("def") is None
    engine.add_request("x", PARAMS.model_copy(update={"stop": ("<|endoftext|>", "zzz")}))
    ((request,),) = engine._inbox._requests.values()
    assert token_id in request.stop_ids
    assert request.append([7, token_id, 8], None, 0.0)[0] == [7, token_id]
    assert request.finish_reason == "stop"


def test_a_default_out_of_range_is_found_before_the_weights_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 3.0}))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"generation_config\.json of the checkpoint: temperature must"):
        Engine(EngineConfig(model=tmp_path, device="cpu", mtp_step=0))
