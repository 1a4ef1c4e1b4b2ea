"""The communicator of processes on CPUs: torch's gloo over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from compiled_mtp.communicators.communicator import Communicator, CommunicatorError

# Limits of a wait for another rank: while ranks load and compile, each at its own pace, and within a step, in
# which all enter the same collectives. Rank 0 enforces STEP_S by its own clock. A wait in a step has no limit
# of its own, since rank 0 may be paused for hours.
START_S = 600.0
STEP_S = 7.0
ENDLESS_S = 365 * 86_400.0
# For the other ranks to connect to rank 0, which comes last, after all have reported.
_CONNECT_S = 60.0


class GlooCommunicator(Communicator):
    """A private process group, separate from the torch.distributed of the caller's program.

    folder: the ranks' private folder, in which they find each other; all are on this machine. Raises
    RuntimeError if they do not connect within a minute after rank 0.
    """

    kind = "gloo"

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, world)
        self._store = FileStore(str(folder / "store"), world)
        timeout = timedelta(seconds=START_S if rank else _CONNECT_S)
        self._store.set_timeout(timeout)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Open no port to other machines.
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        options._threads = 1
        self._group = ProcessGroupGloo(self._store, rank, world, options)
        self._group._set_default_timeout(timedelta(seconds=START_S))

    def expect_steps(self, has_steps: bool = True) -> None:
        """Do as `Communicator.expect_steps` says."""
        super().expect_steps(has_steps)
        self._group._set_default_timeout(timedelta(seconds=ENDLESS_S if has_steps else START_S))

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.world * x.shape[0], *x.shape[1:]))
        self.is_waiting = True
        try:
            self._group._allgather_base(out, x).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise CommunicatorError(str(error)) from None
        finally:
            self.is_waiting = False
        return out.unflatten(0, (self.world, x.shape[0]))
