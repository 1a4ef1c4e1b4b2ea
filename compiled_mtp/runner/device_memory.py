"""How much memory of a GPU is free for this process."""

from __future__ import annotations

import torch


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a CUDA device.

    A process whose share of the device is limited (torch.cuda.set_per_process_memory_fraction) has no more
    than that share.
    """
    free, total = torch.cuda.mem_get_info(device)
    share = int(torch.cuda.memory.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, share - torch.cuda.memory_reserved(device)))
