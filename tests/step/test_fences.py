"""Data that a kernel reads before its wait are older than the last fence (`Launch`), throughout a step.

A race between two launches would show on a GPU only, and perhaps once in a million steps. So the tests check
the order. Each operator declares what its kernels touch early, and the tests compare that with the kernel's
source. A step recorded operator by operator tells when those data were written. Kernels of torch and of
Inductor are fences but do not count as such here: they may be fused or moved.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.models import resident as resident_module
from compiled_mtp.models.layers import RMSNorm
from compiled_mtp.models.linear import Linear
from compiled_mtp.ops.k_splits import NARROW_ROWS
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.registry import NAMESPACE, Launch, operators
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.rounds.catch_up import catch_up
from compiled_mtp.rounds.two_phase import TwoPhaseRound
from tests import tiny
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engines import make_engine
from tests.step.kernel_sources import OPS, early_uses, read_kernels

Place = tuple[int, int, int]


@dataclass
class Recorder(TorchDispatchMode):
    """Numbers launches, and records by storage which launch wrote and which read it last."""

    launches: int = 0
    fence: int = -1
    checked: int = 0
    written: dict[Place, int] = field(default_factory=dict)
    read: dict[Place, int] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    embedding: torch.Tensor | None = None
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive.append((args, result))  # keeps addresses from being reused
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        namespace, _, name = func._schema.name.partition("::")
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        mutated = {a.name for a in func._schema.arguments if a.is_write}
        if namespace != NAMESPACE:
            self.launches += not func.is_view
            table = args[0] if args and isinstance(args[0], torch.Tensor) else None
            own = None if self.embedding is None else self.embedding.data_ptr()
            if name == "index_select" and table is not None and table.data_ptr() == own:
                # Between read_window, which makes the ids, and the first norm, which reads the rows.
                self.fence = self.launches
            for value in (*outputs, *(given[name] for name in mutated)):
                if isinstance(value, torch.Tensor) and (mutated or not func.is_view):
                    self.written[byte_range(value)] = self.launches
            return result
        made = operators()[name]
        is_resident = given.get("resident", False) and rows_of(given) <= NARROW_ROWS
        launches = made.resident_launches if is_resident else made.launches
        if not launches:
            self.launches += 1
            self.fence = self.launches
        for launch in launches:
            self.launches += 1
            self.check(name, launch, given)
            if launch.is_fence:
                self.fence = self.launches
        for value in given.values():
            if isinstance(value, torch.Tensor):
                self.read[byte_range(value)] = self.launches
        for value in (*outputs, *(given[name] for name in mutated)):
            if isinstance(value, torch.Tensor):
                self.written[byte_range(value)] = self.launches
        return result

    def check(self, name: str, launch: Launch, given: dict[str, Any]) -> None:
        """Check that the launch numbered `launches` touches early only data older than the last fence."""
        if launch.early_if and not given.get(launch.early_if, True):
            return
        for argument in {*launch.reads_early, *launch.stores_early}:
            value = given[argument]
            if not isinstance(value, torch.Tensor):
                continue
            self.checked += 1
            uses = {"written": last_use(self.written, value)}
            if argument in launch.stores_early:
                uses["read"] = last_use(self.read, value)
            for use, number in uses.items():
                if number >= self.fence:
                    self.wrong.append(f"{name}: {argument} was {use} by launch {number}, fence {self.fence}")


def rows_of(given: dict[str, Any]) -> int:
    """Return the rows of an operator's products, or of the products around it."""
    return next(len(given[name]) for name in ("residual", "v", "x") if name in given)


def byte_range(tensor: torch.Tensor) -> Place:
    """Return its storage, its first byte and the byte after its last; a cache's layers share one storage."""
    first = tensor.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return tensor.untyped_storage().data_ptr(), first * size, (last + 1) * size if tensor.numel() else 0


def last_use(uses: dict[Place, int], tensor: torch.Tensor) -> int:
    """Return the last launch that used any of its bytes."""
    storage, begin, end = byte_range(tensor)
    found = [n for (own, first, last), n in uses.items() if own == storage and first < end and begin < last]
    return max(found, default=-2)


def test_declarations_agree_with_the_sources() -> None:
    for path in sorted(OPS.glob("*/reference.py")):
        importlib.import_module(f"compiled_mtp.ops.{path.parent.name}")
    made = operators().values()
    plain = [launch for m in made for launch in m.launches]
    # Of operators that have the argument.
    others = [launch for m in made for launch in m.resident_launches if m.resident_launches is not m.launches]
    assert {launch.kernel for launch in (*plain, *others)} == read_kernels(True).keys()
    for resident, launches in ((False, plain), (True, others)):
        kernels = read_kernels(resident)
        for launch in launches:
            early = kernels[launch.kernel]
            assert launch.is_fence == early.is_fence, (launch, resident)
            if launch.waits_first:
                assert (launch.reads_early, launch.reads_own, launch.stores_early) == ((), (), ()), launch
                continue
            assert {*launch.reads_early, *launch.reads_own} == early.reads, (launch, resident)
            assert set(launch.stores_early) == early.stores, (launch, resident)


def test_what_an_operator_reads_of_its_own_is_behind_a_fence() -> None:
    behind = [
        [before.is_fence for before in made.launches[1:index]]
        for made in operators().values()
        for index, launch in enumerate(made.launches)
        if launch.reads_own
    ]
    assert behind
    assert all(any(fences) for fences in behind)


def test_reading_a_source_finds_early_uses() -> None:
    source = """
def kernel(x, y, z, out, state, N: tl.constexpr):
    at = x + 1
    at += 2
    out += 3
    if N:
        load_row(y, N)
        gdc_wait()
        tl.load(z)
    else:
        tl.store(state + N, tl.load(at))
        gdc_wait()
    tl.store(out, 1)
"""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    uses = early_uses(function.body, {})
    given = {"x", "y", "z", "out", "state"}
    assert (uses["read"] & given, uses["store"] & given) == ({"x", "y"}, {"state"})


def make_resident(step: Any) -> int:
    """Make all weights resident that can be, as all of 0.8B's are; return how many."""
    models = [model for model in (step.target, step.draft) if model is not None]
    linears = [m for model in models for m in model.modules() if isinstance(m, Linear) and m.may_be_resident]
    with mock.patch.object(resident_module, "can_be_resident", return_value=True):
        for model in models:
            resident_module.choose_resident(model)
    return len(linears)


def record_rounds(step: Any, count: int) -> Recorder:
    """Record two prompts and `count` rounds of them, one after the other without other launches between."""
    recorder = Recorder(embedding=step.target.embed.weight)
    for slot in (1, 2):
        tiny.admit(step, slot, seed=slot, temperature=0.0)
    with recorder:
        for slot in (1, 2):
            tiny.prefill(step, slot, list(range(70)))
        for index in range(count):
            # The target alternates between at most 16 rows and more, of which none are resident; drafts have
            # fewer rows.
            tiny.decode(step, [1, 2, *[0] * (1 + 2 * (index % 2))])
    return recorder


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize(
    ("mtp_step", "has_images"), [(0, False), (1, False), (3, False), (0, True), (3, True)]
)
def test_early_reads_are_older_than_the_last_fence(
    family: str, mtp_step: int, has_images: bool, resident: bool
) -> None:
    config = tiny.tiny_config(**(tiny.MOE if family == "moe" else {}))
    step = tiny.build_step(config, mtp_step)
    step.has_images = has_images
    if resident:
        assert make_resident(step) >= 2 * len(step.target.layers)
    recorder = record_rounds(step, 2)
    assert recorder.wrong == []
    assert recorder.checked > 100


@pytest.mark.parametrize("resident", [False, True])
def test_early_reads_are_older_where_drafts_are_looked_up(resident: bool) -> None:
    step = tiny.build_step(tiny.tiny_config(), 3, has_text=True)
    if resident:
        make_resident(step)
    recorder = record_rounds(step, 3)
    assert recorder.wrong == []
    assert recorder.checked > 100


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_early_reads_are_older_with_quantised_rows(family: str, tmp_path: Path) -> None:
    step = make_engine(write_checkpoint(tmp_path, **dict(FP8_FAMILIES)[family]), mtp_step=3).runner.step
    # Norms that quantise rely on fences: products beside them must not be resident, even if they could.
    assert make_resident(step) > 0
    modules = [*step.target.modules(), *step.draft.modules()]
    assert not any(module.resident for module in modules if isinstance(module, (Linear, RMSNorm)))
    recorder = Recorder()
    tiny.install(step, 1, tuple((1, index, index + 1) for index in range(8)))
    with recorder:
        tiny.prefill(step, 1, list(range(70)))
        for _ in range(2):
            tiny.decode(step, [1, 0])
    assert recorder.wrong == []
    assert recorder.checked > 100


@pytest.mark.parametrize("has_images", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_early_reads_are_older_in_two_phases_and_between_depths(resident: bool, has_images: bool) -> None:
    step = tiny.build_step(tiny.tiny_config(), 3)
    step.has_images = has_images
    two_phase = TwoPhaseRound(step)
    two_phase.reserve(12)
    if resident:
        make_resident(step)
    recorder = Recorder(embedding=step.target.embed.weight)
    state_index = torch.tensor([1, 2, 0], dtype=torch.int32)
    for slot in (1, 2):
        tiny.admit(step, slot, seed=slot, temperature=0.0)
    with recorder:
        for slot in (1, 2):
            tiny.prefill(step, slot, list(range(70)))
        for shape in starmap(RoundShape, ((3, 1), (1, 3), (3, 3))):
            two_phase.verify(state_index, shape)
            two_phase.accept(state_index, shape)
        for _ in range(2):
            step.decode(state_index, RoundShape(0, 0))
        catch_up(step, state_index)
        step.decode(state_index, RoundShape(3, 3))
    assert recorder.wrong == []


def test_with_quantised_experts_no_weight_is_resident() -> None:
    step = tiny.build_step(tiny.tiny_config(**tiny.MOE), 0)
    assert any(module.resident for module in resident_modules(step))
    for layer in step.target.layers:
        # For mixed checkpoints: mixers in bfloat16, experts in FP8.
        layer.ffn.quantizes_rows = True
    assert not any(module.resident for module in resident_modules(step))


def resident_modules(step: Any) -> list[Any]:
    make_resident(step)
    return [module for module in step.target.modules() if isinstance(module, (Linear, RMSNorm))]


@pytest.mark.parametrize("which", ["norms", "fc"])
def test_undeclared_resident_products_are_found(which: str) -> None:
    step = tiny.build_step(tiny.tiny_config(), 3)
    make_resident(step)
    assert step.draft is not None
    if which == "fc":
        step.draft.fc.resident = True
    else:
        for layer in step.target.layers:
            layer.post_norm.resident = False
    recorder = record_rounds(step, 1)
    wanted = "qk_norm_rope_kv_write: slot_mapping" if which == "fc" else "add_rms_norm: residual"
    assert any(text.startswith(wanted) for text in recorder.wrong)


def test_the_check_can_fail() -> None:
    x, weight, matrix = torch.randn(3, 8), torch.randn(8), torch.randn(8, 8)
    with Recorder() as recorder:
        _, residual = add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(x, residual, weight, 1e-6)
    assert recorder.wrong == ["add_rms_norm: residual was written by launch 1, fence -1"]
    with Recorder() as recorder:
        add_rms_norm(x, x * 2, weight, 1e-6)
    assert recorder.wrong == ["add_rms_norm: residual was written by launch 1, fence -1"]
    with Recorder() as recorder:
        _, residual = add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(linear(x, matrix), residual, weight, 1e-6)
    assert recorder.wrong == []
    with Recorder() as recorder:
        _, residual = add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(linear(x, matrix, resident=True), residual, weight, 1e-6)
    assert recorder.wrong == ["add_rms_norm: residual was written by launch 1, fence -1"]
    with Recorder() as recorder:
        _, residual = add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(linear(x, matrix, resident=True), residual, weight, 1e-6, resident=True)
    assert recorder.wrong == []
