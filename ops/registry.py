"""Registers operators with torch, each from one annotated specification.

Registration goes through `torch.library.Library.define/impl`. With `custom_op` a call would cost 11 us (20
inside a compiled graph) instead of 3. With `triton_op` an operator is not opaque and cannot compile on a CPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from compiled_mtp.ops.compile_ahead import is_compiling_ahead, zeroed
from compiled_mtp.ops.signature import Signature

NAMESPACE = "compiled_mtp"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Registration is process-wide in torch, so the choice of implementation is too.
_ON_REFERENCE: set[str] = set()
_OPERATORS: dict[str, Operator[..., Any]] = {}
# Overloads that `operator` did not make: those of the communicator.
_OTHER_OVERLOADS: list[Any] = []
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Launch:
    """A kernel that an operator launches with `launch_pdl`, so that it may start while the one before runs.

    Each of its programs executes `gdc_wait()` on every path: kernels take the end of one kernel for the end
    of all earlier ones. Before the wait, a program touches nothing that another kernel writes or reads,
    except the operator's arguments `reads_early` and `stores_early`: their writers and readers must precede
    the last fence before this kernel. early_if: the argument of the operator that must be true for this; else
    programs wait first. reads_own: what it also reads then, written by a launch of the same call that
    precedes a fence of the same call. waits_first: programs of this operator always wait first.

    A fence is a kernel that is launched without `launch_pdl`, or one with `is_fence`, which waits before it
    executes `gdc_launch_dependents()`. A kernel after a fence starts only when everything before the fence
    (not the fence itself) is complete. tests/step/test_fences.py compares this with the kernel's source, and
    checks the order of a whole step.
    """

    kernel: str
    reads_early: tuple[str, ...] = ()
    stores_early: tuple[str, ...] = ()
    is_fence: bool = False
    early_if: str = ""
    reads_own: tuple[str, ...] = ()
    waits_first: bool = False


class Operator(Generic[P, R]):
    """What `operator` makes: a function with these attributes.

    reference: the specification. launch: calls the kernel directly, on any device. launches: the kernels
    launched with `launch_pdl`; empty if there are none. resident_launches: those of a call with `resident`
    true and at most NARROW_ROWS rows.
    """

    reference: Callable[P, R]
    launch: Callable[P, R]
    launches: tuple[Launch, ...]
    resident_launches: tuple[Launch, ...]
    overload: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError


def operator(
    *,
    mutates: tuple[str, ...] = (),
    launches: tuple[Launch, ...] = (),
    resident_launches: tuple[Launch, ...] | None = None,
    check: Callable[..., None] | None = None,
    fake: Callable[..., Any] | None = None,
    has_cpu_route: bool = False,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Register an annotated specification as `compiled_mtp::<name>`; models call the function returned.

    The specification is a function of `ops/<folder>/reference.py`. On CUDA the folder's kernel.py runs,
    imported at first use: `launch(args)` if the operator has the folder's name, else `launch_<name>(args)`,
    with a NamedTuple of the arguments. On a CPU the specification itself runs or, with `has_cpu_route`, the
    function of the same name in cpu.py; outside tracing and dispatch modes the call bypasses torch's
    dispatcher. Implementations mutate only the arguments in `mutates` and return fresh tensors.

    Each call is checked against the annotations (ops/signature.py) and by `check`, which raises ValueError
    for any rule other than shape, dtype and layout. `fake` allocates results whose shape or dtype depends on
    a value. The parameters of `check` and `fake` name the arguments and dimensions that they need.
    """

    def register(function: Callable[P, R]) -> Operator[P, R]:
        specification: Callable[..., Any] = function
        signature, name = Signature(function), function.__name__
        package = function.__module__.rpartition(".")[0]
        is_own_folder = package.rpartition(".")[2] == name

        @functools.cache
        def kernel() -> Callable[..., Any]:
            # Imported here: without a GPU, Triton need not be installed.
            entry = "launch" if is_own_folder else f"launch_{name}"
            return cast(Callable[..., Any], getattr(importlib.import_module(f"{package}.kernel"), entry))

        @functools.cache
        def cpu_route() -> Callable[..., Any]:
            if not has_cpu_route:
                return specification
            return cast(Callable[..., Any], getattr(importlib.import_module(f"{package}.cpu"), name))

        def on_cpu(*flat: Any) -> Any:
            return cpu_route()(*(nest(*flat) if signature.records else flat))

        def on_cuda(*flat: Any) -> Any:
            if name in _ON_REFERENCE:
                return specification(*nest(*flat))
            result = kernel()(nest(*flat))
            return zeroed(result) if is_compiling_ahead() else result

        _LIBRARY.define(signature.schema(mutates))
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        call, made_fake, nest = signature.functions(overload, cpu_route, check, fake)
        plain = not (signature.records or has_cpu_route)
        _LIBRARY.impl(name, function if plain else on_cpu, "CPU")
        _LIBRARY.impl(name, on_cuda, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", made_fake, lib=_LIBRARY)
        made = cast(Operator[P, R], functools.update_wrapper(call, function))
        del made.__wrapped__  # type: ignore[attr-defined]
        made.reference = function
        made.launch = lambda *args, **kwargs: kernel()(signature.bound(*args, **kwargs))
        made.launches = launches
        made.resident_launches = launches if resident_launches is None else resident_launches
        made.overload = overload
        _OPERATORS[name] = made
        return made

    return register


def operators() -> dict[str, Operator[..., Any]]:
    """Return every operator registered so far, by name."""
    return dict(_OPERATORS)


def overloads() -> tuple[Any, ...]:
    """Return torch's overloads of every operator registered so far, and those given to `add_overload`."""
    return (*(made.overload for made in _OPERATORS.values()), *_OTHER_OVERLOADS)


def add_overload(overload: Any) -> None:
    """Add an overload that `operator` did not make, for compilers to call like the others."""
    _OTHER_OVERLOADS.append(overload)


def use_reference(names: Iterable[str]) -> None:
    """Run the named operators, and no others, by their reference on CUDA, to bisect numerics without editing.

    Raises ValueError for an unknown name.
    """
    chosen = set(names)
    unknown = sorted(chosen - _OPERATORS.keys())
    if unknown:
        raise ValueError(f"reference_ops must name operators, got {unknown}; known are {sorted(_OPERATORS)}")
    _ON_REFERENCE.clear()
    _ON_REFERENCE.update(chosen)
