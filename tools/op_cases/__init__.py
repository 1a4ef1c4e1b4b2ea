"""Calls of the operators: what `bench_op.py` measures, and what `kernel_table.py` compiles without a GPU.

One module per folder of ops/; its `make_inputs` makes the arguments of a call. `launches(capability)` returns
the calls that a GPU of that compute capability may get; record_launches.py records the kernels that they
launch. `cases(shape, rows, settings)` returns the calls to measure: the OpCases of one operator at one
model's shapes for `rows` rows in all. `settings` holds the integers given by --set NAME=VALUE (query_len,
keys, ...); a module reads those it knows, with a default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compiled_mtp.benchmarks.released_shapes import SHAPES as SHAPES
from compiled_mtp.benchmarks.released_shapes import ModelShape as ModelShape

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INT16, INT32, INT64 = torch.int16, torch.int32, torch.int64
FP8_CAPABILITY = 89  # ops.fp8.converts_fp8
# Sizes of the launches: one request's window, a prompt chunk, a few slots.
WINDOW = ROWS = 4
PREFILL_ROWS = 2048
SLOTS = 9
BLOCK_SIZE, MAX_BLOCKS = 64, 128
EPS = 1e-6


@dataclass(frozen=True)
class OpCase:
    """One line of the table.

    label: what is measured, without the shape and the rows. make_inputs(device, seed): the arguments of one
    call, random and new for every seed; the benchmark rotates through several so that they do not stay in L2.
    call, alternative: functions of those arguments; the alternative is the obvious other implementation
    (cuBLAS, SDPA, the reference). bytes_moved: each input and output once. check(arguments): raises
    AssertionError unless the operator is right on them, compared with the reference or with float64 at the
    operator's tolerance.
    """

    label: str
    make_inputs: Callable[[str, int], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes_moved: int
    check: Callable[[tuple[Any, ...]], None]
    alternative: Callable[..., Any] | None = None
    alternative_name: str = "none"


@dataclass(frozen=True)
class LaunchCase:
    """One call. label: unique in its folder, and stable, since the recorded table is keyed by it.

    call(device): makes the arguments on `device` and calls the operator. min_capability: the least compute
    capability (major * 10 + minor) of a GPU that may get the call.
    """

    label: str
    call: Callable[[torch.device], object]
    min_capability: int = 80


def launch_cases(operator: str, capability: int) -> list[LaunchCase]:
    """Return the calls of one folder of ops/ that a GPU of that capability may get."""
    found: Iterator[LaunchCase] = importlib.import_module(f"op_cases.{operator}").launches(capability)
    return [case for case in found if capability >= case.min_capability]


def launch(
    label: str, operator: Callable[..., object], make_inputs: Callable[..., Any], dtype: torch.dtype = BF16
) -> LaunchCase:
    """Return the call on `make_inputs(device, None)`; with an FP8 `dtype` only for GPUs that convert FP8."""

    def call(device: torch.device) -> object:
        return operator(*make_inputs(device, None))

    return LaunchCase(label, call, FP8_CAPABILITY if dtype == FP8 else 80)


class Source:
    """Random inputs on a device; seed None: for a recorded launch, whose tensors have no data."""

    def __init__(self, device: str | torch.device, seed: int | None) -> None:
        self.device = device
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=self.device, generator=self.generator)

    def uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(size, device=self.device, generator=self.generator)

    def full(self, size: int, value: int, dtype: torch.dtype = INT64) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.device)


def check_reference(operator: Any, args: tuple[Any, ...], most: float) -> None:
    """Raise AssertionError unless results and mutated arguments match the reference's.

    most: the largest relative error of a tensor. Does not mutate `args`.
    """
    sides = []
    for function in (operator, operator.reference):
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        made = function(*own)
        tensors = (*(made if isinstance(made, tuple) else (made,)), *own)
        sides.append([one.double() for one in tensors if isinstance(one, torch.Tensor)])
    for got, wanted in zip(*sides, strict=True):
        error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
        assert error < most, f"relative error {error:.1e} against the reference, allowed {most:.0e}"


def tensor(device: torch.device, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Return an uninitialised tensor for a recorded launch."""
    return torch.empty(shape, dtype=dtype, device=device)


def dtype_label(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP32: "fp32", FP8: "fp8"}[dtype]
