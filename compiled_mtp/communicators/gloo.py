"""The exchange between processes on CPUs, by torch's gloo over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from compiled_mtp.communicators.communicator import Exchange, ExchangeError

# While ranks load and compile, each at its own pace, and then within a step, which all do alike.
START_S = 600.0
STEP_S = 7.0
_CONNECT_S = 60.0


class GlooExchange(Exchange):
    """A process group of its own, which the torch.distributed of the caller's program knows nothing about.

    folder: where the ranks, all on this machine, find each other; private to them. Raises RuntimeError if
    they do not within a minute.
    """

    kind = "gloo"

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, world)
        self.patience_s = START_S
        self._store = FileStore(str(folder / "store"), world)
        self._store.set_timeout(timedelta(seconds=_CONNECT_S))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # No port is open to other machines.
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=START_S)
        options._threads = 1
        self._group = ProcessGroupGloo(self._store, rank, world, options)

    def expect_steps(self) -> None:
        """As `Exchange.expect_steps`: in STEP_S."""
        self.patience_s = STEP_S
        self._group._set_default_timeout(timedelta(seconds=self.patience_s))

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.world * x.shape[0], *x.shape[1:]))
        try:
            self._group._allgather_base(out, x).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ExchangeError(str(error)) from None
        return out.unflatten(0, (self.world, x.shape[0]))
