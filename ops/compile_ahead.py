"""Compiles kernels several at a time, before anything launches them.

A launch compiles its kernel first, and the next launch waits for it: a start that meets hundreds of kernels
compiles them one after another. Here calls of operators ask Triton for their kernels and launch none; then
threads compile them. The compiler holds Python's lock for a part of its time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_IS_ON: ContextVar[bool] = ContextVar("kernels are compiled ahead", default=False)
# Triton's class is changed by one thread at a time.
_LOCK = threading.Lock()
# More threads only wait for Python's lock.
_MOST_THREADS = 8


class _Pending:
    """A kernel that is not compiled yet; Triton keeps it in the place of the compiled one."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        self._compile = compile_kernel
        self._kernel: Any = None
        self._lock = threading.Lock()

    def result(self) -> Any:
        """Return the compiled kernel; the first caller compiles it. Raises what the compiler raises."""
        with self._lock:
            if self._kernel is None:
                self._kernel = self._compile()
            return self._kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)


class _Compiler:
    """Takes the kernels that Triton would compile (its `AsyncCompileMode`)."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[_Pending, Callable[[Any], None]]] = {}

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], put: Callable[[Any], None], *_: object
    ) -> _Pending:
        """Return the kernel of that key, which `put` stores where Triton's next launches look for it."""
        if key not in self._pending:
            pending = _Pending(compile_kernel)
            self._pending[key] = pending, put
            # Else every launch of this kernel would form the key again.
            put(pending)
        return self._pending[key][0]

    def finish(self) -> None:
        """Compile every kernel and load it; raises what the compiler or the driver raises.

        Threads start here: beside them every call of torch would wait for Python's lock.
        """
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "compile") as threads:
            try:
                compiled = [threads.submit(pending.result) for pending, _ in self._pending.values()]
                for future, (_, put) in zip(compiled, self._pending.values(), strict=True):
                    kernel = future.result()
                    put(kernel)
                    # Triton loads a kernel at this attribute's first use; a graph capture may load nothing.
                    _ = kernel.run
            finally:
                # After an error or an interrupt, nothing waits for kernels that no thread has begun.
                threads.shutdown(cancel_futures=True)


def is_compiling_ahead() -> bool:
    """Whether this thread compiles kernels without launching them."""
    return _IS_ON.get()


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels of every call in the block, in threads after it, and launch none of them.

    Operators then return zeros, which are valid as indices too, and mutate nothing; torch's own code runs.
    Other threads launch as always. After the block all kernels are compiled and loaded. Raises what Triton
    raises for a kernel that does not compile or load.
    """
    # Imported here: without a GPU, Triton need not be installed.
    from triton.runtime._async_compile import active_mode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or _IS_ON.get(), **kwargs)

    compiler = _Compiler()
    with _LOCK:
        is_on, mode = _IS_ON.set(True), active_mode.set(compiler)
        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch
            active_mode.reset(mode)
            _IS_ON.reset(is_on)
    compiler.finish()


def zeroed(result: Any) -> Any:
    """Return an operator's result, a tensor or a tuple of tensors, filled with zeros."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    return result
