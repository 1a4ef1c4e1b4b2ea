"""What ranks exchange inside a step: parts of sums before a norm, and their pieces of the logits.

Ranks add nothing up themselves. Every rank gets the parts of all, in the order of the ranks, and the norm
adds them in its tree's order (ops/k_splits.py): the same numbers in the same order, whatever the number of
ranks.
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

# An operator's arguments are tensors and numbers: the number of an exchange stands for it. As registration
# is process-wide in torch, so is this.
_LIVE: WeakValueDictionary[int, Communicator] = WeakValueDictionary()
_NUMBERS = itertools.count()
# In the place of a number in programs that are saved, which other processes run: the exchange of the caller.
_OF_CALLER = -1
_CALLER = threading.local()
_LIBRARY = torch.library.Library("compiled_mtp", "FRAGMENT")
_LIBRARY.define("gather(Tensor x, int world, int number) -> Tensor")
_LIBRARY.define("gather_partials(Tensor parts, int world, int number) -> Tensor")
_LIBRARY.define("sum_partials(Tensor parts, ScalarType dtype, int number) -> Tensor")


class CommunicatorError(RuntimeError):
    """A rank is gone, or did not come in time."""


class Communicator(ABC):
    """The way between `world` ranks, of which this process is `rank`.

    Every rank calls `gather` equally often, with tensors of one shape: a rank that does not leaves the others
    waiting until the exchange gives up.
    """

    # As EngineConfig.exchange names it.
    kind = "auto"
    # Whether a prompt's sums before a norm have no shares, so that no rank can make a part of one.
    keeps_prompt_rows = False
    # Whether `give_up` comes to its end only when no captured graph is left that exchanges by this.
    waits_for_graphs = False

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        # How often this rank has come: the one that the others wait for has come least often.
        self.count = 0
        # Whether the host waits in an exchange for ranks, which rank 0 judges from outside.
        self.is_waiting = False
        # Whether ranks are in step, and one that does not come is given up in seconds.
        self.has_steps = False
        self._number = next(_NUMBERS)
        _LIVE[self._number] = self

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[world, *x.shape]: x of every rank, in their order; an operator that no compiler looks into.

        Raises CommunicatorError where a rank is gone or does not come.
        """
        gathered: torch.Tensor = torch.ops.compiled_mtp.gather(x, self.world, self._number)
        return gathered

    def gather_partials(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[world, M, N] for `RMSNorm.add`, from each rank's parts [P, M, N] float32 of sums that are due in
        `dtype`; P, which may be another on each rank, is a power of two.

        A rank's parts are neighbours in the tree: what it sends is their sum. With many rows, where the
        exchange can, the sums of all, [1, M, N]: the same bits.
        """
        operators = torch.ops.compiled_mtp
        if self.adds(parts.shape[1]):
            sums: torch.Tensor = operators.sum_partials(parts, dtype, self._number)
            return sums[None]
        gathered: torch.Tensor = operators.gather_partials(parts, self.world, self._number)
        return gathered

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[M, world * N] from each rank's [M, N]."""
        # Of one column each that would be a view.
        return self.gather(x).transpose(0, 1).flatten(1).contiguous()

    def gather_quantized(
        self, values: torch.Tensor, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised rows [M, world * N] and their factors, of each rank's [M, N] in whole groups."""
        # As bytes: not every way between ranks knows e4m3.
        whole = self.gather_columns(values.view(torch.uint8)).view(values.dtype)
        return whole, self.gather_columns(factors)

    @contextmanager
    def left_open(self) -> Iterator[None]:
        """What is traced meanwhile exchanges by whatever exchange calls it: see `calls`."""
        number, self._number = self._number, _OF_CALLER
        try:
            yield
        finally:
            self._number = number

    def calls(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """A program that was traced within `left_open`, in this process or another, with this exchange."""

        def call(*arguments: Any) -> Any:
            before = getattr(_CALLER, "communicator", None)
            _CALLER.communicator = self
            try:
                return program(*arguments)
            finally:
                _CALLER.communicator = before

        return call

    def least(self, value: int) -> int:
        """The least `value` of all ranks, so that what follows from it is the same on each."""
        return int(self._come(torch.tensor([value], dtype=torch.int64)).min())

    def _come(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._gather(x.contiguous())

    def adds(self, rows: int) -> bool:
        """Whether parts of so many rows are added on their way, in the norm's order."""
        return False

    def check(self) -> None:  # noqa: B027 - a host raises where it waits
        """Raise CommunicatorError if a rank did not come to an exchange on the device."""

    def give_up(self) -> None:  # noqa: B027 - a host is told by its peers' end
        """End what waits for a rank on the device, from any thread."""

    def release(self) -> None:  # noqa: B027 - of a host nothing is kept
        """Let go of what `give_up` keeps, after the other ranks have ended."""

    def name_missing(self) -> None:  # noqa: B027 - the host knows by counts
        """Let what waits on the device end, and name the rank that it waits for by `check`."""

    def expect_steps(self) -> None:
        """Until now ranks load and compile, each at its own pace; from now on all do the same at once, and
        rank 0 gives up one that does not come in seconds. The others wait: rank 0 may be paused."""
        self.has_steps = True

    @abstractmethod
    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """What `gather` does, now, for a contiguous x."""

    def _gather_sums(self, parts: torch.Tensor) -> torch.Tensor:
        """The tree's sum of each rank's contiguous parts, gathered, now."""
        return self._gather(add_tree(parts))

    def _add(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tree's sum of all ranks' contiguous parts, now, in `dtype`; where `adds` says so."""
        return add_tree(self._gather_sums(parts)).to(dtype)


def _find(number: int) -> Communicator:
    if number != _OF_CALLER:
        return _LIVE[number]
    found: Communicator = _CALLER.communicator
    return found


def _gather(x: torch.Tensor, world: int, number: int) -> torch.Tensor:
    return _find(number)._come(x)


def _gather_partials(parts: torch.Tensor, world: int, number: int) -> torch.Tensor:
    communicator = _find(number)
    communicator.count += 1
    return communicator._gather_sums(parts.contiguous())


def _sum_partials(parts: torch.Tensor, dtype: torch.dtype, number: int) -> torch.Tensor:
    communicator = _find(number)
    communicator.count += 1
    return communicator._add(parts.contiguous(), dtype)


def _gather_partials_fake(parts: torch.Tensor, world: int, number: int) -> torch.Tensor:
    return parts.new_empty((world, *parts.shape[1:]))


def _sum_partials_fake(parts: torch.Tensor, dtype: torch.dtype, number: int) -> torch.Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


def _gather_fake(x: torch.Tensor, world: int, number: int) -> torch.Tensor:
    return x.new_empty((world, *x.shape))


for _name, _call, _fake in (
    ("gather", _gather, _gather_fake),
    ("gather_partials", _gather_partials, _gather_partials_fake),
    ("sum_partials", _sum_partials, _sum_partials_fake),
):
    _LIBRARY.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_mtp::{_name}", _fake, lib=_LIBRARY)
    add_overload(getattr(torch.ops.compiled_mtp, _name).default)
