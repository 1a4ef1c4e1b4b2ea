"""What kernels read before they wait is older than the last fence (`ops/device.py`), throughout a step.

A race between two launches would show on a GPU only, and there perhaps once in a million steps. So the order
is checked: which arguments a kernel touches early is read from its source, and when they were written from a
step that is recorded operator by operator. Kernels of torch and of Inductor, which are fences, count as none
here: they may be fused or moved.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_mtp.ops.registry import NAMESPACE
from tests import tiny

OPS = Path(__file__).parents[1] / "ops"
# The launches of an operator in decode, by kernel. In prefill some take a kernel that is a plain launch, or
# one of torch's: what holds for these holds for those.
LAUNCHES = {
    "linear": ("linear_kernel",),
    "linear_parts": ("linear_kernel",),
    "linear_silu_mul": ("linear_kernel",),
    "rms_norm": ("rms_norm_kernel",),
    "add_rms_norm": ("add_rms_norm_kernel",),
    "pair_norm": ("pair_norm_kernel",),
    "spec_conv1d": ("spec_conv1d_kernel",),
    "gdn_verify": ("gdn_verify_kernel", "gated_norm_kernel"),
    "qk_norm_rope_kv_write": ("qk_norm_rope_kv_write_kernel",),
    "paged_attention": ("verify_kernel", "combine_kernel"),
    "silu_mul": ("silu_mul_kernel",),
    "sample": ("tile_kernel", "finish_kernel"),
    "accept_window": ("accept_window_kernel",),
}
PLAIN = {"read_window", "moe_router", "moe_experts", "conv_prefill", "gdn_prefill"}
# Named before the wait, but only to compute an address.
ADDRESSES = {"pair_norm_kernel": {"out"}}
STORED_EARLY = {"gdn_verify_kernel": {"state"}}
NUMBERS = {"block_size", "first_key", "max_blocks", "num_requests", "part_length", "prefetch_bytes", "k", "n"}
NUMBERS |= {
    "hash_limit",
    "num_keys",
    "num_splits",
    "pairs",
    "query_len",
    "row",
    "rows",
    "window",
    "eps",
    "end",
}


@dataclass
class Kernel:
    """Whether a kernel is a fence, and the arguments that it names before it waits."""

    is_fence: bool
    early: set[str]


def calls(node: ast.AST, name: str) -> list[int]:
    return [
        call.lineno
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name
    ]


def names_before_wait(statements: list[ast.stmt]) -> set[str]:
    """Every name that these statements mention on a path that has not waited yet."""
    found: set[str] = set()
    for statement in statements:
        is_waiting = bool(calls(statement, "gdc_wait"))
        part: ast.AST = statement
        if is_waiting and isinstance(statement, ast.If):
            found |= names_before_wait(statement.body) | names_before_wait(statement.orelse)
            part = statement.test
        found |= {name.id for name in ast.walk(part) if isinstance(name, ast.Name)}
        if is_waiting:
            break
    return found


def read_kernels() -> dict[str, Kernel]:
    """Every kernel that waits for the one before it, from its source."""
    found = {}
    for path in sorted(OPS.glob("**/*.py")):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or not calls(function, "gdc_wait"):
                continue
            waits, triggers = calls(function, "gdc_wait"), calls(function, "gdc_launch_dependents")
            given = {argument.arg for argument in function.args.args if argument.annotation is None}
            strides = {name for name in given if name.endswith("_stride")}
            early = names_before_wait(function.body) & (given - strides - NUMBERS)
            found[function.name] = Kernel(bool(triggers) and min(triggers) > max(waits), early)
    return found


KERNELS = read_kernels()


@dataclass
class Recorder(TorchDispatchMode):
    """Numbers launches; remembers by storage which launch has written and which has read it last."""

    launches: int = 0
    fence: int = -1
    checked: int = 0
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive.append((args, result))  # an address must not be given out twice
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        namespace, _, name = func._schema.name.partition("::")
        # Dispatch leaves out what has its default value.
        given = {a.name: None for a in func._schema.arguments}
        given |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        mutated = {a.name for a in func._schema.arguments if a.is_write}
        if namespace != NAMESPACE:
            self.launches += not func.is_view
            for value in (*outputs, *(given[name] for name in mutated)):
                if isinstance(value, torch.Tensor) and (mutated or not func.is_view):
                    self.written[place(value)] = self.launches
            return result
        assert name in LAUNCHES or name in PLAIN, f"{name}: say how it is launched"
        if name in PLAIN:
            self.launches += 1
            self.fence = self.launches
        for kernel in LAUNCHES.get(name, ()):
            self.launches += 1
            self.check(name, kernel, given)
            if KERNELS[kernel].is_fence:
                self.fence = self.launches
        for value in given.values():
            if isinstance(value, torch.Tensor):
                self.read[place(value)] = self.launches
        for value in (*outputs, *(given[name] for name in mutated)):
            if isinstance(value, torch.Tensor):
                self.written[place(value)] = self.launches
        return result

    def check(self, name: str, kernel: str, given: dict[str, Any]) -> None:
        """The launch numbered `launches` touches early only what is older than the last fence."""
        for argument in KERNELS[kernel].early - ADDRESSES.get(kernel, set()):
            value = given[argument]
            if not isinstance(value, torch.Tensor):
                continue
            self.checked += 1
            uses = {"written": self.written.get(place(value), -2)}
            if argument in STORED_EARLY.get(kernel, set()):
                uses["read"] = self.read.get(place(value), -2)
            for use, launch in uses.items():
                if launch >= self.fence:
                    self.wrong.append(f"{name}: {argument} was {use} by launch {launch}, fence {self.fence}")


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_the_kernels_that_wait_are_those_that_are_checked() -> None:
    assert {kernel for kernels in LAUNCHES.values() for kernel in kernels} == KERNELS.keys()
    assert {name for name, kernel in KERNELS.items() if kernel.is_fence} == {
        "linear_kernel",
        "gated_norm_kernel",
    }
    assert KERNELS["add_rms_norm_kernel"].early == {"weight", "residual", "kept_rows"}
    assert KERNELS["linear_kernel"].early == {"weight"}
    assert KERNELS["silu_mul_kernel"].early == set()
    # In both of its branches.
    assert KERNELS["pair_norm_kernel"].early == {"embedding_weight", "hidden_weight", "out"}


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("mtp_step", [0, 1, 3])
def test_what_is_read_early_is_older_than_the_last_fence(family: str, mtp_step: int) -> None:
    config = tiny.tiny_config(**(tiny.MOE if family == "moe" else {}))
    step = tiny.build_step(config, mtp_step)
    recorder = Recorder()
    for slot in (1, 2):
        tiny.admit(step, slot, seed=slot, temperature=0.0)
    with recorder:
        for slot in (1, 2):
            tiny.prefill(step, slot, list(range(70)))
        # A second round follows the first without anything between.
        for _ in range(2):
            tiny.decode(step, [1, 2, 0])
    assert recorder.wrong == []
    assert recorder.checked > 100


def test_the_check_can_fail() -> None:
    x, weight, matrix = torch.randn(3, 8), torch.randn(8), torch.randn(8, 8)
    with Recorder() as recorder:
        add_norm = torch.ops.compiled_mtp.add_rms_norm.default
        _, residual = add_norm(x, x, weight, 1e-6)
        add_norm(x, residual, weight, 1e-6)
    assert recorder.wrong == ["add_rms_norm: residual was written by launch 1, fence -1"]
    with Recorder() as recorder:
        add_norm(x, x * 2, weight, 1e-6)
    assert recorder.wrong == ["add_rms_norm: residual was written by launch 1, fence -1"]
    with Recorder() as recorder:
        _, residual = add_norm(x, x, weight, 1e-6)
        made = torch.ops.compiled_mtp.linear.default(x, matrix, None, False, False)
        add_norm(made, residual, weight, 1e-6)
    assert recorder.wrong == []
