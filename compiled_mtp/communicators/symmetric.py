"""The communicator of GPUs of one machine: memory that every GPU may write (symmetric_kernel.py)."""

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
from compiled_mtp.ops.compile_ahead import is_compiling_ahead
from compiled_mtp.ops.device import device_of

# The most programs of a launch, and the 32-bit words that each sends. A longer tensor takes several launches.
CHANNELS, CHUNK = 1024, 1024
# Per program. 128 rows of 5,120 sums, four partials each, on two H200s: 15.8 us with eight, 18.1 with four.
_WARPS = 8
# A waiting kernel reads the host's memory once per this many reads of a signal: every few milliseconds.
_TURNS = 4096
# A key of torch's rendezvous: its prefix, the number of the rendezvous, and a rank or nothing.
_NUMBERED = re.compile(r"(.+?)/(\d+)((?:/[^/]*)?)")
# Aborted communicators, until `release`; one whose device has failed stays here.
_ABORTED: set[SymmetricCommunicator] = set()
# From this many rows on, each rank adds its share of the sums: less to send than all float32 partials to all.
_MANY_ROWS = 64


class RenumberedStore(Store):
    """Wraps `store` for one rendezvous of torch's symmetric memory, whose keys are prefix/number[/rank].

    torch counts these numbers per process, and rank 0's process may have had engines with earlier ranks. Here
    the first number of each prefix is 0 in every process.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if found is None:
            return key
        prefix, number, suffix = found.groups()
        first = self._first.setdefault(prefix, int(number))
        return f"{prefix}/{int(number) - first}{suffix}"

    def set(self, key: str, value: str) -> None:
        """Do as `Store.set`; the other methods do as theirs."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        own = [self._key(key) for key in keys]
        self._store.wait(own) if timeout is None else self._store.wait(own, timeout)


class SymmetricCommunicator(GlooCommunicator):
    """Connects each rank's `device` by symmetric memory, and tensors in host memory by gloo. At most 8 ranks.

    Raises RuntimeError if the GPUs cannot reach each other's memory.
    """

    kind = "symmetric"
    keeps_prompt_rows = True

    def __init__(self, rank: int, world: int, folder: Path, device: torch.device) -> None:
        super().__init__(rank, world, folder)
        # Multicast can take the GPUs of a host out of service, and this communicator does not need it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        name = f"compiled_mtp/{folder.name}"
        # The Python object must live as long as torch's, which calls it.
        self._renumbered = RenumberedStore(self._store)
        group = ProcessGroup(self._renumbered, rank, world)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._group)
        group._set_group_name(name)  # type: ignore[arg-type]
        _register_process_group(name, group)  # type: ignore[arg-type]
        weakref.finalize(self, _unregister_process_group, name)  # type: ignore[arg-type]
        # torch 2.11 takes the store from the group, other versions take it from here.
        _SymmetricMemory.set_group_info(name, rank, world, self._renumbered)
        # Signals, two halves, and the sums in at most 32 bits each.
        words = CHANNELS * world * (1 + 3 * CHUNK)
        self._memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        buffers = [self._handle.get_buffer(peer, (words,), torch.int32) for peer in range(world)]
        self._peers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=device)
        self._epochs = torch.zeros(CHANNELS, dtype=torch.int32, device=device)
        # Host memory that waiting kernels read and write: (fault, limit in ns), see symmetric_kernel.py.
        self._control = torch.tensor([0, int(START_S * 1e9)], dtype=torch.int64).pin_memory()
        torch.cuda.synchronize(device)
        # No rank sends before all ranks have their memory.
        self.least(0)

    def expect_steps(self, has_steps: bool = True) -> None:
        """Do as `Communicator.expect_steps` says."""
        super().expect_steps(has_steps)
        self._control[1] = int((ENDLESS_S if has_steps else START_S) * 1e9)

    def name_missing(self) -> None:
        """Do as `Communicator.name_missing` says."""
        self._control[1] = 0

    def check(self) -> None:
        """Do as `Communicator.check` says."""
        fault = int(self._control[0])
        if fault > 0:
            limit = STEP_S if self.has_steps else START_S
            raise CommunicatorError(f"rank {fault - 1} did not enter a collective within {limit:.0f} s")
        if fault < 0:
            raise CommunicatorError("the communicator was aborted")

    def abort(self) -> None:
        """Do as `Communicator.abort` says: kernels read the host's memory while they wait."""
        if not self._control[0]:
            self._control[0] = -1
        # Keep the memory: kernels may still wait and read it.
        _ABORTED.add(self)

    def release(self) -> None:
        """Free the memory once every kernel has ended; keep it if the device has failed."""
        if self in _ABORTED:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._memory.device)
                _ABORTED.discard(self)

    def adds(self, rows: int) -> bool:
        """Return whether `rows` are many enough to sum them by `sum_kernel`."""
        return rows >= _MANY_ROWS

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super()._gather(x)
        from compiled_mtp.communicators.symmetric_kernel import gather_kernel

        words = x.view(-1).view(torch.int32)
        out = words.new_empty((self.world, len(words)))
        for first in range(0, len(words), CHANNELS * CHUNK):
            sent = words[first : first + CHANNELS * CHUNK]
            self._launch(gather_kernel, sent[None], out[:, first:], CHUNK, out.stride(0))
        return out.view(x.dtype).view(self.world, *x.shape)

    def _gather_sums(self, partials: torch.Tensor) -> torch.Tensor:
        if not partials.is_cuda:
            return super()._gather_sums(partials)
        from compiled_mtp.communicators.symmetric_kernel import gather_kernel

        out = partials.new_empty((self.world, *partials.shape[1:]))
        partials, sums = partials.flatten(1), out.view(self.world, -1)
        for first in range(0, partials.shape[1], CHANNELS * CHUNK):
            sent = partials[:, first : first + CHANNELS * CHUNK]
            self._launch(gather_kernel, sent, sums[:, first:], CHUNK, sums.stride(0))
        return out

    def _add(self, partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from compiled_mtp.communicators.symmetric_kernel import sum_kernel

        out = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
        partials, sums = partials.flatten(1), out.view(-1)
        together = CHANNELS * CHUNK * self.world
        for first in range(0, partials.shape[1], together):
            sent = partials[:, first : first + together]
            self._launch(sum_kernel, sent, sums[first:], CHUNK * self.world)
        return out

    def _launch(
        self, kernel: object, partials: torch.Tensor, out: torch.Tensor, size: int, *strides: int
    ) -> None:
        """Launch `kernel` once over partials [P, n] of 32-bit words; each program takes `size` of the n."""
        if is_compiling_ahead():
            # As operators do: what ranks send may be indices.
            out.zero_()
        count, length = partials.shape
        has_pdl = device_of(partials.device.index).has_dependent_launch
        kernel[(-(-length // size),)](  # type: ignore[index]
            partials, out, self._peers, self._epochs, self._control, length, partials.stride(0), *strides,
            PARTIALS=count, RANK=self.rank, WORLD=self.world, CHANNELS=CHANNELS, CHUNK=CHUNK, TURNS=_TURNS,
            PDL=has_pdl, num_warps=_WARPS, launch_pdl=has_pdl,
        )  # fmt: skip
