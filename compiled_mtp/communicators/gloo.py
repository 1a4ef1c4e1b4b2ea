"""The exchange between processes on CPUs, by torch's gloo over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from compiled_mtp.communicators.communicator import Communicator, CommunicatorError

# While ranks load and compile, each at its own pace, and then within a step, which all do alike. The second
# counts while rank 0 runs: it looks at the clock. By itself a wait in a step does not end, since rank 0 may
# be paused for hours.
START_S = 600.0
STEP_S = 7.0
ENDLESS_S = 365 * 86_400.0
# For the others to meet rank 0, which comes last: it has heard of all.
_CONNECT_S = 60.0


class GlooCommunicator(Communicator):
    """A process group of its own, which the torch.distributed of the caller's program knows nothing about.

    folder: where the ranks, all on this machine, find each other; private to them. Raises RuntimeError if
    they do not within a minute of rank 0's coming.
    """

    kind = "gloo"

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, world)
        self._store = FileStore(str(folder / "store"), world)
        meeting = timedelta(seconds=START_S if rank else _CONNECT_S)
        self._store.set_timeout(meeting)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # No port is open to other machines.
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = meeting
        options._threads = 1
        self._group = ProcessGroupGloo(self._store, rank, world, options)
        self._group._set_default_timeout(timedelta(seconds=START_S))

    def expect_steps(self) -> None:
        """As `Communicator.expect_steps`."""
        super().expect_steps()
        self._group._set_default_timeout(timedelta(seconds=ENDLESS_S))

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
