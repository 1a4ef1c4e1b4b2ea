"""Runs the Python code of `gdn_many_kernel` on a CPU, in the place of `gdn_verify` (gluon_on_cpu)."""

from __future__ import annotations

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from compiled_mtp.ops.gdn_math import gated_norm
from compiled_mtp.ops.gdn_verify import gdn_verify, many_kernel
from compiled_mtp.ops.signature import Signature
from tests.ops.gluon_on_cpu import as_pointer, names_of
from tests.ops.persistent_on_cpu import PersistentProgram, Tiles


class ManyProgram(PersistentProgram):
    """One program's view."""

    def gl(self) -> SimpleNamespace:
        more = {
            "broadcast": torch.broadcast_tensors,
            "sum": lambda values, axis=None: values.sum() if axis is None else values.sum(axis),
            "where": lambda condition, a, b: torch.where(*map(torch.as_tensor, (condition, a, b))),
        }
        return SimpleNamespace(**vars(super().gl()) | more)


class Kernel:
    """Stands in for the kernel: a launch runs its programs on the CPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            function = self.kernel.fn
            names = list(inspect.signature(function).parameters)
            given = dict(zip(names, args, strict=False))
            given |= {name: value for name, value in options.items() if name in names}
            for first in range(grid[0]):
                program = ManyProgram((first, 0), (grid[0], 1))
                own = names_of(many_kernel)
                for name, value in dict(own).items():
                    device = getattr(value, "fn", None)
                    if isinstance(device, FunctionType):
                        own[name] = FunctionType(device.__code__, own, name, device.__defaults__)
                own |= {
                    "gl": program.gl(),
                    "mbarrier": program.mbarrier(),
                    "copy_tile": program.copy_tile,
                    "copy_numbers": program.copy_numbers,
                    "async_copy": SimpleNamespace(
                        commit_group=program.commit_group, wait_group=program.wait_group
                    ),
                    "fence_async_shared": lambda: None,
                    "wait_for_warps": lambda: None,
                    "gdc_wait": program.wait,
                    "gdc_launch_dependents": lambda: None,
                }
                # No kernel before writes states.
                tensors = {
                    name: Tiles(value, True) if hasattr(value, "block_shape") else as_pointer(value)
                    for name, value in given.items()
                }
                FunctionType(function.__code__, own, function.__name__)(**tensors)

        return launch


def verify(*args: Any, **more: Any) -> torch.Tensor:
    """Do what `gdn_verify` does, by the kernel of many requests."""
    given: Any = Signature(gdn_verify.reference).bound(*args, **more)
    out = torch.full_like(given.v, torch.nan)
    many_kernel.launch_many(given, out)
    return gated_norm(out, given.z, given.norm_weight, given.eps, given.gate_activation)
