"""The communicator of GPUs over NCCL, which a config may name for GPUs that share no memory."""

from __future__ import annotations

import atexit
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch

from compiled_mtp.communicators.gloo import ENDLESS_S, START_S, GlooCommunicator

# At the end of the process, for NCCL to finish an abort.
_EXIT_S = 5.0


class NcclCommunicator(GlooCommunicator):
    """Connects each rank's current GPU by NCCL, and tensors in host memory by gloo.

    Partials are gathered and then added in the tree's order, never reduced in NCCL's own order. Raises
    ImportError if torch was built without NCCL.
    """

    kind = "nccl"
    keeps_prompt_rows = True
    waits_for_graphs = True

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, world, folder)
        from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupNCCL

        # Multicast is off for the reason in symmetric.py.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        options = ProcessGroupNCCL.Options()
        # This timeout does not apply to launches in a graph: rank 0 limits those by its own clock.
        options._timeout = timedelta(seconds=START_S)
        # Run on the caller's stream, as the rest of a step does.
        self._on_stream = AllgatherOptions()
        self._on_stream.asyncOp = False
        self._lock, self._is_aborted = threading.Lock(), False
        self._device_group = ProcessGroupNCCL(PrefixStore("nccl", self._store), rank, world, options)

    def expect_steps(self, has_steps: bool = True) -> None:
        """Do as `Communicator.expect_steps` says."""
        super().expect_steps(has_steps)
        self._device_group._set_default_timeout(timedelta(seconds=ENDLESS_S if has_steps else START_S))

    def abort(self) -> None:
        """Do as `Communicator.abort` says, in a thread of its own.

        NCCL stops its kernels at once but returns only when no captured graph has them.
        """
        with self._lock:
            is_first, self._is_aborted = not self._is_aborted, True
        if is_first:
            aborter = threading.Thread(target=self._device_group.abort, name="compiled-mtp NCCL", daemon=True)
            aborter.start()
            # A thread that returns to Python after the interpreter's end would end the process by SIGABRT.
            atexit.register(aborter.join, _EXIT_S)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super()._gather(x)
        out = x.new_empty((self.world, *x.shape))
        arguments = (out.view(-1), x.view(-1), self._on_stream)
        work = self._device_group._allgather_base(*arguments)  # type: ignore[attr-defined]
        # None if there is nothing to wait for.
        if work is not None:
            work.wait()
        return out
