"""Depths whose programs come from a graph cache while the engine works: nobody waits, nothing compiles."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp import build
from compiled_mtp.build_order import Features
from compiled_mtp.build_settings import resolve
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, save
from compiled_mtp.graphs.later import LaterDepths, LaterProgram
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.programs import Programs
from compiled_mtp.request import SamplingParams
from compiled_mtp.step import Step
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, run_to_end

OPTIONS: dict[str, Any] = {
    "mtp_step": "auto",
    "mtp_depths": (0, 1),
    "max_batch": 1,
    "max_model_len": 96,
    "num_threads": 1,
}
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
METHODS = {
    "decode": Step.decode,
    "catch": Step.catch_up,
    "first": Step.first_token,
    "prefill": Step.prefill,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return tmp_path


def check_that_depths_come(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request begins with the first depth alone, and goes on with the same tokens when there are two."""
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
    assert not any(programs._state_indices[1][1:])
    assert int(engine.runner.step.slots.pos[0]) == 0


def test_depths_become_ready_between_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs that are not compiled in place of those of a file."""
    plain = make_engine(checkpoint, compile="off", mtp_step=0, max_batch=1, max_model_len=96)
    (expected,) = plain.generate([[1, 2, 3]], PARAMS)
    (checkpoint / "unpacked" / PROGRAMS_NAME).mkdir(parents=True)
    loaded: list[str] = []

    def load(file: Path, owner: Step) -> Any:
        loaded.append(file.name)
        return partial(METHODS[file.name.split("_")[0]], owner)

    patches = {
        "build.check_key": lambda file, key: None,
        "build.read_key": lambda file: {},
        "build.load": lambda file: checkpoint / "unpacked",
        "programs.load_program": load,
        "graphs.later.load_program": load,
    }
    for name, function in patches.items():
        monkeypatch.setattr(f"compiled_mtp.{name}", function)
    monkeypatch.setattr(Programs, "check_layout", lambda self, saved: None)
    progress: list[tuple[Any, ...]] = []
    engine = make_engine(
        checkpoint, graph_cache=checkpoint / "f", progress=lambda *a: progress.append(a), **OPTIONS
    )
    # The start has loaded a round, a first token and a chunk.
    assert progress[-1] == ("compiled shapes", 3, 3)
    assert [name.split("_")[0] for name in loaded[:3]] == ["prefill", "decode", "first"]
    check_that_depths_come(engine, expected.new_token_ids, monkeypatch)
    assert len(loaded) == 6


def test_without_a_cache_a_process_makes_the_depths(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From tensors without values; it writes nothing in place of programs, which are not compiled here."""
    plain = make_engine(checkpoint, compile="off", mtp_step=0, max_batch=1, max_model_len=96)
    (expected,) = plain.generate([[1, 2, 3]], PARAMS)
    # A view of a fake tensor is nothing that the compiler takes.
    told = "str(step.cos_sin) + ' views: ' + str(any(one._is_view() for one in step.buffers()))"
    save = f"lambda method, step, inputs, file: file.write_text({told})"
    code = f"from compiled_mtp import programs; programs.save_program = {save}; "
    code = build._MAKER_CODE.replace("from", f"{code} from", 1)
    monkeypatch.setattr("compiled_mtp.build._MAKER_CODE", code)
    monkeypatch.setattr("compiled_mtp.programs.compile_program", lambda function, name, mode: function)
    written: list[str] = []

    def load(file: Path, owner: Step) -> Any:
        written.append(file.read_text())
        return partial(METHODS[file.name.split("_")[0]], owner)

    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", load)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(checkpoint, compile="on", **OPTIONS)
        assert engine.runner.later is not None
        maker = engine.runner.later._maker
        check_that_depths_come(engine, expected.new_token_ids, monkeypatch)
    assert len(written) == 3
    assert all(text.startswith("FakeTensor") and text.endswith("views: False") for text in written)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert maker is not None
    assert not maker.folder.exists()
    assert maker._process is not None
    assert maker._process.returncode is not None


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_process_compiles_depths_and_may_be_killed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_engine(checkpoint, compile="off", mtp_step=0, max_batch=1, max_model_len=96)
    (expected,) = plain.generate([[1, 2, 3]], PARAMS)
    engine = make_engine(checkpoint, compile="on", **OPTIONS)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_that_depths_come(engine, expected.new_token_ids, monkeypatch)
    assert "are not used" not in caplog.text
    monkeypatch.undo()
    engine = make_engine(checkpoint, compile="on", **OPTIONS)
    assert engine.runner.later is not None
    assert engine.runner.later._maker is not None
    while not (process := engine.runner.later._maker._process):
        time.sleep(0.01)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    engine.runner.later._thread.join()
    assert "depth 0 and those after it are not used: the process that compiles must go on" in caplog.text
    (output,) = engine.generate([[1, 2, 3]], PARAMS)
    assert output.new_token_ids == expected.new_token_ids
    assert engine.stats().rounds_by_depth.keys() == {1}
    engine.close()


@pytest.mark.soak
def test_depths_from_a_graph_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(checkpoint))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(checkpoint / "made" / name))
    features = Features(save_to=checkpoint / "made" / PROGRAMS_NAME)
    compiled = make_engine(checkpoint, compile="on", features=features, **OPTIONS)
    with torch.compiler.set_stance("fail_on_recompile"):
        (expected,) = compiled.generate([[1, 2, 3]], PARAMS)
    assert compiled.stats().rounds_by_depth.keys() == {0, 1}
    save(checkpoint / "cache.zip", checkpoint / "made", compiled.runner.cache_key)
    engine = make_engine(checkpoint, graph_cache=checkpoint / "cache.zip", **OPTIONS)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_that_depths_come(engine, expected.new_token_ids, monkeypatch)


def _noting(launched: list[str], name: str, method: Any) -> Any:
    def note(*args: Any) -> Any:
        launched.append(name)
        return method(*args)

    return note


def _prefer_0_most_of_the_time(engine: Any) -> None:
    """Ten rounds without drafts, then some with."""
    controller = engine._depths.controller
    number = controller._rounds
    if len(controller.depths) == 2:
        controller.choose = lambda bucket, context: _count(controller, 0 if number % 14 < 10 else 1)


def _count(controller: Any, depth: int) -> int:
    controller._rounds += 1
    controller.depth, controller.reason = depth, "best"
    return depth


def test_memory_is_left_for_the_process(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_free_bytes", lambda device: 10**9)
    monkeypatch.setattr(build, "_MAKER_SHARE", 0.25)
    num_blocks = []
    for mtp_step in (1, "auto"):
        options = OPTIONS | {"mtp_step": mtp_step, "max_model_len": 4096, "max_batch": 64}
        config = EngineConfig(
            model=checkpoint, device="cpu", compile="on", offload_gb=0, prefix_cache=False, **options
        )
        model = read_model_config(checkpoint)
        settings = resolve(config, model, Features(), 512, is_checkpoint=True)
        memory = build._plan_memory(settings, 0, 0, 4)
        num_blocks.append(memory.num_blocks * memory.block_bytes)
    assert num_blocks[0] - num_blocks[1] == pytest.approx(0.25e9, rel=0.1)


class FakeMaker:
    """Has made `names`, and then ends; or waits until it is closed."""

    def __init__(self, names: list[str], *, ends: bool) -> None:
        self.names, self.ends, self.closed = names, ends, threading.Event()

    def start(self) -> None:
        assert not self.closed.is_set()

    def wait_for(self, name: str) -> None:
        if name not in self.names:
            if not self.ends:
                self.closed.wait(10)
            raise ValueError("the process that compiles must go on, got its end by SIGKILL")

    def close(self) -> None:
        self.closed.set()


def test_a_maker_that_ends_leaves_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", lambda file, owner: file)
    maker: Any = FakeMaker(["0"], ends=True)
    later = LaterDepths(later_programs(tmp_path, [0, 2, 5]), None, lambda: True, maker)
    later._thread.join()
    assert "depth 2 and those after it are not used: the process that compiles must go on" in caplog.text
    assert len(caplog.records) == 1
    assert [later.take(), later.take()] == [0, None]
    assert later.is_done
    assert maker.closed.is_set()


def test_a_program_that_cannot_be_adopted_ends_the_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(program: Any) -> None:
        raise RuntimeError("no memory for its graph")

    monkeypatch.setattr("compiled_mtp.graphs.later.load_program", lambda file, owner: file)
    maker: Any = FakeMaker(["0"], ends=False)
    programs = [LaterProgram(depth, tmp_path / str(i), refuse) for i, depth in enumerate((0, 2))]
    later = LaterDepths(programs, None, lambda: True, maker)
    deadline = time.monotonic() + 10
    while not later._loaded and time.monotonic() < deadline:
        time.sleep(0.01)
    assert later.take() is None
    later._thread.join(10)
    assert later.is_done
    assert [record.message for record in caplog.records] == [
        "depth 0 and those after it are not used: no memory for its graph"
    ]


def test_what_comes_behind_a_program_that_cannot_be_adopted_is_not_used(
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


def test_closing_while_a_layout_is_read_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Removed(FakeMaker):
        def wait_for(self, name: str) -> None:
            self.closed.wait(10)
            raise FileNotFoundError("layout.json")

    maker: Any = Removed([], ends=False)
    later = LaterDepths(later_programs(tmp_path, [0]), None, lambda: True, maker)
    later.close()
    assert later.is_done
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_closing_ends_the_maker_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    maker: Any = FakeMaker([], ends=False)
    later = LaterDepths(later_programs(tmp_path, [0]), None, lambda: True, maker)
    later.close()
    assert later.is_done
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


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


def test_a_depth_is_ready_when_its_last_program_is_and_no_round_is_half_done(
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


def test_what_cannot_be_loaded_leaves_the_depths_that_are_ready(
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
