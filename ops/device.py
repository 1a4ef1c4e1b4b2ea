"""The properties of a device that decide how kernels are launched."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# The shared memory that one program may use; 99 KiB for compute capabilities that are not listed (CUDA C++
# Programming Guide, table 'Technical Specifications per Compute Capability').
SHARED_BYTES = {
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a program may use on GPUs of a compute capability."""
    return SHARED_BYTES.get(capability, 99 * 1024)


@dataclass(frozen=True)
class GPU:
    """What decides how weights are stored on a GPU: its compute capability, and the bytes of its memory that
    the process may take."""

    capability: tuple[int, int]
    total_bytes: int


_ASSUMED: ContextVar[GPU | None] = ContextVar("assumed GPU", default=None)


@contextmanager
def assume(gpu: GPU | None) -> Iterator[None]:
    """Let the functions below describe another GPU, which the machine need not have; None for its own."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def is_assumed() -> bool:
    """Whether a GPU is assumed."""
    return _ASSUMED.get() is not None


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, or of the GPU that is assumed."""
    gpu = _ASSUMED.get()
    return torch.cuda.get_device_capability(device) if gpu is None else gpu.capability


def memory_of(device: torch.device) -> int:
    """Return the bytes, free or not, that this process may take of a CUDA device, or of the one assumed."""
    if (gpu := _ASSUMED.get()) is not None:
        return gpu.total_bytes
    share = torch.cuda.memory.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True)
class Device:
    """What kernels need to know of a device.

    arch: "sm_90" and alike. shared_bytes: shared memory that a program may use. has_dependent_launch: whether
    `launch_pdl` works; `registry.Launch` says what it requires of a kernel. has_copy_engine: whether kernels
    move tiles by descriptors.
    """

    arch: str
    shared_bytes: int
    has_dependent_launch: bool
    has_copy_engine: bool
    num_processors: int


@functools.cache
def device_of(index: int | None) -> Device:
    """Return the CUDA device of an index or, without CUDA, a device for Triton's interpreter.

    The interpreter's device is a Hopper without dependent launches and copy engine. It runs programs one
    after another, so that three processors are enough to test how programs share work.
    """
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
