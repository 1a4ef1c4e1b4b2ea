"""Kernels that are compiled ahead: several at a time, none launched, each found by the launches after it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_mtp.ops.compile_ahead import compiling_ahead, is_compiling_ahead, zeroed
from compiled_mtp.ops.rms_norm import rms_norm

pytest.importorskip("triton", reason="Triton exists on Linux only")
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.tools.conftest import TOOLS

ARCH = 90
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Binary:
    """A compiled kernel, which counts its loads and launches."""

    def __init__(self, constants: dict[Any, Any]) -> None:
        self.constants = constants
        self.function = self.packed_metadata = None
        self.thread = threading.current_thread()
        self.loads = self.launches = 0

    def launch_metadata(self, *_: object) -> None:
        """Return nothing, as Triton does without hooks."""

    @property
    def run(self) -> Callable[..., None]:
        self.loads += 1
        return self._launch

    def _launch(self, *_: object) -> None:
        self.launches += 1


class Compiler:
    """Takes Triton's compiler's place. Each compile waits until `together` run at once."""

    def __init__(self) -> None:
        self.made: list[Binary] = []
        self.barrier: threading.Barrier | None = None
        self.fails = False

    def __call__(self, src: Any, **_: object) -> Binary:
        if self.barrier is not None:
            self.barrier.wait(timeout=60)
        if self.fails:
            raise RuntimeError("too many registers")
        self.made.append(Binary(src.constants))
        return self.made[-1]


def scale(source, target, BLOCK):  # type: ignore[no-untyped-def]
    """A kernel that never runs: only its arguments matter."""


scale.__annotations__ = {"BLOCK": "tl.constexpr"}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.syspath_prepend(str(TOOLS))
    recorder = importlib.import_module("record_launches")
    found = Compiler()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", recorder.FakeDriver(ARCH)))
        stack.enter_context(mock.patch("triton.compiler.compile", found))
        yield found


@pytest.fixture
def kernel(compiler: Compiler) -> Any:
    return JITFunction(scale)


def launch(kernel: Any, block: int) -> None:
    pointer = SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 0)
    kernel[(1,)](pointer, pointer, BLOCK=block)


def test_kernels_compile_together_and_are_loaded_but_not_launched(compiler: Compiler, kernel: Any) -> None:
    compiler.barrier = threading.Barrier(2)
    before = JITFunction.run
    with mock.patch("os.sched_getaffinity", return_value={0, 1}), compiling_ahead():
        assert is_compiling_ahead()
        for block in (16, 32, 16, 32):
            launch(kernel, block)
    assert not is_compiling_ahead()
    assert JITFunction.run is before
    assert len(compiler.made) == 2
    assert all(binary.thread is not threading.current_thread() for binary in compiler.made)
    assert [(binary.loads, binary.launches) for binary in compiler.made] == [(1, 0), (1, 0)]
    for block in (16, 32, 32):
        launch(kernel, block)
    assert len(compiler.made) == 2
    assert sorted(binary.launches for binary in compiler.made) == [1, 2]


def test_other_threads_launch_meanwhile(compiler: Compiler, kernel: Any) -> None:
    with compiling_ahead():
        launch(kernel, 16)
        other = threading.Thread(target=launch, args=(kernel, 16))
        other.start()
        other.join()
    assert [binary.launches for binary in compiler.made] == [1]


def test_a_kernel_that_does_not_compile_is_named_at_the_end(compiler: Compiler, kernel: Any) -> None:
    compiler.fails = True
    with pytest.raises(RuntimeError, match="too many registers"), compiling_ahead():
        launch(kernel, 16)
    with pytest.raises(RuntimeError, match="too many registers"):
        launch(kernel, 16)


def test_after_an_interrupt_launches_compile_their_kernels(compiler: Compiler, kernel: Any) -> None:
    def begin() -> None:
        launch(kernel, 16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compiling_ahead():
        begin()
    assert compiler.made == []
    launch(kernel, 16)
    launch(kernel, 16)
    assert [(binary.launches, binary.thread) for binary in compiler.made] == [(2, threading.current_thread())]


def test_operators_return_zeros(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    """What a kernel would have written may be an index."""
    module = importlib.import_module("compiled_mtp.ops.rms_norm.kernel")
    monkeypatch.setattr(module, "launch", lambda args: torch.full_like(args.x, torch.nan))
    # The operator looks its kernel up once; other tests may have called it, or call it later.
    held = (cell.cell_contents for cell in rms_norm.launch.__closure__ or ())
    kernel = next(one for one in held if hasattr(one, "cache_clear"))
    kernel.cache_clear()
    try:
        call = rms_norm.overload
        x, weight = torch.ones(2, 8), torch.ones(8)
        assert call.redispatch(ON_CUDA, x, weight, 1e-6).isnan().all()
        with compiling_ahead():
            assert torch.equal(call.redispatch(ON_CUDA, x, weight, 1e-6), torch.zeros(2, 8))
    finally:
        kernel.cache_clear()


def test_every_tensor_of_a_tuple_becomes_zero(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    pair = torch.ones(2, dtype=torch.int64), None, torch.ones(3).to(torch.float8_e4m3fn)
    first, nothing, last = zeroed(pair)
    assert nothing is None
    assert not first.any()
    assert not last.float().any()
    assert zeroed(None) is None
