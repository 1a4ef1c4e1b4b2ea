"""Records what an operator asks Triton to compile, without a GPU, by running the operator's own `launch`.

A call runs on tensors without data that claim to lie on a GPU, and ends where Triton would start to compile.
Triton itself therefore specialises the arguments, from the sizes, strides and offsets of a real call. Only
this file uses private interfaces of torch and Triton for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from compiled_mtp.ops.registry import NAMESPACE

WARP_SIZE = 32
PROCESSORS = 132  # as on an H200; no kernel is compiled for a number of processors
# Dispatches an operator to its registration for a GPU.
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@dataclass(frozen=True)
class Launch:
    """One kernel as Triton would compile it for the arguments of a call.

    name: that of the `@triton.jit` function. key: Triton's cache key; equal keys share one binary. source:
    Triton's object of function, signature, constants and attributes (which arguments are multiples of 16).
    options: Triton's options, such as warps and stages.
    """

    name: str
    key: str
    source: Any
    options: Any
    target: GPUTarget

    def compile(self) -> Any:
        """Run the compiler; returns Triton's compiled kernel and raises what Triton raises."""
        return triton.compile(self.source, target=self.target, options=self.options.__dict__)


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor argument; storages begin at 0, aligned as those of torch."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


class OnGPU(torch.Tensor):
    """A tensor on the meta device that claims to lie on the faked GPU."""

    gpu = torch.device("cuda", 0)

    # torch declares these two as attributes of its C type.
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.gpu

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return int(self.storage_offset()) * self.element_size()


class FakeGPU(TorchFunctionMode):
    """Keeps tensors of one faked GPU on the meta device and sends the project's operators to their `launch`.

    The GPU's index is its compute capability: no cache entry of one faked GPU can serve another.
    """

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.kind = type("OnGPU", (OnGPU,), {"gpu": torch.device("cuda", capability)})

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and func.namespace == NAMESPACE:
            with self:
                return func.redispatch(ON_CUDA, *args, **given)
        is_ours = isinstance(given.get("device"), torch.device) and given["device"].type == "cuda"
        if is_ours:
            given["device"] = "meta"

        def strip(value: Any) -> Any:
            nonlocal is_ours
            if not isinstance(value, OnGPU):
                return value
            is_ours = True
            return value.as_subclass(torch.Tensor)

        with torch._C.DisableTorchFunctionSubclass():
            args, given = tree_map(strip, (args, given))
            result = func(*args, **given)
            if not is_ours:
                return result
            return tree_map(lambda v: v.as_subclass(self.kind) if isinstance(v, torch.Tensor) else v, result)


class FakeDriver:
    """Tells Triton which GPU a launch is for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP_SIZE)


@contextlib.contextmanager
def faked_cuda(capability: int) -> Iterator[None]:
    """Make torch.cuda answer as on a GPU of that compute capability."""
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=PROCESSORS)
    answers = {
        "is_available": True,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        yield


def record(call: Callable[[torch.device], object], capability: int) -> list[Launch]:
    """Return every launch of `call`, in order, on a GPU of a compute capability (major * 10 + minor).

    `call` takes the device for the tensors that it makes, which have no data. Raises what the operator
    raises, such as ValueError for arguments that do not fit.
    """
    launches: list[Launch] = []
    run = JITFunction.run

    def run_on_pointers(function: Any, *args: Any, **kwargs: Any) -> Any:
        def point(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return Pointer(value.dtype, value.data_ptr())

        return run(function, *map(point, args), **{name: point(value) for name, value in kwargs.items()})

    def keep(function: Any, key: str, *rest: Any) -> None:
        # Triton launches nothing if this returns no compiled kernel.
        signature, _, constexprs, options, attrs, _ = rest
        source = function.ASTSource(function, signature, constexprs, attrs)
        name = function.fn.__name__
        target = GPUTarget("cuda", capability, WARP_SIZE)
        launches.append(Launch(name, f"{name} {key}", source, options, target))

    with (
        faked_cuda(capability),
        mock.patch.object(driver, "_active", FakeDriver(capability)),
        mock.patch.object(JITFunction, "run", run_on_pointers),
        mock.patch.object(JITFunction, "_do_compile", keep),
        FakeGPU(capability),
    ):
        call(torch.device("cuda", capability))
    return launches
