"""How an operator reaches torch: a schema, a reference for the CPU, a launcher for CUDA, a fake for tracing.

`torch.library.Library.define/impl` is used rather than `custom_op` because a call costs 3 us instead of 11
(20 inside a compiled graph), and rather than `triton_op` because an opaque operator also compiles on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

NAMESPACE = "compiled_mtp"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Registration is process-wide in torch, so the choice of implementation is too.
_ON_REFERENCE: set[str] = set()
_OVERLOADS: dict[str, Any] = {}


def register(
    name: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    check: Callable[..., None],
    mutates: Sequence[str] = (),
    launch: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define `compiled_mtp::<name>` with the schema of `reference` and return what calls it, checked.

    `reference` runs on the CPU; `launch` runs on CUDA (`reference` when it is None). Both take the same
    arguments, mutate only the arguments named in `mutates` and return fresh tensors, which `fake` allocates
    with the same shapes, dtypes and strides. `check` raises ValueError for arguments that do not fit.
    """

    def checked_fake(*args: Any) -> Any:
        check(*args)
        return fake(*args)

    schema = torch.library.infer_schema(reference, mutates_args=tuple(mutates))
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, reference, "CPU")
    if launch is None:
        _LIBRARY.impl(name, reference, "CUDA")
    else:
        kernel = launch

        def on_cuda(*args: Any) -> Any:
            return reference(*args) if name in _ON_REFERENCE else kernel(*args)

        _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", checked_fake, lib=_LIBRARY)
    overload = _OVERLOADS[name] = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        # Traced calls are checked by the fake: Dynamo would interpret every check, which takes longer than
        # all the rest of a start from a cache.
        if not torch.compiler.is_compiling():
            check(*args)
        return overload(*args)

    return call


def overloads() -> tuple[Any, ...]:
    """Every operator registered so far, as torch calls it."""
    return tuple(_OVERLOADS.values())


def use_reference(names: Iterable[str]) -> None:
    """Put the named operators back on their reference on CUDA too, to bisect numerics without editing.

    Raises ValueError for a name that no operator has.
    """
    chosen = set(names)
    unknown = sorted(chosen - _OVERLOADS.keys())
    if unknown:
        raise ValueError(f"reference_ops must name operators, got {unknown}; known are {sorted(_OVERLOADS)}")
    _ON_REFERENCE.clear()
    _ON_REFERENCE.update(chosen)
