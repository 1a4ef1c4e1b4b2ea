"""Runs the Python code of `persistent_kernel` on a CPU: gluon_on_cpu, and what its programs share.

Programs run in order, so that what a program waits for is there.
"""

from __future__ import annotations

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from tests.ops.gluon_on_cpu import (
    Pointer,
    Program,
    Shared,
    Unfinished,
    as_pointer,
    finish,
    names_of,
    start_multiply_add,
)


class Tiles:
    """A descriptor: tiles of a matrix, with zeros outside it.

    is_early: no kernel before writes the matrix.
    """

    def __init__(self, descriptor: Any, is_early: bool) -> None:
        self.matrix = descriptor.base
        self.shape = list(descriptor.block_shape)
        self.layout = descriptor.layout
        self.dtype = SimpleNamespace(primitive_bitwidth=8 * self.matrix.element_size(), own=self.matrix.dtype)
        self.is_early = is_early

    def tile(self, row: int, column: int) -> torch.Tensor:
        result = torch.zeros(self.shape, dtype=self.matrix.dtype)
        found = self.matrix[row : row + self.shape[0], column : column + self.shape[1]]
        result[: found.shape[0], : found.shape[1]] = found
        return result


class PersistentProgram(Program):
    """One program's view."""

    def __init__(self, program: tuple[int, int], programs: tuple[int, int]) -> None:
        super().__init__(program, 4)
        self.programs = programs

    def gl(self) -> SimpleNamespace:
        more = {
            "allocate_shared_memory": self.allocate,
            "num_programs": lambda axis: torch.tensor(self.programs[axis]),
            "zeros_like": torch.zeros_like,
        }
        return SimpleNamespace(**vars(super().gl()) | more)

    def allocate(self, dtype: Any, shape: list[Any], _: Any) -> Shared:
        if dtype == torch.int64:
            return Shared(torch.zeros(shape, dtype=dtype))
        return Shared(torch.full(shape, float("nan")).to(getattr(dtype, "own", dtype)))

    def mbarrier(self) -> SimpleNamespace:
        def arrive(shared: Shared, count: int, pred: bool = True) -> None:
            if pred:
                self.barrier_of(shared).arrive(count)

        return SimpleNamespace(**vars(super().mbarrier()) | {"arrive": arrive})

    def copy_tile(self, tiles: Tiles, place: list[Any], barrier: Shared, shared: Shared) -> None:
        assert self.has_waited or tiles.is_early, "this tile must not be loaded before the wait"
        values = tiles.tile(*map(int, place))
        assert list(values.shape) == shared.shape
        size = values.numel() * values.element_size()
        self.barrier_of(barrier).arrive(0, -size, [(shared.values, values)])

    def copy_numbers(self, shared: Shared, at: Pointer) -> None:
        assert self.has_waited, "no scale may be loaded before the wait"
        self.async_load(shared, at)


def start(
    left: Shared, right: Shared, total: torch.Tensor, use_acc: bool = True, is_async: bool = False
) -> Unfinished:
    return start_multiply_add(left.values, right, total, is_async, use_acc)


class Kernel:
    """Stands in for the kernel: a launch runs its programs on the CPU, and keeps them."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.programs: list[PersistentProgram] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            names = list(inspect.signature(self.kernel.fn).parameters)
            given = dict(zip(names, args, strict=False))
            given |= {name: value for name, value in options.items() if name in names}
            places = [(row_tile, share) for share in range(grid[1]) for row_tile in range(grid[0])]
            self.programs = [PersistentProgram(place, grid) for place in places]
            for program in self.programs:
                self.run(program, {name: self.argument(name, value) for name, value in given.items()})

        return launch

    def argument(self, name: str, value: Any) -> Any:
        is_tiles = hasattr(value, "block_shape")
        return Tiles(value, name.startswith("weight")) if is_tiles else as_pointer(value)

    def run(self, program: PersistentProgram, given: dict[str, Any]) -> None:
        own = names_of(inspect.getmodule(self.kernel.fn))
        for name, value in dict(own).items():
            function = getattr(value, "fn", None)
            if isinstance(function, FunctionType):
                own[name] = FunctionType(function.__code__, own, name, function.__defaults__)
        own |= {
            "gl": program.gl(),
            "mbarrier": program.mbarrier(),
            "copy_tile": program.copy_tile,
            "copy_numbers": program.copy_numbers,
            "async_copy": SimpleNamespace(mbarrier_arrive=program.copies_arrive),
            "warpgroup_mma": start,
            "warpgroup_mma_wait": finish,
            "fence_async_shared": lambda: None,
            "wait_for_warps": lambda: None,
            "keep": lambda value: value,
            "gdc_wait": program.wait,
            "gdc_launch_dependents": lambda: None,
        }
        FunctionType(self.kernel.fn.__code__, own, self.kernel.fn.__name__)(**given)
