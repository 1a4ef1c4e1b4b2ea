"""Depths whose programs are loaded from a graph cache while the engine works: no wait, no compiling."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, save
from compiled_mtp.graphs.later import LaterDepths, LaterProgram
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.catch_up import catch_up
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.rounds.prefill import prefill
from compiled_mtp.runner.program_maker import ProgramMaker
from compiled_mtp.step import Step
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, run_to_end

OPTIONS: dict[str, Any] = {
    "mtp_step": "auto",
    "mtp_depths": (0, 1),
    "max_batch": 1,
    "max_model_len": 96,
    "num_threads": 1,
    "lookup": "off",
}
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
METHODS = {
    "decode": Step.decode,
    "catch": catch_up,
    "first": first_token,
    "prefill": prefill,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return tmp_path


@pytest.fixture
def with_programs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graph caches give uncompiled programs; returns the names of those that were loaded."""
    (checkpoint / "unpacked" / PROGRAMS_NAME).mkdir(parents=True)
    loaded: list[str] = []

    def load(file: Path, owner: Step) -> Any:
        loaded.append(file.name)
        return partial(METHODS[file.name.split("_")[0]], owner)

    patches = {
        "runner.assemble.check_key": lambda file, key, is_whole=True: None,
        "runner.memory.read_key": lambda file: {},
        "runner.assemble.load": lambda file: checkpoint / "unpacked",
        "runner.program_maker.load_program": load,
        "graphs.later.load_program": load,
    }
    for name, function in patches.items():
        monkeypatch.setattr(f"compiled_mtp.{name}", function)
    monkeypatch.setattr(ProgramMaker, "check_layout", lambda self, saved: None)
    return loaded


def check_that_depths_come(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a request begins at the first depth only, and goes on with the same tokens when both are
    ready."""
    later, programs = engine.runner.later, engine.runner.programs
    assert later is not None
    assert engine.is_compiled
    assert engine.stats().rounds_by_depth.keys() == {1}
    later._thread.join()
    launched: list[str] = []
    for method in ("decode", "catch_up"):
        monkeypatch.setattr(programs, method, _noting(launched, method, getattr(programs, method)))
    engine.add_request(prompt_token_ids=[1, 2, 3], params=PARAMS, request_id="a")
    tokens = run_to_end(engine, before_step=lambda: _prefer_0_most_of_the_time(engine))
    assert tokens == {"a": expected}
    assert engine.runner.later is None
    rounds = engine.stats().rounds_by_depth
    assert rounds.keys() == {0, 1}
    assert "catch_up" in launched
    assert rounds[0]["best"] > 5
    assert rounds[1]["only"] > 0
    assert not any(programs.inputs.state_indices[1][1:])
    assert int(engine.runner.step.slots.pos[0]) == 0


def check_that_every_depth_wakes(engine: Engine, loaded: list[str], expected: list[int]) -> None:
    """Check that the first round after a wake-up may have any depth, and that none is counted anew."""
    before = engine.stats().rounds_by_depth
    engine.sleep()
    loaded.clear()
    engine.wake_up()
    # No round may find a depth whose program is not there yet: uncompiled, a GPU gives it other bits.
    assert engine.runner.later is None
    assert len(loaded) == 6
    assert engine.stats().rounds_by_depth == before
    assert engine.generate([[1, 2, 3]], PARAMS)[0].new_token_ids == expected


def test_depths_become_ready_between_steps(
    checkpoint: Path, with_programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = with_programs
    plain = make_engine(checkpoint, compile="off", mtp_step=0, max_batch=1, max_model_len=96)
    (expected,) = plain.generate([[1, 2, 3]], PARAMS)
    progress: list[tuple[Any, ...]] = []
    engine = make_engine(
        checkpoint, graph_cache=checkpoint / "f", progress=lambda *a: progress.append(a), **OPTIONS
    )
    # The start has loaded a round, a first token and a chunk.
    assert progress[-1] == ("compiled shapes", 3, 3)
    assert [name.split("_")[0] for name in loaded[:3]] == ["prefill", "decode", "first"]
    check_that_depths_come(engine, expected.new_token_ids, monkeypatch)
    assert len(loaded) == 6
    check_that_every_depth_wakes(engine, loaded, expected.new_token_ids)


def test_an_engine_that_sleeps_before_its_depths_are_loaded_wakes_with_all(
    checkpoint: Path, with_programs: list[str]
) -> None:
    engine = make_engine(checkpoint, graph_cache=checkpoint / "f", **OPTIONS)
    assert engine.stats().rounds_by_depth.keys() == {1}
    engine.sleep()
    engine.wake_up()
    assert engine.runner.later is None
    assert engine.stats().rounds_by_depth.keys() == {0, 1}
    engine.generate([[1, 2, 3]], PARAMS)


def test_without_a_cache_a_start_compiles_every_depth(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With uncompiled programs instead of those of a compiler."""
    compiled: list[str] = []

    def compile_program(function: Any, name: str, graph_mode: str | None) -> Any:
        compiled.append(name)
        return function

    monkeypatch.setattr("compiled_mtp.runner.program_maker.compile_program", compile_program)
    engine = make_engine(checkpoint, compile="on", **OPTIONS)
    rounds = {"decode_1_to_1_drafts_of_1", "decode_0_to_0_drafts_of_1", "catch_up_of_1"}
    assert set(compiled) == rounds | {"prefill_64", "first_token_0_drafts", "first_token_1_drafts"}
    assert engine.runner.later is None
    assert engine.stats().rounds_by_depth.keys() == {0, 1}


@pytest.mark.soak
def test_depths_from_a_graph_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(checkpoint))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(checkpoint / "made" / name))
    compiled = make_engine(checkpoint, compile="on", save_to=checkpoint / "made" / PROGRAMS_NAME, **OPTIONS)
    with torch.compiler.set_stance("fail_on_recompile"):
        (expected,) = compiled.generate([[1, 2, 3]], PARAMS)
    assert compiled.stats().rounds_by_depth.keys() == {0, 1}
    save(checkpoint / "cache.zip", checkpoint / "made", compiled.runner.cache_key())
    engine = make_engine(checkpoint, graph_cache=checkpoint / "cache.zip", **OPTIONS)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_that_depths_come(engine, expected.new_token_ids, monkeypatch)


def _noting(launched: list[str], name: str, method: Any) -> Any:
    def note(*args: Any) -> Any:
        launched.append(name)
        return method(*args)

    return note


def _prefer_0_most_of_the_time(engine: Any) -> None:
    """Prefer depth 0 for ten rounds, then a deeper one for some."""
    controller = engine._steps.depths.controller
    number = controller._rounds
    if len(controller.depths) == 2:
        controller.choose = lambda bucket, context: _count(controller, 0 if number % 14 < 10 else 1)


def _count(controller: Any, depth: int) -> int:
    controller._rounds += 1
    controller.depth, controller.reason = depth, "best"
    return depth


def test_programs_after_one_that_cannot_be_adopted_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def adopt(program: Any) -> None:
        adopted.append(program)
        raise RuntimeError("no memory for its graph")

    adopted: list[Any] = []
    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", lambda file, owner: file.name)
    later = LaterDepths([LaterProgram(i, tmp_path / str(i), adopt) for i in (0, 2)], None, lambda: True)
    later._thread.join()
    late = later._loaded[1]
    assert later.take() is None
    later._loaded.append(late)
    assert later.take() is None
    assert later.is_done
    assert adopted == ["0"]
    assert len(caplog.records) == 1


def later_programs(tmp_path: Path, depths: list[int]) -> list[LaterProgram]:
    return [LaterProgram(depth, tmp_path / str(i), lambda p: None) for i, depth in enumerate(depths)]


def test_a_file_of_several_programs_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    adopted: list[tuple[int, Any]] = []

    def load(file: Path, owner: Any) -> Any:
        loaded.append(file.name)
        return file.name

    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", load)
    programs = [
        LaterProgram(0, tmp_path / name, partial(lambda i, made: adopted.append((i, made)), i))
        for i, name in enumerate(("a", "a", "b"))
    ]
    later = LaterDepths(programs, None, lambda: True)
    later._thread.join()
    assert [later.take() for _ in programs] == [None, None, 0]
    assert loaded == ["a", "b"]
    assert adopted == [(0, "a"), (1, "a"), (2, "b")]


def test_a_depth_is_ready_when_its_last_program_is_and_no_round_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", lambda file, owner: file)
    is_free = [False]
    later = LaterDepths(later_programs(tmp_path, [0, 0, 2]), None, lambda: is_free[0])
    later._thread.join()
    assert later.take() is None
    is_free[0] = True
    assert [later.take() for _ in range(4)] == [None, 0, 2, None]
    assert later.is_done


def test_a_failed_load_leaves_the_depths_that_are_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        later = LaterDepths(later_programs(tmp_path, [2, 5]), None, lambda: True)
        later._thread.join()
    assert "depth 2 and those after it are not used: graph_cache must hold programs" in caplog.text
    assert later.take() is None
    assert later.is_done


def test_closing_ends_the_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def load(file: Path, owner: object) -> Path:
        begun.set()
        may_end.wait(10)
        return file

    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", load)
    later = LaterDepths(later_programs(tmp_path, [0, 1]), None, lambda: True)
    begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    began_s = time.monotonic()
    later.close()
    assert time.monotonic() - began_s < 5
    assert later.take() is None
    assert later.is_done
