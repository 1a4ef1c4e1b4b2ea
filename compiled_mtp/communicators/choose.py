"""Chooses the communicator that the config names."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.communicators.gloo import GlooCommunicator


def join(kind: str, rank: int, world: int, folder: Path, device_type: str) -> Communicator:
    """Connect to the other ranks through `folder`, as `rank`, and return the communicator.

    kind: EngineConfig.communicator. A rank on a GPU makes the GPU of its number the process' current one.
    """
    if device_type == "cpu":
        return GlooCommunicator(rank, world, folder)
    torch.cuda.set_device(rank)
    if kind == "nccl":
        from compiled_mtp.communicators.nccl import NcclCommunicator

        return NcclCommunicator(rank, world, folder)
    from compiled_mtp.communicators.symmetric import SymmetricCommunicator

    return SymmetricCommunicator(rank, world, folder, torch.device("cuda", rank))
