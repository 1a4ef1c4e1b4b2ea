"""Compiles kernels several at a time, before anything launches them.

A launch compiles its kernel first, and the next launch waits for it: a start that meets hundreds of kernels
compiles them one after another. Here a call of an operator asks Triton for its kernels and launches none, and
threads compile them. The compiler holds Python's lock for about a quarter of its time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_IS_ON: ContextVar[bool] = ContextVar("kernels are compiled ahead", default=False)
# Triton's class is changed by one thread at a time.
_LOCK = threading.Lock()


class _Pending:
    """A kernel that is being compiled; Triton keeps it in the place of the compiled one."""

    def __init__(self, compile_kernel: Callable[[], Any], threads: ThreadPoolExecutor) -> None:
        self._compile = compile_kernel
        self._future = threads.submit(compile_kernel)

    def result(self) -> Any:
        """Wait for the compiled kernel; raises what the compiler raised."""
        if self._future.cancelled():
            # An interrupt ended the block: the first launch compiles the kernel, as launches do.
            self._future = Future()
            self._future.set_result(self._compile())
        return self._future.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)


class _Compiler:
    """Takes the kernels that Triton would compile (its `AsyncCompileMode`) and compiles them in threads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._pending: dict[str, tuple[_Pending, Callable[[Any], None]]] = {}

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], put: Callable[[Any], None], *_: object
    ) -> _Pending:
        """Return the kernel of that key, which `put` stores where Triton's next launches look for it."""
        if key not in self._pending:
            pending = _Pending(compile_kernel, self._threads)
            self._pending[key] = pending, put
            # Else every launch of this kernel would form the key again.
            put(pending)
        return self._pending[key][0]

    def finish(self) -> None:
        """Wait for every kernel and load it; raises what the compiler or the driver raises."""
        for pending, put in self._pending.values():
            kernel = pending.result()
            put(kernel)
            # Triton loads a kernel at this attribute's first use; a graph capture may load nothing.
            _ = kernel.run


def is_compiling_ahead() -> bool:
    """Whether this thread compiles kernels without launching them."""
    return _IS_ON.get()


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels of every call in the block, in threads, and launch none of them.

    Operators then return zeros, which are valid as indices too, and mutate nothing; torch's own code runs.
    Other threads launch as always. All kernels are compiled and loaded when the block ends. Raises what
    Triton raises for a kernel that does not compile or load.
    """
    # Imported here: without a GPU, Triton need not be installed.
    from triton.runtime._async_compile import active_mode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or _IS_ON.get(), **kwargs)

    with _LOCK, ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as threads:
        compiler = _Compiler(threads)
        is_on, mode = _IS_ON.set(True), active_mode.set(compiler)
        JITFunction.run = run
        try:
            yield
            compiler.finish()
        finally:
            JITFunction.run = launch
            active_mode.reset(mode)
            _IS_ON.reset(is_on)
            # After an interrupt nothing waits for the kernels that no thread has begun.
            threads.shutdown(cancel_futures=True)


def zeroed(result: Any) -> Any:
    """Return an operator's result, a tensor or a tuple of tensors, filled with zeros."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    return result
