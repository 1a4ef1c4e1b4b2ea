"""Launches the products of decoded weight rows on a CPU (gluon_on_cpu.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops import left_large_m, left_launch, left_product
from compiled_mtp.ops.device import Device
from compiled_mtp.ops.moe_experts import codes
from compiled_mtp.ops.moe_experts.grouping_kernel import OPTIONS
from tests.ops import gluon_on_cpu

HOPPER = Device("sm_90", 227 * 1024, True, True, 132)
# Functions that reinterpret bits.
INSTEAD = {
    "as_float": lambda bits: bits.to(torch.int32).view(torch.float32),
    "as_bits": lambda number: number.view(torch.int32),
    "half_in": lambda word, high: (word >> 16 * high).to(torch.int16).view(torch.float16).float(),
}


class OnCpu:
    """Launches a kernel on a CPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            *args: Any,
            num_warps: int,
            launch_pdl: bool,
            enable_fp_fusion: bool,
            maxnreg: int = 0,
            **given: Any,
        ) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            gluon_on_cpu.run(self.kernel, (*grid, 1)[:2], num_warps, INSTEAD, **named, **given)

        return launch


def put_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of packed weights run the kernels of a Hopper GPU."""
    for module, name in ((left_product, "left_kernel"), (left_large_m, "left_large_m_kernel")):
        monkeypatch.setattr(module, name, OnCpu(getattr(module, name)))
    for module in (left_product, left_large_m, left_launch):
        monkeypatch.setattr(module, "device_of", lambda index: HOPPER)
    monkeypatch.setattr(left_large_m, "describe_rows", gluon_on_cpu.Descriptor)


def put_experts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experts in codes run their products here; Triton's interpreter runs the launches around them."""
    for name in ("gate_up_codes_kernel", "down_codes_kernel"):
        monkeypatch.setattr(codes, name, OnCpu(getattr(codes, name)))

    def options(x: torch.Tensor) -> dict[str, bool]:
        return {"PDL": True, "launch_pdl": True, **OPTIONS}

    monkeypatch.setattr(codes, "launch_options", options)
