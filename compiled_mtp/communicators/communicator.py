"""Communicator: what ranks send each other inside a step, which is partial sums before a norm and logits.

A communicator does not reduce in an order of its own. Every rank gets the partials of all ranks in the ranks'
order, and the norm adds them in its tree's order (ops/k_splits.py): the same numbers in the same order for
any number of ranks.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.registry import add_overload

# An operator takes only tensors and numbers, so a number stands for a communicator. The table is
# process-wide, as torch's registration of operators is.
_LIVE: WeakValueDictionary[int, Communicator] = WeakValueDictionary()
_NUMBERS = itertools.count()
# The number in saved programs, which other processes run: it stands for the communicator bound by `bind`.
_UNBOUND = -1
_BOUND = threading.local()
_LIBRARY = torch.library.Library("compiled_mtp", "FRAGMENT")
_LIBRARY.define("gather(Tensor x, int world, int number) -> Tensor")
_LIBRARY.define("gather_partials(Tensor partials, int world, int number) -> Tensor")
_LIBRARY.define("sum_partials(Tensor partials, ScalarType dtype, int number) -> Tensor")


class CommunicatorError(RuntimeError):
    """A rank has ended, or did not enter a collective in time."""


class Communicator(ABC):
    """Connects `world` ranks, of which this process is `rank`.

    Every rank must enter the same collectives in the same order, with tensors of one shape. If a rank does
    not, the others wait until they are aborted.
    """

    # The value of EngineConfig.communicator.
    kind = "auto"
    # Whether a prompt's sums before a norm have no K splits, so that a rank cannot compute a partial sum.
    keeps_prompt_rows = False
    # Whether `abort` ends only when no captured graph with this communicator's kernels is left.
    waits_for_graphs = False

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        # Collectives that this rank has entered: the rank for which others wait has entered the fewest.
        self.count = 0
        # Whether this host waits in a collective; rank 0's listening thread limits that time.
        self.is_waiting = False
        # Whether ranks run steps, so that a rank that does not come within seconds is lost.
        self.has_steps = False
        self._number = next(_NUMBERS)
        _LIVE[self._number] = self

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x in the ranks' order, [world, *x.shape]; an operator opaque to the compiler.

        Raises CommunicatorError if a rank has ended or does not come.
        """
        gathered: torch.Tensor = torch.ops.compiled_mtp.gather(x, self.world, self._number)
        return gathered

    def gather_partials(self, partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the partial sums of all ranks for `RMSNorm.add`, [world, M, N] float32.

        partials [P, M, N] float32: P, which may differ between ranks, is a power of two. A rank's partials
        are neighbours in the tree, so the rank sends their sum. If `adds` is true for M rows, returns the
        total [1, M, N] in `dtype` instead; the norm's result has the same bits.
        """
        operators = torch.ops.compiled_mtp
        if self.adds(partials.shape[1]):
            sums: torch.Tensor = operators.sum_partials(partials, dtype, self._number)
            return sums[None]
        gathered: torch.Tensor = operators.gather_partials(partials, self.world, self._number)
        return gathered

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return [M, world * N] from each rank's [M, N]."""
        # `contiguous`: with one column per rank the result would be a view.
        return self.gather(x).transpose(0, 1).flatten(1).contiguous()

    def gather_quantized(
        self, values: torch.Tensor, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return quantised rows [M, world * N] and their factors from each rank's [M, N] of whole groups."""
        # As bytes: not every backend supports e4m3.
        whole = self.gather_columns(values.view(torch.uint8)).view(values.dtype)
        return whole, self.gather_columns(factors)

    @contextmanager
    def unbound(self) -> Iterator[None]:
        """Trace programs in the block without a communicator of their own; `bind` gives them one."""
        number, self._number = self._number, _UNBOUND
        try:
            yield
        finally:
            self._number = number

    def bind(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return `program`, traced within `unbound` in any process, with this communicator."""

        def call(*arguments: Any) -> Any:
            before = getattr(_BOUND, "communicator", None)
            _BOUND.communicator = self
            try:
                return program(*arguments)
            finally:
                _BOUND.communicator = before

        return call

    def least(self, value: int) -> int:
        """Return the least `value` of all ranks, so that every rank derives the same from it."""
        return int(self._count_and_gather(torch.tensor([value], dtype=torch.int64)).min())

    def _count_and_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._gather(x.contiguous())

    def adds(self, rows: int) -> bool:
        """Return whether the communicator sums partials of `rows` rows itself, in the norm's order."""
        return False

    def check(self) -> None:  # noqa: B027 - on a host the collective itself raises
        """Raise CommunicatorError if a rank did not enter a collective on the device."""

    def abort(self) -> None:  # noqa: B027 - on a host the peers' end ends a collective
        """End what waits for a rank on the device; any thread may call it."""

    def release(self) -> None:  # noqa: B027 - on a host `abort` keeps nothing
        """Free what `abort` keeps, after the other ranks have ended."""

    def name_missing(self) -> None:  # noqa: B027 - on a host the counts name the rank
        """End what waits on the device, so that `check` names the missing rank."""

    def expect_steps(self, has_steps: bool = True) -> None:
        """Begin steps, in which all ranks enter the same collectives at once; with False, end them.

        Outside steps ranks load and compile, each at its own pace. Within them rank 0 ends a rank that does
        not come within seconds; the other ranks wait without a limit, since rank 0 may be paused.
        """
        self.has_steps = has_steps

    @abstractmethod
    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather as `gather` does, eagerly, a contiguous x."""

    def _gather_sums(self, partials: torch.Tensor) -> torch.Tensor:
        """Gather, eagerly, the tree's sum of each rank's contiguous partials."""
        return self._gather(add_tree(partials))

    def _add(self, partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return, eagerly, the tree's sum of all ranks' contiguous partials in `dtype`; only if `adds`."""
        return add_tree(self._gather_sums(partials)).to(dtype)


def _find(number: int) -> Communicator:
    if number != _UNBOUND:
        return _LIVE[number]
    found: Communicator = _BOUND.communicator
    return found


def _gather(x: torch.Tensor, world: int, number: int) -> torch.Tensor:
    return _find(number)._count_and_gather(x)


def _gather_partials(partials: torch.Tensor, world: int, number: int) -> torch.Tensor:
    communicator = _find(number)
    communicator.count += 1
    return communicator._gather_sums(partials.contiguous())


def _sum_partials(partials: torch.Tensor, dtype: torch.dtype, number: int) -> torch.Tensor:
    communicator = _find(number)
    communicator.count += 1
    return communicator._add(partials.contiguous(), dtype)


_OPERATORS: tuple[tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor]], ...] = (
    ("gather", _gather, lambda x, world, _: x.new_empty((world, *x.shape))),
    ("gather_partials", _gather_partials, lambda x, world, _: x.new_empty((world, *x.shape[1:]))),
    ("sum_partials", _sum_partials, lambda x, dtype, _: x.new_empty(x.shape[1:], dtype=dtype)),
)
for _name, _call, _fake in _OPERATORS:
    _LIBRARY.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_mtp::{_name}", _fake, lib=_LIBRARY)
    add_overload(getattr(torch.ops.compiled_mtp, _name).default)
