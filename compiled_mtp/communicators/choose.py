"""Which exchange ranks use: the config names it."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_mtp.communicators.communicator import Exchange
from compiled_mtp.communicators.gloo import GlooExchange


def join(kind: str, rank: int, world: int, folder: Path, device_type: str) -> Exchange:
    """Join the other ranks in `folder`, as `rank` on its device; `kind` is EngineConfig.exchange.

    Ranks on GPUs have the one of their number, which becomes the process' current one.
    """
    if device_type == "cpu":
        return GlooExchange(rank, world, folder)
    torch.cuda.set_device(rank)
    if kind == "nccl":
        from compiled_mtp.communicators.nccl import NcclExchange

        return NcclExchange(rank, world, folder)
    from compiled_mtp.communicators.symmetric import SymmetricExchange

    return SymmetricExchange(rank, world, folder, torch.device("cuda", rank))
