"""The element-wise helpers do not depend on an element's index; the patched interpreter is correct."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compiled_mtp.ops.numerics import sigmoid, silu, softplus

HELPERS = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, torch.nn.functional.silu),
    "softplus": (softplus, torch.nn.functional.softplus),
}


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", HELPERS)
def test_bits_do_not_depend_on_index_or_threads(name: str, threads: int) -> None:
    helper, _ = HELPERS[name]
    values = torch.randn(37) * 8
    alone = torch.stack([helper(v.reshape(1))[0] for v in values])
    # More than 65,536 elements, so that ATen splits the work over threads at odd indices.
    many = helper(values.repeat(2003))
    assert torch.equal(many.view(2003, 37), alone.expand(2003, 37))


@pytest.mark.parametrize("name", HELPERS)
def test_equals_float64(name: str) -> None:
    helper, exact = HELPERS[name]
    x = torch.cat([torch.linspace(-90.0, 90.0, 1001), torch.tensor([0.0, 20.0, 20.001, -200.0, 200.0])])
    # Below -88, exp(-x) overflows and silu gives 0 instead of a number of at most 3e-37.
    torch.testing.assert_close(helper(x), exact(x.double()).float(), rtol=1e-6, atol=3e-37)


def _kernels() -> tuple[Callable[..., None], ...]:
    import triton
    import triton.language as tl

    @triton.jit
    def arithmetic(x, y, out, N: tl.constexpr):
        i = tl.arange(0, N)
        a = tl.load(x + i)
        b = tl.load(y + i)
        tl.store(out + i, a * b)
        tl.store(out + N + i, a + b)
        tl.store(out + 2 * N + i, tl.where(a > b, a, -b))
        tl.store(out + 3 * N + i, (a.to(tl.float32) / 3.0).to(tl.bfloat16))

    @triton.jit
    def quantize(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i).to(tl.float8e4nv))

    @triton.jit
    def dot(a, b, out, N: tl.constexpr):
        i = tl.arange(0, N)
        at = i[:, None] * N + i[None, :]
        tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at).to(tl.bfloat16)))

    return arithmetic, quantize, dot


def test_interpreter_computes_low_precision_as_torch_does(interpreter: None) -> None:
    arithmetic, quantize, dot = _kernels()
    x, y = torch.randn(2, 64).bfloat16().unbind(0)
    out = torch.full((4, 64), float("nan"), dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, out, N=64)
    wanted = torch.stack([x * y, x + y, torch.where(x > y, x, -y), (x.float() / 3.0).bfloat16()])
    assert torch.equal(out, wanted)

    wide = torch.randn(256) * torch.logspace(-3, 2.6, 256)
    fp8 = torch.zeros(256, dtype=torch.float8_e4m3fn)
    quantize[(1,)](wide, fp8, N=256)
    assert torch.equal(fp8.float(), wide.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float())

    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).to(torch.float8_e4m3fn)
    product = torch.zeros(16, 16)
    dot[(1,)](a, b, product, N=16)
    torch.testing.assert_close(product, (a.double() @ b.double()).float(), rtol=1e-6, atol=1e-6)
