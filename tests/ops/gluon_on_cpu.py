"""Runs a Gluon kernel's Python code on a CPU: torch tensors stand in for Gluon's.

Triton's interpreter knows no Gluon. Layouts are ignored. Copies to shared memory arrive at the wait and not
before; until then the memory holds NaN. One program runs after another. Inline assembly is run
instruction by instruction (tests/ops/assembly.py). Layouts that do not fit are found by the compiler and by
tests/gpu.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from tests.ops import assembly

Group = list[tuple[torch.Tensor, torch.Tensor]]
WAIT_SECONDS = 60


class Pointer:
    """The address of an element of a tensor, or a tensor of addresses."""

    def __init__(self, values: torch.Tensor, offset: Any = 0) -> None:
        self.values = values
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=values.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.offset + offset)


class Shared:
    """Shared memory of one program: [rows, columns], or stages of it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape = list(values.shape)

    def load(self, layout: Any) -> torch.Tensor:
        return self.values.clone()

    def store(self, values: torch.Tensor) -> None:
        assert list(values.shape) == self.shape
        self.values.copy_(values)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.values.permute(order))

    def index(self, index: Any) -> Shared:
        return Shared(self.values[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length))


class Descriptor:
    """Tiles of `block_m` rows and 128 columns of x."""

    layout = "tiles"

    def __init__(self, x: torch.Tensor, block_m: int) -> None:
        self.x = x
        self.block_m = block_m

    def tile(self, row: int, column: int) -> torch.Tensor:
        own = self.x[row : row + self.block_m, column : column + 128]
        return torch.nn.functional.pad(own, (0, 0, 0, self.block_m - own.shape[0]))


class Barrier:
    """A barrier in shared memory: copies that it waits for arrive when it completes."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.completed = 0
        self.bytes = 0
        self.copies: Group = []
        self.changed = threading.Condition()

    def arrive(self, count: int, more_bytes: int = 0, copies: Group | None = None) -> None:
        with self.changed:
            self.missing -= count
            self.bytes += more_bytes
            self.copies += copies or []
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                for memory, values in self.copies:
                    memory.copy_(values)
                self.copies = []
                self.missing = self.count
                self.completed += 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            is_over = self.changed.wait_for(lambda: self.completed % 2 != int(phase), WAIT_SECONDS)
        assert is_over, "a barrier that never completes"


class Unfinished:
    """The result of an asynchronous product before the wait."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Program:
    """One program's view: `gl`, `async_copy`, `mbarrier` and the functions that wait."""

    def __init__(self, program: tuple[int, int], num_warps: int) -> None:
        self.program = program
        self.warps = num_warps
        self.open: Group = []
        self.groups: list[Group] = []
        self.has_waited = False
        # The most groups in flight before the wait.
        self.most_early = 0
        self.barriers: dict[int, Barrier] = {}
        self.flags_taken = self.flags_set = 0

    def gl(self) -> SimpleNamespace:
        def layout(*fields: Any) -> tuple[Any, ...]:
            return fields

        def as_tensor(value: Any) -> torch.Tensor:
            return torch.as_tensor(value)

        names = ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout")
        types = ("bfloat16", "float32", "int64", "int32", "int16", "int8")
        return SimpleNamespace(
            **dict.fromkeys((*names, "NVMMADistributedLayout"), layout),
            DistributedLinearLayout=lambda **fields: fields,
            **{name: getattr(torch, name) for name in types},
            constexpr=None,
            static_range=range,
            num_warps=lambda: self.warps,
            # Tensors: the kernel calls their `to`.
            program_id=lambda axis: torch.tensor(self.program[axis]),
            arange=lambda first, last, _: torch.arange(first, last),
            minimum=lambda a, b: torch.minimum(as_tensor(a), as_tensor(b)),
            maximum=lambda a, b: torch.maximum(as_tensor(a), as_tensor(b)),
            min=torch.amin,
            where=torch.where,
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            exp=torch.exp,
            reshape=torch.reshape,
            permute=torch.permute,
            split=lambda pairs: pairs.unbind(-1),
            join=lambda left, right: torch.stack((left, right), -1),
            expand_dims=torch.unsqueeze,
            fma=lambda a, b, c: (a.double() * b + c).to(c.dtype),
            load=self.load,
            convert_layout=lambda value, _, assert_trivial=False: value,
            inline_asm_elementwise=assembly.run,
            # Integers have no NaN.
            allocate_shared_memory=lambda dtype, shape, _: Shared(
                torch.full(shape, float("nan") if dtype.is_floating_point else 0x5555, dtype=dtype)
            ),
            store=self.store,
            atomic_cas=self.take,
            atomic_xchg=self.set,
            warp_specialize=run_together,
        )

    def mbarrier(self) -> SimpleNamespace:
        return SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.new_barrier,
            expect=lambda shared, size: self.barrier_of(shared).arrive(1, size),
            arrive=lambda shared, count: self.barrier_of(shared).arrive(count),
            wait=lambda shared, phase: self.barrier_of(shared).wait(phase),
        )

    def new_barrier(self, shared: Shared, count: int) -> None:
        self.barriers[shared.values.data_ptr()] = Barrier(count)

    def barrier_of(self, shared: Shared) -> Barrier:
        return self.barriers[shared.values.data_ptr()]

    def copies_arrive(self, shared: Shared, increment_count: bool) -> None:
        """All threads of four warps arrive when the copies that they asked for have."""
        assert not increment_count
        copies, self.open = self.open, []
        self.barrier_of(shared).arrive(128, 0, copies)

    def load_tile(self, tiles: Descriptor, at: list[Any], barrier: Shared, shared: Shared) -> None:
        assert self.has_waited, "rows may not be loaded before the wait"
        values = tiles.tile(*(int(index) for index in at))
        assert list(values.shape) == shared.shape
        self.barrier_of(barrier).arrive(0, -2 * values.numel(), [(shared.values, values)])

    def take(self, at: Pointer, expected: int, value: int, sem: str) -> torch.Tensor:
        assert at.values[at.offset] == expected
        assert sem == "acquire"
        at.values[at.offset] = value
        self.flags_taken += 1
        return torch.tensor(expected)

    def set(self, at: Pointer, value: int, sem: str) -> None:
        assert at.values[at.offset] == 0
        assert sem == "release"
        at.values[at.offset] = value
        self.flags_set += 1

    def load(
        self, at: Pointer, mask: torch.Tensor | None = None, other: Any = 0, cache_modifier: str = ""
    ) -> torch.Tensor:
        if mask is None:
            return at.values[at.offset]
        offset, mask = torch.broadcast_tensors(at.offset, mask)
        return torch.where(mask, at.values[torch.where(mask, offset, 0)], other)

    def store(self, at: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        assert self.has_waited, "nothing may be stored before the wait"
        mask = torch.ones((), dtype=torch.bool) if mask is None else mask
        offset, value, mask = torch.broadcast_tensors(at.offset, value, mask)
        flat = offset[mask]
        assert len(flat.unique()) == len(flat)
        at.values[flat] = value[mask]

    def async_load(self, shared: Shared, at: Pointer, mask: torch.Tensor | None = None) -> None:
        if mask is None:
            values = at.values[at.offset]
        else:
            offset, mask = torch.broadcast_tensors(at.offset, mask)
            values = torch.where(mask, at.values[torch.where(mask, offset, 0)], 0)
        assert list(values.shape) == shared.shape
        self.open.append((shared.values, values))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []
        if not self.has_waited:
            self.most_early = max(self.most_early, len(self.groups))

    def wait_group(self, count: int) -> None:
        assert count >= 0
        while len(self.groups) > count:
            for memory, values in self.groups.pop(0):
                memory.copy_(values)

    def wait(self) -> None:
        self.has_waited = True


def run(
    kernel: Any, grid: tuple[int, int], num_warps: int, instead: dict[str, Any] | None = None, **given: Any
) -> list[Program]:
    """Run every program of a kernel, one after another.

    instead: functions that take the place of the module's by name, for those that are inline assembly or
    reinterpret bits. given: the kernel's arguments by name; a tensor is passed with its storage and offset.
    """
    programs = []
    module = inspect.getmodule(kernel.fn)
    for second in range(grid[1]):
        for first in range(grid[0]):
            program = Program((first, second), num_warps)
            own = names_of(module)
            for name, value in dict(own).items():
                function = getattr(value, "fn", None)
                if isinstance(function, FunctionType):
                    own[name] = FunctionType(function.__code__, own, name, function.__defaults__)
            copies = SimpleNamespace(
                commit_group=program.commit_group,
                wait_group=program.wait_group,
                mbarrier_arrive=program.copies_arrive,
            )
            own |= {"gl": program.gl(), "async_copy": copies, "async_load": program.async_load}
            own |= {"gdc_wait": program.wait, "gdc_launch_dependents": lambda: None, "mma_v2": multiply_add}
            own |= {"mbarrier": program.mbarrier(), "load_tile": program.load_tile}
            own |= {"warpgroup_mma": start_multiply_add, "warpgroup_mma_wait": finish}
            own |= {"keep": lambda value: value, "wait_for_warps": lambda: None}
            own |= instead or {}
            entry = FunctionType(kernel.fn.__code__, own, kernel.fn.__name__)
            entry(**{name: as_pointer(value) for name, value in given.items()})
            programs.append(program)
    return programs


def run_together(
    parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]
) -> None:
    """Run the parts of a program that run at the same time."""
    assert len(parts) - 1 == len(warps) == len(registers)
    errors: list[BaseException] = []

    def guarded(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def names_of(module: Any, seen: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The names of a kernel's module, and of the modules whose device functions it imports."""
    own: dict[str, Any] = {}
    for value in vars(module).values():
        function = getattr(value, "fn", None)
        source = inspect.getmodule(function) if isinstance(function, FunctionType) else None
        if source not in (None, module, *seen):
            own |= names_of(source, (*seen, module))
    return own | vars(module)


def as_pointer(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return Pointer(flat, value.storage_offset())


def multiply_add(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, input_precision: str
) -> torch.Tensor:
    # In float64, whose order of sums no float32 number shows.
    return (total.double() + left.double() @ right.double()).float()


def start_multiply_add(
    left: torch.Tensor,
    right: Shared,
    total: torch.Tensor | Unfinished,
    is_async: bool,
    use_acc: bool = True,
) -> Unfinished:
    assert is_async
    before = total.values if isinstance(total, Unfinished) else total
    if not use_acc:
        before = torch.zeros_like(before)
    return Unfinished(multiply_add(left, right.values, before, "ieee"))


def finish(count: int, deps: list[torch.Tensor | Unfinished]) -> Any:
    assert count >= 0
    sums = tuple(one.values if isinstance(one, Unfinished) else one for one in deps)
    return sums if len(sums) > 1 else sums[0]
