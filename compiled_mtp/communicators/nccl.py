"""The exchange between GPUs by NCCL: the named alternative where they share no memory."""

from __future__ import annotations

import atexit
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch

from compiled_mtp.communicators.gloo import ENDLESS_S, START_S, GlooCommunicator

# At the end of the process, for NCCL to let go of what was given up.
_EXIT_S = 5.0


class NcclCommunicator(GlooCommunicator):
    """Between the current GPU of each rank; what lies on hosts goes by gloo.

    Parts are gathered and added in the tree's order, never reduced in NCCL's own. Raises ImportError where
    torch was built without NCCL.
    """

    kind = "nccl"
    keeps_prompt_rows = True
    waits_for_graphs = True

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, world, folder)
        from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupNCCL

        # As in symmetric.py: multicast.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        options = ProcessGroupNCCL.Options()
        # A launch that waits has no time of its own in a graph: rank 0 looks at the clock.
        options._timeout = timedelta(seconds=START_S)
        # On the caller's stream, as everything else of a step.
        self._here = AllgatherOptions()
        self._here.asyncOp = False
        self._lock, self._is_given_up = threading.Lock(), False
        self._device_group = ProcessGroupNCCL(PrefixStore("nccl", self._store), rank, world, options)

    def expect_steps(self) -> None:
        """As `Communicator.expect_steps`."""
        super().expect_steps()
        self._device_group._set_default_timeout(timedelta(seconds=ENDLESS_S))

    def give_up(self) -> None:
        """As `Communicator.give_up`: kernels are told at once, but NCCL returns when no graph holds them."""
        with self._lock:
            is_first, self._is_given_up = not self._is_given_up, True
        if is_first:
            teller = threading.Thread(target=self._device_group.abort, name="compiled-mtp NCCL", daemon=True)
            teller.start()
            # A thread that comes back to Python behind its end ends the process by SIGABRT.
            atexit.register(teller.join, _EXIT_S)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super()._gather(x)
        out = x.new_empty((self.world, *x.shape))
        arguments = (out.view(-1), x.view(-1), self._here)
        work = self._device_group._allgather_base(*arguments)  # type: ignore[attr-defined]
        # None where nothing is left to wait for.
        if work is not None:
            work.wait()
        return out
