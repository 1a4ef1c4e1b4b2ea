"""Changes to Triton's interpreter, in which the kernels run without a CUDA device; for tests only.

It computes bfloat16 arithmetic, casts, dots and e4m3 casts wrongly (it works on the raw bits), so torch
computes them here. And it spends three quarters of its time on work whose result is always the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def compute_correctly() -> None:
    """Let torch compute what the interpreter computes wrongly."""
    storage = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.int8, np.uint8),
    }
    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op
    plain_clamp = builder.create_clampf

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

    def fma(self: Any, a: Any, b: Any, c: Any) -> Any:
        # Rounded once, except where the sum needs more than float64 has.
        wide = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
        return handle(wide.astype(a.data.dtype), a.dtype.scalar)

    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.binary_op = through_float32(plain_binary, 2)
    builder.unary_op = through_float32(plain_unary, 1)
    builder.create_fma = through_float32(fma, 3)
    builder.create_clampf = through_float32(plain_clamp, 3)
    builder.create_dot = dot


def skip_repeated_work() -> None:
    """Do once what the interpreter does at every call of a function and at every operation."""
    _patch_language_once()
    _keep_shapes()
    # It computes sums and products of integers again in 64 bits, for an assertion that only debugging checks.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    plain_dtype, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(of: core.dtype) -> np.dtype[Any]:
        name = (of.element_ty if isinstance(of, core.block_type) else of).name
        if name not in dtypes:
            dtypes[name] = plain_dtype(of)
        return dtypes[name]

    interpreter._get_np_dtype = numpy_dtype


def _patch_language_once() -> None:
    """Replace the language's functions when a launch begins, not again at each call of a `jit` function."""
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is core]
        functions = [core.tensor.__add__, *(language.load for language in languages)]
        return patch(function) if any(map(core.is_builtin, functions)) else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _keep_shapes() -> None:
    """Make the tuples of constants that describe a shape once per shape."""
    plain_type, plain_tensor = core.block_type.__init__, core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    # By the id of a shape, which the entry keeps alive.
    forms: dict[int, tuple[Any, Any, Any]] = {}

    def make_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in shapes:
            plain_type(self, element_ty, shape)
            shapes[sizes] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, text = shapes[sizes]
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if id(shape) not in forms:
            plain_tensor(self, handle, type)
            forms[id(shape)] = (shape, self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.numel, self.shape = forms[id(shape)]

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor
