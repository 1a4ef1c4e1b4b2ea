"""The exchange between GPUs of one machine, through memory that all may write (symmetric_kernel.py)."""

from __future__ import annotations

import os
import re
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from compiled_mtp.communicators.communicator import CommunicatorError
from compiled_mtp.communicators.gloo import ENDLESS_S, START_S, STEP_S, GlooCommunicator
from compiled_mtp.ops.device import device_of

# Programs of a launch, and the words of 32 bits that each sends: what is longer goes in several launches.
CHANNELS, CHUNK = 1024, 1024
# Of a program. Of 128 rows of 5,120 sums, each in four parts, eight take 15.8 us on two H200s, four 18.1.
_WARPS = 8
# Looks at a signal between two at the host's memory: some milliseconds.
_TURNS = 4096
# A key of torch's rendezvous: what it is about, the number of the exchange, and a rank or what belongs to it.
_NUMBERED = re.compile(r"(.+?)/(\d+)((?:/[^/]*)?)")
# Exchanges that were given up, until `release`: for good where their device has failed.
_GIVEN_UP: set[SymmetricCommunicator] = set()
# From so many rows on, each rank adds up its share of the sums: of parts in float32 every rank would get all.
_MANY_ROWS = 64


class CountedAnew(Store):
    """`store`, for one rendezvous of torch's symmetric memory, whose keys are prefix/number[/rank].

    torch counts those numbers in the process: that of rank 0 may have had other engines, with ranks that are
    gone, and the others begin. Here the first number of each prefix is 0 in every process.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._kept = store
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if found is None:
            return key
        prefix, number, rest = found.groups()
        first = self._first.setdefault(prefix, int(number))
        return f"{prefix}/{int(number) - first}{rest}"

    def set(self, key: str, value: str) -> None:
        """As `Store.set`; so do the others."""
        self._kept.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._kept.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._kept.add(self._key(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        own = [self._key(key) for key in keys]
        self._kept.wait(own) if timeout is None else self._kept.wait(own, timeout)


class SymmetricCommunicator(GlooCommunicator):
    """Between `device` of each rank; what lies on hosts goes by gloo. At most 8 ranks.

    Raises RuntimeError where the GPUs cannot reach each other's memory.
    """

    kind = "symmetric"
    keeps_prompt_rows = True

    def __init__(self, rank: int, world: int, folder: Path, device: torch.device) -> None:
        super().__init__(rank, world, folder)
        # It can take the GPUs of a host out of service, and nothing here needs it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        name = f"compiled_mtp/{folder.name}"
        # Python's part of it must live as long as torch's.
        self._counted = CountedAnew(self._store)
        group = ProcessGroup(self._counted, rank, world)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._group)
        group._set_group_name(name)  # type: ignore[arg-type]
        _register_process_group(name, group)  # type: ignore[arg-type]
        weakref.finalize(self, _unregister_process_group, name)  # type: ignore[arg-type]
        # Other versions of torch ask this one for its store, 2.11 asks the group.
        _SymmetricMemory.set_group_info(name, rank, world, self._counted)
        # Signals, two halves, and the sums in at most 32 bits.
        words = CHANNELS * world * (1 + 3 * CHUNK)
        self._memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        places = [self._handle.get_buffer(peer, (words,), torch.int32).data_ptr() for peer in range(world)]
        self._peers = torch.tensor(places, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(CHANNELS, dtype=torch.int32, device=device)
        # The host's, which a GPU may read and write while its kernels wait.
        self._control = torch.tensor([0, int(START_S * 1e9)], dtype=torch.int64).pin_memory()
        torch.cuda.synchronize(device)
        # Nobody sends before all are there.
        self.least(0)

    def expect_steps(self) -> None:
        """As `Communicator.expect_steps`."""
        super().expect_steps()
        self._control[1] = int(ENDLESS_S * 1e9)

    def name_missing(self) -> None:
        """As `Communicator.name_missing`."""
        self._control[1] = 0

    def check(self) -> None:
        """As `Communicator.check`."""
        fault = int(self._control[0])
        if fault > 0:
            limit = STEP_S if self.has_steps else START_S
            raise CommunicatorError(f"rank {fault - 1} did not come to an exchange within {limit:.0f} s")
        if fault < 0:
            raise CommunicatorError("the exchange was given up")

    def give_up(self) -> None:
        """As `Communicator.give_up`: kernels look at the host's memory while they wait."""
        if not self._control[0]:
            self._control[0] = -1
        # Kernels may still look there, or wait for a while: what they read must not become another's.
        _GIVEN_UP.add(self)

    def release(self) -> None:
        """As `Communicator.release`: once every kernel has ended, and not where the device cannot say so."""
        if self in _GIVEN_UP:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._memory.device)
                _GIVEN_UP.discard(self)

    def adds(self, rows: int) -> bool:
        """As `Communicator.adds`."""
        return rows >= _MANY_ROWS

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super()._gather(x)
        from compiled_mtp.communicators.symmetric_kernel import gather_kernel

        words = x.view(-1).view(torch.int32)
        out = words.new_empty((self.world, len(words)))
        for first in range(0, len(words), CHANNELS * CHUNK):
            piece = words[first : first + CHANNELS * CHUNK]
            self._launch(gather_kernel, piece[None], out[:, first:], CHUNK, out.stride(0))
        return out.view(x.dtype).view(self.world, *x.shape)

    def _gather_sums(self, parts: torch.Tensor) -> torch.Tensor:
        if not parts.is_cuda:
            return super()._gather_sums(parts)
        from compiled_mtp.communicators.symmetric_kernel import gather_kernel

        out = parts.new_empty((self.world, *parts.shape[1:]))
        parts, sums = parts.flatten(1), out.view(self.world, -1)
        for first in range(0, parts.shape[1], CHANNELS * CHUNK):
            piece = parts[:, first : first + CHANNELS * CHUNK]
            self._launch(gather_kernel, piece, sums[:, first:], CHUNK, sums.stride(0))
        return out

    def _add(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from compiled_mtp.communicators.symmetric_kernel import sum_kernel

        out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
        parts, sums = parts.flatten(1), out.view(-1)
        together = CHANNELS * CHUNK * self.world
        for first in range(0, parts.shape[1], together):
            piece = parts[:, first : first + together]
            self._launch(sum_kernel, piece, sums[first:], CHUNK * self.world)
        return out

    def _launch(
        self, kernel: object, parts: torch.Tensor, out: torch.Tensor, size: int, *strides: int
    ) -> None:
        """One launch, of [P, n] words; `size` of the n are a program's."""
        count, length = parts.shape
        has_pdl = device_of(parts.device.index).has_dependent_launch
        kernel[(-(-length // size),)](  # type: ignore[index]
            parts, out, self._peers, self._epochs, self._control, length, parts.stride(0), *strides,
            PARTS=count, RANK=self.rank, WORLD=self.world, CHANNELS=CHANNELS, CHUNK=CHUNK, TURNS=_TURNS,
            PDL=has_pdl, num_warps=_WARPS, launch_pdl=has_pdl,
        )  # fmt: skip
