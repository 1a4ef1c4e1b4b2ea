"""Shared checks of the operator tests: opcheck, compilation, poisoned memory, row invariance, the
interpreter.

Import it as `from tests.ops.harness import ...`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

Args = tuple[Any, ...]


def clone_args(args: Sequence[Any]) -> Args:
    """Return copies of the tensors among `args`, with the same strides and gaps; tensors that share memory
    still do."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(copy, value))  # a named tuple
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        fresh = value.new_empty(0)
        fresh.set_(copies[storage.data_ptr()], value.storage_offset(), value.size(), value.stride())
        return fresh

    return tuple(copy(value) for value in args)


def flatten(args: Sequence[Any]) -> Args:
    """Return the arguments as torch sees them: named tuples become their fields."""
    return tuple(flat for arg in args for flat in (arg if isinstance(arg, tuple) else (arg,)))


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an operator's result, which is None, a tensor or a tuple of tensors."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def check_registration(op: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run torch.library.opcheck on a registered overload (`torch.ops.compiled_mtp.<name>.default`).

    It checks tracing, schema and mutation, and compares the fake's shapes, dtypes and strides with the
    result.
    """
    torch.library.opcheck(op, flatten(clone_args(args)))


def check_compiles(call: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> None:
    """Check that `call` compiles as one graph and gives the bits of the plain call, at every size in `cases`.

    Mutated arguments are compared too. The backend traces and functionalises but generates no code: every
    backend calls an opaque operator unchanged, and Inductor would take seconds per test.
    """
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for case in cases:
        plain_args, compiled_args = clone_args(case), clone_args(case)
        wanted, got = call(*plain_args), compiled(*compiled_args)
        assert_same_bits(tensors_of(got), tensors_of(wanted))
        assert_same_bits(
            [a for a in flatten(compiled_args) if isinstance(a, torch.Tensor)],
            [a for a in flatten(plain_args) if isinstance(a, torch.Tensor)],
        )


def assert_same_bits(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], what: str = "") -> None:
    """Check that two lists of tensors have equal bits; NaN equals NaN of the same bits."""
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape, f"tensor {index} {what}: shape {list(a.shape)} against {list(b.shape)}"
        assert a.dtype == b.dtype, f"tensor {index} {what}: dtype {a.dtype} against {b.dtype}"
        a_bytes, b_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
        if not torch.equal(a_bytes, b_bytes):
            rows = (a != b).reshape(a.shape[0], -1).any(1).nonzero().flatten().tolist() if a.dim() else []
            raise AssertionError(f"tensor {index} {what}: bits differ, first in rows {rows[:8]}")


def check_row_invariance(
    call: Callable[[int], Any], sizes: Iterable[int], largest: int, outputs: Sequence[int] | None = None
) -> None:
    """Check that the first M rows have the same bits for every M in `sizes` as for `largest` rows.

    `call(M)` runs the operator on the first M rows of fixed inputs, with fresh copies of the tensors that it
    mutates. `outputs` selects the results with one row per token (None: all).
    """
    wanted = tensors_of(call(largest))
    chosen = range(len(wanted)) if outputs is None else outputs
    for size in sizes:
        got = tensors_of(call(size))
        assert_same_bits([got[i] for i in chosen], [wanted[i][:size] for i in chosen], f"at {size} rows")


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Context in which torch.empty, empty_like and new_empty inside `launch()` are filled with NaN (ints:
    -77).

    The NaN shows in the result if a kernel leaves a part of its output or workspace unwritten, or reads
    memory that it did not write.
    """

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            tensor.view(torch.uint8).fill_(0xFF) if tensor.element_size() == 1 else tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(-77 if tensor.dtype.is_signed else 77)
        return tensor

    def wrap(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with (
        mock.patch.object(torch, "empty", wrap(torch.empty)),
        mock.patch.object(torch, "empty_like", wrap(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", wrap(torch.Tensor.new_empty)),
    ):
        yield


def check_launch(
    op: Any, args: Sequence[Any], *, rtol: float, atol: float, mutated: Sequence[int] = ()
) -> None:
    """Check that the kernel of `op` gives the result of its specification, with poisoned allocations.

    Runs on the device of `args`; on the CPU in Triton's interpreter. rtol, atol, mutated: see `check_equal`.
    """
    with poisoned_allocations():
        check_equal(op.launch, op.reference, args, rtol=rtol, atol=atol, mutated=mutated)


def check_equal(
    call: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float,
    atol: float,
    mutated: Sequence[int] = (),
) -> None:
    """Check that `call` gives the reference's results within rtol and atol.

    mutated: the indices of the flat arguments that both change. They are compared with the same tolerances,
    and NaN equals NaN there, so poison outside the written part must survive. Other arguments must keep their
    bits.
    """
    wanted_args, got_args = clone_args(args), clone_args(args)
    wanted, got = tensors_of(reference(*wanted_args)), tensors_of(call(*got_args))
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.stride() == b.stride(), f"output {index}: strides {a.stride()} against {b.stride()}"
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, i=index: f"output {i}: {m}")
    flat = zip(flatten(args), flatten(got_args), flatten(wanted_args), strict=True)
    for index, (value, a, b) in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            continue
        if index in mutated:
            if a.dtype == torch.float8_e4m3fn:
                a, b = a.float(), b.float()
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=index: f"argument {i}: {m}"
            )
        else:
            assert_same_bits([a], [value], f"(argument {index}, not to be mutated)")


def rel_l2(got: torch.Tensor, exact: torch.Tensor) -> float:
    """||got - exact|| / ||exact|| in float64."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())
