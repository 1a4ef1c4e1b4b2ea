"""Test setup that must happen before any import of Triton.

Without a CUDA device the Triton kernels run in Triton's interpreter. It computes bfloat16 arithmetic, casts,
dots and e4m3 casts wrongly (it works on the raw bits), so torch computes them here. The patch is for tests
only. Only process-wide setup belongs in this file; fixtures belong beside their tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Inductor ends its workers after a minute without a job, and later forks others out of a process that has
# threads. With many engines in one process such a fork has hung; one engine compiles without a pause.
os.environ["TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"] = "0"

# `make test` draws the same examples at each run and finds what a change breaks. `make soak` uses hypothesis'
# own profile and finds older bugs. GPU tests need no hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.load_profile("repeatable")


def _patch_interpreter() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    storage = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.int8, np.uint8),
    }
    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op
    plain_fma, plain_clamp = builder.create_fma, builder.create_clampf

    def decode(value: Any) -> Any:
        """Return the numbers of a handle in a dtype that NumPy can compute with."""
        if value.dtype.scalar not in storage:
            return value.data
        dtype, signed, _ = storage[value.dtype.scalar]
        bits = torch.from_numpy(np.ascontiguousarray(value.data).view(f"i{value.data.itemsize}"))
        assert bits.dtype == signed
        return bits.view(dtype).float().numpy().reshape(value.data.shape)

    def encode(numbers: Any, scalar: Any) -> Any:
        """Return a handle of type `scalar`, rounded to nearest even; e4m3 saturates like the GPU's
        conversion."""
        dtype, signed, unsigned = storage[scalar]
        values = torch.from_numpy(np.array(numbers, dtype=np.float32, copy=True, order="C"))
        if dtype == torch.float8_e4m3fn:
            values = values.clamp(-448.0, 448.0)
        return handle(values.to(dtype).view(signed).numpy().view(unsigned).reshape(numbers.shape), scalar)

    def cast(self: Any, source: Any, target: Any, *rounding: Any) -> Any:
        scalar = target.scalar
        if source.dtype.scalar not in storage and scalar not in storage:
            return plain_cast(self, source, target)
        numbers = decode(source)
        if scalar in storage:
            return encode(numbers, scalar)
        return handle(numbers.astype(interpreter._get_np_dtype(scalar)), scalar)

    def through_float32(plain: Callable[..., Any], operands: int) -> Callable[..., Any]:
        def compute(self: Any, *args: Any) -> Any:
            values, rest = args[:operands], args[operands:]
            scalar = values[0].dtype.scalar
            if not any(v.dtype.scalar in storage for v in values):
                return plain(self, *args)
            result = plain(self, *(handle(decode(v), tl.float32) for v in values), *rest)
            if result.data.dtype == np.bool_:
                return handle(result.data, scalar)
            return encode(result.data, scalar)

        return compute

    def dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        # With products in float64, a row's bits do not depend on the BLAS kernel that the tile's shape
        # selects.
        wide = np.float64 if accumulator.data.dtype.kind == "f" else accumulator.data.dtype
        product = np.matmul(decode(a).astype(wide), decode(b).astype(wide))
        return handle(product.astype(accumulator.data.dtype) + accumulator.data, accumulator.dtype.scalar)

    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.binary_op = through_float32(plain_binary, 2)
    builder.unary_op = through_float32(plain_unary, 1)
    builder.create_fma = through_float32(plain_fma, 3)
    builder.create_clampf = through_float32(plain_clamp, 3)
    builder.create_dot = dot


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_interpreter()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
