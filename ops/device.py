"""What a launch needs to know of its device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# What one program may use; 99 KiB on the capabilities not named (CUDA C++ Programming Guide, table 'Technical
# Specifications per Compute Capability').
SHARED_BYTES = {
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Shared memory that a program may use on GPUs of a compute capability, in bytes."""
    return SHARED_BYTES.get(capability, 99 * 1024)


@dataclass(frozen=True)
class Device:
    """Architecture ("sm_90"), shared memory a program may use in bytes, whether `launch_pdl` works (what that
    asks of a kernel: `registry.Launch`), whether tiles travel by descriptor, and the number of processors."""

    arch: str
    shared_bytes: int
    has_dependent_launch: bool
    has_copy_engine: bool
    num_processors: int


@functools.cache
def device_of(index: int | None) -> Device:
    """The CUDA device of that index; without CUDA, for the interpreter, a Hopper without what is its own: it
    runs programs one after another, and a few show all there is to show."""
    if index is None or not torch.cuda.is_available():
        return Device("sm_90", 227 * 1024, False, False, 3)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(
        f"sm_{major}{minor}",
        shared_bytes_of((major, minor)),
        major >= 9,
        major >= 9,
        torch.cuda.get_device_properties(index).multi_processor_count,
    )
