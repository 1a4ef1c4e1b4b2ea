"""Cases of `linear_w4a16`, `linear_w4a16_silu_mul` and `linear_w4a16_partials`.

The products whose weights a four-bit checkpoint stores as codes; --set group=32 or 64 for smaller groups,
--set prefill=1 for a prompt's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from compiled_mtp.ops.coded_weight import count_partials
from compiled_mtp.ops.int4 import dequantize, pack_groups
from compiled_mtp.ops.linear_w4a16 import (
    linear_w4a16,
    linear_w4a16_partials,
    linear_w4a16_silu_mul,
)
from compiled_mtp.ops.numerics import silu
from op_cases import BF16, INT16, LaunchCase, ModelShape, OpCase, tensor
from op_cases.linear import BEFORE_NORM, GATE_UP, projections, relative_error

MAX_RELATIVE_ERROR = 4e-3


def make_inputs(device: str, seed: int, rows: int, n: int, k: int, group: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, device=device, generator=generator).to(BF16)
    weight = torch.empty(n, k // 4, dtype=INT16, device=device)
    weight.random_(-(1 << 15), 1 << 15, generator=generator)
    scales = torch.rand(n, k // group, device=device, generator=generator) * 0.01 + 0.001
    zeros = torch.randint(0, 16, scales.shape, device=device, generator=generator)
    return x, weight, pack_groups(scales.half(), zeros)


def call(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kind: str, prefill: bool
) -> torch.Tensor:
    if kind == "gated" and not prefill:
        return linear_w4a16_silu_mul(x, weight, scale)
    if kind == "parts":
        count = 1 if prefill else count_partials(weight, x.shape[1])
        return linear_w4a16_partials(x, weight, scale, count, 0, prefill)
    return linear_w4a16(x, weight, scale, False, prefill)


def check(args: tuple[torch.Tensor, ...], kind: str, prefill: bool) -> None:
    x, weight, scale = args
    got = call(x, weight, scale, kind, prefill).double()
    exact = x.double() @ dequantize(weight, scale).double().T
    if kind == "gated" and not prefill:
        gate, up = exact.chunk(2, -1)
        exact = silu(gate) * up
    error = relative_error(got.sum(0) if kind == "parts" else got, exact)
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.1e}"


def cublas(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Run the product in bfloat16, which reads four times the bytes."""
    return x @ _values(weight, scale).T


@functools.lru_cache(maxsize=1)
def _values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize(weight, scale).to(BF16)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return one case per weight, with partials if a norm follows the product."""
    group, prefill = settings.get("group", 128), bool(settings.get("prefill", 0))
    result = []
    for name, (n, k) in projections(shape, True).items():
        kind = "parts" if name in BEFORE_NORM else "gated" if name == GATE_UP else "product"
        result.append(
            OpCase(
                label=f"{name} {n}x{k}",
                make_inputs=functools.partial(make_inputs, rows=rows, n=n, k=k, group=group),
                call=functools.partial(call, kind=kind, prefill=prefill),
                bytes_moved=n * k // 2 + n * k // group * 4 + rows * 2 * (k + n),
                check=functools.partial(check, kind=kind, prefill=prefill),
                alternative=cublas,
                alternative_name="cuBLAS, bfloat16",
            )
        )
    return result


def w4a16_product(
    device: torch.device, rows: int, n: int, k: int, kind: str, group: int = 128, prefill: bool = False
) -> None:
    """Call a product on tensors without data."""
    x = tensor(device, rows, k, dtype=BF16)
    weight, scale = (
        tensor(device, n, k // 4, dtype=INT16),
        tensor(device, k // group, n, 2, dtype=torch.float16),
    )
    if kind == "gated":
        linear_w4a16_silu_mul(x, weight, scale)
    elif kind.startswith("parts"):
        linear_w4a16_partials(x, weight, scale, int(kind.removeprefix("parts")), 0, prefill)
    else:
        linear_w4a16(x, weight, scale, False, prefill)


def launches(capability: int) -> Iterator[LaunchCase]:
    """Yield each tile height whole, gated and with each number of partials, and each group size."""
    for rows in (4, 12, 20, 50, 100):
        for n, k, kinds in (
            (34816, 5120, ("product", "gated")),
            (5120, 17408, ("parts1", "parts4", "parts8")),
        ):
            for kind in kinds:
                call = functools.partial(w4a16_product, rows=rows, n=n, k=k, kind=kind)
                yield LaunchCase(f"{n}x{k}-{kind}-{rows}", call)
    for group in (32, 64):
        call = functools.partial(w4a16_product, rows=4, n=2048, k=1024, kind="product", group=group)
        yield LaunchCase(f"2048x1024-g{group}-4", call)
        call = functools.partial(w4a16_product, rows=100, n=1024, k=2048, kind="parts8", group=group)
        yield LaunchCase(f"1024x2048-parts8-g{group}-100", call)
    call = functools.partial(w4a16_product, rows=256, n=2048, k=1024, kind="product", prefill=True)
    yield LaunchCase("2048x1024-prompt-256", call)
