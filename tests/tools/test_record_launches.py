"""The recorder specialises a launch as Triton would for real arguments on each GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import tensors_of

pytest.importorskip("triton", reason="Triton exists on Linux only")

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("record_launches")


def copy(source, target, stride, one, count, BLOCK):  # type: ignore[no-untyped-def]
    """A kernel that never runs: only its arguments matter."""


@pytest.fixture
def kernel() -> Any:
    """A compiled kernel; the tests' own processes interpret those of the operators."""
    from triton.runtime.jit import JITFunction

    copy.__annotations__ = {"BLOCK": "tl.constexpr"}
    return JITFunction(copy, do_not_specialize=["count"])


def described(launch: Any) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Return types, constants by name, and the arguments that are multiples of 16."""
    names = launch.source.fn.arg_names
    constants = {names[path[0]]: value for path, value in launch.source.constants.items()}
    aligned = {names[path[0]] for path, value in launch.source.attrs.items() if value}
    return launch.source.signature, constants, aligned


def test_arguments_are_specialised_by_their_values(recorder: Any, kernel: Any) -> None:
    def call(device: torch.device) -> None:
        x = torch.empty(8, 24, dtype=torch.bfloat16, device=device)
        y = torch.empty_like(x, dtype=torch.float32)
        kernel[(1,)](x[1, 1:], y[2], 2 * x.stride(0), 1, 32, BLOCK=64, num_warps=2, num_stages=5)
        kernel[(1,)](x[2], None, x.stride(0), 2, 2**40, BLOCK=64)

    first, second = recorder.record(call, 90)
    signature, constants, aligned = described(first)
    assert [signature[name] for name in ("source", "target", "stride", "count")] == [
        "*bf16",
        "*fp32",
        "i32",
        "i32",
    ]
    assert constants == {"one": 1, "BLOCK": 64}
    # x[1, 1:] begins at 50 bytes, y[2] at 192; count is not specialised.
    assert aligned == {"target", "stride"}
    assert (first.options.num_warps, first.options.num_stages) == (2, 5)
    signature, constants, aligned = described(second)
    assert signature["count"] == "i64"
    assert constants == {"target": None, "BLOCK": 64}
    assert aligned == {"source"}
    assert first.key != second.key


def test_equal_launches_have_equal_keys(recorder: Any, kernel: Any) -> None:
    def call(device: torch.device) -> None:
        for rows in (3, 5):
            x = torch.empty(rows, 32, device=device)
            kernel[(rows,)](x, x, rows, 1, 1, BLOCK=64)

    first, second = recorder.record(call, 90)
    assert first.key == second.key


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_an_operator_sees_the_faked_gpu(
    recorder: Any, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("compiled_mtp.ops.silu_mul.kernel")
    seen: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: seen.append((grid, args, options))

    monkeypatch.setattr(module, "silu_mul_kernel", Kernel())

    def call(device: torch.device) -> None:
        (out,) = tensors_of(silu_mul(torch.empty(4, 256, dtype=torch.bfloat16, device=device)))
        assert out.shape == (4, 128)
        assert out.is_cuda
        assert out.device == device

    recorder.record(call, capability)
    ((grid, args, options),) = seen
    assert grid[0] == 4
    assert all(argument.is_cuda for argument in args[:2])
    assert options["PDL"] == options["launch_pdl"] == (capability >= 90)


def test_arguments_that_do_not_fit_are_refused(recorder: Any) -> None:
    def call(device: torch.device) -> None:
        linear(torch.empty(4, 32, device=device), torch.empty(8, 64, device=device))

    with pytest.raises(ValueError, match="rows as long as the weight's"):
        recorder.record(call, 90)


def test_recording_leaves_torch_and_triton_as_they_were(recorder: Any, kernel: Any) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = (torch.cuda.is_available, JITFunction.run, JITFunction._do_compile, driver._active)

    def call(device: torch.device) -> None:
        raise RuntimeError("in a call")

    with pytest.raises(RuntimeError, match="in a call"):
        recorder.record(call, 90)
    assert (torch.cuda.is_available, JITFunction.run, JITFunction._do_compile, driver._active) == before
    assert torch.empty(1).device.type == "cpu"
