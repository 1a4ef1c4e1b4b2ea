"""Launches that compiling would not speed up are captured uncompiled as graphs.

On a CPU, with graphs that run their code when they are replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.compile import GraphMode, capture
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.rounds.catch_up import catch_up
from compiled_mtp.runner.programs import Programs
from compiled_mtp.runner.spec import resolve
from compiled_mtp.step import Step
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.drivers import Driver, make_runner
from tests.engines import prompt_of

METHODS = {
    "decode": Step.decode,
    "catch": catch_up,
}


class Compiler:
    """Stands in for compiling, capturing, saving and loading, and records the calls in order."""

    def __init__(self, patch: Callable[[str, Any], None]) -> None:
        self.compiled: list[str] = []
        self.captured: list[str] = []
        self.replayed: list[str] = []
        self.files: list[str] = []
        for name in ("compile_program", "capture", "save_program", "load_program"):
            patch(f"compiled_mtp.runner.program_maker.{name}", getattr(self, name))

    def compile_program(self, function: Any, name: str, graph_mode: str) -> Any:
        self.compiled.append(name)

        def compiled(*given: Any) -> Any:
            return function(*given)

        compiled.__name__ = name
        return compiled

    def capture(self, program: Any, inputs: tuple[Any, ...], pool: Any) -> Any:
        sizes = [len(i) if isinstance(i, torch.Tensor) else i for i in inputs]
        flat = [size for i in sizes for size in (i if isinstance(i, tuple) else (i,))]
        name = "_".join([program.__name__, *map(str, flat)])
        self.captured.append(name)

        def replay(*given: Any) -> Any:
            assert all(one is static for one, static in zip(given, inputs, strict=True))
            self.replayed.append(name)
            return program(*given)

        return replay

    def save_program(self, function: Any, owner: Any, inputs: tuple[Any, ...], file: Path) -> None:
        file.touch()

    def load_program(self, file: Path, owner: Step) -> Any:
        self.files.append(file.name)
        program = partial(METHODS[file.name.split("_")[0]], owner)
        program.__name__ = file.name  # type: ignore[attr-defined]
        return program


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("captured")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch.setattr)


def driver_of(
    checkpoint: Path,
    graph_mode: GraphMode,
    depths: tuple[int, ...] = (3,),
    *,
    is_compiled: bool = True,
    plain_depths: tuple[int, ...] = (),
    **options: Any,
) -> Driver:
    """Return a driver whose programs have graphs and are not ready yet."""
    sizes = {"prefill_chunk": 128, "mtp_step": "auto", "mtp_depths": depths, "lookup": "off"}
    runner = make_runner(checkpoint, **(sizes | options))
    how: dict[str, Any] = {"is_compiled": is_compiled, "plain_depths": plain_depths}
    runner.programs = Programs(runner.step, runner.programs.buckets, 128, graph_mode=graph_mode, **how)
    return Driver(runner)


def decode_both(driver: Driver) -> dict[str, list[int]]:
    """Run one prompt in two launches and one in one launch, and decode both."""
    driver.start("a", 1, prompt_of(100, 1, 512), chunk=64)
    driver.start("b", 2, prompt_of(90, 2, 512), chunk=128)
    for _ in range(4):
        driver.decode("a", "b")
    return driver.drain()


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_prompts_are_captured_uncompiled_and_rounds_are_compiled(
    checkpoint: Path, compiler: Compiler, graph_mode: GraphMode
) -> None:
    expected = decode_both(Driver(make_runner(checkpoint, prefill_chunk=128)))
    driver = driver_of(checkpoint, graph_mode)
    programs = driver.runner.programs
    progress: list[tuple[int, int]] = []
    programs.warm_up(lambda done, count: progress.append((done, count)))
    # Three and two requests share one program, one request has its own.
    assert [bucket.groups for bucket in programs.buckets] == [1, 2, 3]
    assert compiler.compiled == ["decode_3_to_3_drafts", "decode_3_to_3_drafts_of_1"]
    # The largest comes first: the other graphs use its memory.
    prompts = ["prefill_128_5", "prefill_64_5", "first_token_1_3", "first_token_3_3"]
    assert compiler.captured[:2] == prompts[:2]
    assert {name for name in compiler.captured if "decode" not in name} == {*prompts}
    assert len(compiler.captured) == 4 + (3 if graph_mode == "replay" else 0)
    assert progress[-1] == (programs.count, programs.count)
    tiny.poison(driver.runner.step)
    compiler.replayed.clear()
    assert decode_both(driver) == expected
    assert [name for name in compiler.replayed if "decode" not in name] == [
        *("prefill_64_5", "prefill_64_5", "first_token_1_3"),
        *("prefill_128_5", "first_token_1_3"),
    ]


def test_every_launch_of_a_prompt_has_run_before_one_is_captured(
    checkpoint: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run compiles the kernels, and its memory is freed before a graph takes as much."""
    driver = driver_of(checkpoint, "replay")
    ran: list[tuple[int, int]] = []
    original = driver.runner.step.target.forward

    def forward(inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        ran.append((inputs.shape[0], len(compiler.captured)))
        return original(inputs, *rest)

    monkeypatch.setattr(driver.runner.step.target, "forward", forward)
    driver.runner.programs.warm_up()
    assert [rows for rows, captured in ran if not captured and rows >= 64] == [128, 64]


def test_a_graph_cache_holds_only_rounds(checkpoint: Path, compiler: Compiler, tmp_path: Path) -> None:
    driver = driver_of(checkpoint, "replay", max_batch=1)
    programs, saved = driver.runner.programs, tmp_path / "programs"
    programs.warm_up(save_to=saved)
    assert {file.name for file in saved.iterdir()} == {"layout.json", "decode_3_to_3_drafts_of_1"}
    # A process runs the programs that it wrote, and does not trace them again.
    assert compiler.files == ["decode_3_to_3_drafts_of_1"]
    loading = driver_of(checkpoint, "replay", max_batch=1)
    loading.runner.programs.warm_up(saved=saved)
    assert compiler.files == ["decode_3_to_3_drafts_of_1"] * 2
    assert not compiler.compiled
    assert len(compiler.captured) == 2 * 4


def test_first_tokens_of_every_depth_are_ready_with_the_first_depth(
    checkpoint: Path, compiler: Compiler
) -> None:
    driver = driver_of(checkpoint, "replay", (0, 1, 3), max_batch=1)
    programs = driver.runner.programs
    programs.warm_up(depth=3)
    assert compiler.compiled == ["decode_3_to_3_drafts_of_1"]
    firsts = [name for name in compiler.captured if name.startswith("first")]
    assert sorted(firsts) == ["first_token_1_0", "first_token_1_1", "first_token_1_3"]
    later = [shape.name for shape in programs.shapes_of((0, 1))]
    assert later == ["decode_0_to_0_drafts_of_1", "catch_up_of_1", "decode_1_to_1_drafts_of_1"]


def test_without_compiling_all_launches_are_captured(checkpoint: Path, compiler: Compiler) -> None:
    expected = decode_both(Driver(make_runner(checkpoint, prefill_chunk=128)))
    driver = driver_of(checkpoint, "replay", is_compiled=False)
    programs = driver.runner.programs
    programs.warm_up()
    assert not compiler.compiled
    assert len(compiler.captured) == len(set(compiler.captured)) == programs.count
    tiny.poison(driver.runner.step)
    compiler.replayed.clear()
    assert decode_both(driver) == expected
    # Two launches and one, the first tokens, and four rounds.
    assert len(compiler.replayed) == 3 + 2 + 4


def test_depths_after_the_first_are_captured_uncompiled(checkpoint: Path, compiler: Compiler) -> None:
    driver = driver_of(checkpoint, "reduce-overhead", (0, 1, 3), plain_depths=(0, 3), max_batch=1)
    driver.runner.programs.warm_up()
    assert compiler.compiled == ["decode_1_to_1_drafts_of_1"]
    rounds = [name for name in compiler.captured if not name.startswith(("prefill", "first"))]
    assert rounds == ["decode_1_3_3", "decode_1_0_0", "catch_up_1"]


def test_wide_rounds_are_captured_uncompiled(checkpoint: Path, compiler: Compiler) -> None:
    """At every start, also one that loads the further depths later."""
    driver = driver_of(checkpoint, "replay", (1, 3), max_batch=1, lookup="auto")
    driver.runner.programs.warm_up(depth=1)
    assert compiler.compiled == ["decode_1_to_1_drafts_of_1"]
    rounds = [name for name in compiler.captured if not name.startswith(("prefill", "first"))]
    assert rounds[:-1] == ["decode_1_15_3", "decode_1_15_1"]


@pytest.mark.parametrize(
    "mtp_step, is_compiled, further", [("auto", True, (0, 1)), ("auto", False, ()), (1, True, ())]
)
def test_all_depths_except_the_first_are_further_depths(
    mtp_step: int | str, is_compiled: bool, further: tuple[int, ...]
) -> None:
    """Without a cache, a GPU captures the further depths uncompiled."""
    how = "on" if is_compiled else "off"
    config = EngineConfig(device="cpu", mtp_step=mtp_step, mtp_depths=(0, 1, 3), compile=how)
    assert resolve(config, read_model_config(config.model), 4096).further_depths == further


def test_the_garbage_collector_does_not_run_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting a dropped engine would wait for its stream, which ends the capture."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    found = []
    assert gc.isenabled()
    capture(lambda: found.append(gc.isenabled()), (), None)
    assert (found, gc.isenabled()) == ([False], True)
