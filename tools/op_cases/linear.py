"""Cases of `linear`, `linear_silu_mul` and `linear_partials`: all projections of a decode step and the head.

With --set prefill=1 the projections of a prompt's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.linear import count_partials, linear, linear_partials, linear_side, linear_silu_mul
from compiled_mtp.ops.linear.config import NAMED_DTYPES, read_table
from compiled_mtp.ops.linear.large_m_config import read_large_m_table
from compiled_mtp.ops.linear.resident_config import read_resident_table
from compiled_mtp.ops.silu_mul import silu_mul
from op_cases import (
    BF16,
    FP8,
    FP8_CAPABILITY,
    FP32,
    ROWS,
    SHAPES,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    dtype_label,
    tensor,
)

# The products whose split-K partials a norm adds up, and the one whose gate and up halves are multiplied.
BEFORE_NORM = ("gdn_out", "o", "down")
GATE_UP = "gate|up"
HEAD_ROWS = SHAPES["27b"].vocab


def projections(shape: ModelShape, fp8: bool = False) -> dict[str, tuple[int, int]]:
    """Return (N, K) of each merged weight, or with `fp8` of those that an FP8 release stores in FP8.

    In an FP8 release b|a is a product of its own, in bfloat16.
    """
    key = shape.linear_key_heads * shape.linear_head_dim
    value = shape.linear_value_heads * shape.linear_head_dim
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gates = 0 if fp8 else 2 * shape.linear_value_heads
    weights = {
        "qkvz" if fp8 else "qkvz|ba": (2 * key + 2 * value + gates, shape.hidden),
        "gdn_out": (shape.hidden, value),
        "q|k|v": (2 * query + 2 * kv, shape.hidden),
        "o": (shape.hidden, query),
    }
    if shape.intermediate:
        weights["gate|up"] = (2 * shape.intermediate, shape.hidden)
        weights["down"] = (shape.hidden, shape.intermediate)
    if not fp8:
        if shape.experts:
            weights["router"] = (shape.experts + 1, shape.hidden)
        weights["mtp_fc"] = (shape.hidden, 2 * shape.hidden)
        weights["lm_head"] = (shape.vocab, shape.hidden)
    return weights


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    whole: tuple[int, int] = (0, 0),
    resident: bool = False,
    scale: torch.Tensor | None = None,
    prefill: bool = False,
) -> torch.Tensor:
    """Call the operator of a kind.

    kind: "product" (linear), "logits" (linear in float32), "gated" (linear_silu_mul), "partsN"
    (linear_partials with N partials; "parts" for the fastest number) or "side" (linear_side). whole: N and K
    of the whole weight, if `weight` is a shard of it.
    """
    if kind == "gated":
        return linear_silu_mul(x, weight, scale, *whole, resident)
    if kind.startswith("parts"):
        count = int(kind.removeprefix("parts") or count_partials(weight, x.shape[0]))
        return linear_partials(x, weight, scale, count, *whole, resident=resident)
    if kind == "side":
        return linear_side(x, weight)
    return linear(x, weight, scale, kind == "logits", prefill, *whole, resident)


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    name: str = "",
    is_prefill: bool = False,
) -> torch.Tensor:
    """Run the product as a layer does: gate|up with silu_mul, products before a norm as split-K partials."""
    kind = "parts" if name in BEFORE_NORM else "gated" if name == GATE_UP else "product"
    kind = "product" if is_prefill else kind
    return multiply(x, weight, kind, scale=weight_scale, prefill=is_prefill)


def check(args: tuple[Any, ...], name: str = "", is_prefill: bool = False) -> None:
    x, weight, scale = args
    got, whole = call(x, weight, scale, name, is_prefill), linear.reference(x, weight, scale)
    wanted = silu_mul(whole) if name == GATE_UP and not is_prefill else whole
    error = relative_error(got.double().sum(0) if got.dim() == 3 else got, wanted.double())
    assert error < 5e-3, f"relative error {error:.1e} against the reference"


def cublas(x: torch.Tensor, weight: torch.Tensor, weight_scale: None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def make_inputs(
    device: str, seed: int, rows: int, n: int, k: int, fp8: bool
) -> tuple[torch.Tensor | None, ...]:
    source = Source(device, seed)
    x, weight = source.normal(rows, k, dtype=BF16), source.normal(n, k, dtype=BF16)
    if not fp8:
        return x, weight * k**-0.5, None
    scale = source.uniform(-(-n // 128), -(-k // 128)) * 1e-3 + 1e-4
    return x, (weight * 50).to(torch.float8_e4m3fn), scale


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return the projections in bf16, then unless --set fp8=0 those that an FP8 release stores in FP8."""
    is_prefill = bool(settings.get("prefill", 0))
    result = []
    for fp8 in (False, True) if settings.get("fp8", 1) else (False,):
        for name, (n, k) in projections(shape, fp8).items():
            way: dict[str, Any] = {"name": name, "is_prefill": is_prefill}
            result.append(
                OpCase(
                    label=f"{name} {n}x{k} {'fp8' if fp8 else 'bf16'}" + " prefill" * is_prefill,
                    make_inputs=functools.partial(make_inputs, rows=rows, n=n, k=k, fp8=fp8),
                    call=functools.partial(call, **way),
                    bytes_moved=n * k * (1 if fp8 else 2) + 2 * rows * (n + k),
                    check=functools.partial(check, **way),
                    alternative=None if fp8 else cublas,
                    alternative_name="none" if fp8 else "cuBLAS",
                )
            )
    return result


def product(
    device: torch.device,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    kind: str,
    prefill: bool = False,
    gap: int = 0,
    whole: tuple[int, int] = (0, 0),
    resident: bool = False,
) -> None:
    """Call `multiply` on tensors without data.

    gap: elements between two rows; with 1 the rows have no tensor descriptor.
    """
    x = tensor(device, rows, k + gap, dtype=FP32 if dtype == FP32 else BF16)[:, :k]
    weight = tensor(device, n, k, dtype=dtype)
    scale = tensor(device, -(-n // 128), -(-k // 128)) if dtype == FP8 else None
    multiply(x, weight, kind, whole, resident, scale, prefill)


def launches(capability: int) -> Iterator[LaunchCase]:
    """Yield each kind of product at each tile height, then each measured weight of this GPU."""
    for n, k, dtype in (
        (34816, 5120, BF16),
        (5120, 6144, BF16),
        (1024, 3584, BF16),
        (34816, 5120, FP8),
        (2560, 9216, FP8),
        (1024, 2048, FP32),
        # In no measured table: the rule chooses the tile.
        (8192, 3072, BF16),
        (8192, 3072, FP8),
    ):
        name = f"{n}x{k}-{dtype_label(dtype)}"
        for rows in (4, 20, 50, 100):
            shape = functools.partial(product, rows=rows, n=n, k=k, dtype=dtype)
            kinds = ["product", *(["gated"] if n == 34816 else []), *(["parts"] if k > n else [])]
            for kind in kinds:
                label = f"{kind}-{name}-{rows}"
                yield LaunchCase(
                    label, functools.partial(shape, kind=kind), FP8_CAPABILITY if dtype == FP8 else 80
                )
                if dtype == BF16 and rows != 4:
                    without = functools.partial(shape, kind=kind, gap=1)
                    yield LaunchCase(f"{label}-unaligned", without)
            if dtype == FP8 and rows == 100:
                call = functools.partial(shape, kind="product", prefill=True)
                yield LaunchCase(f"prefill-{name}-{rows}", call, FP8_CAPABILITY)
    for n, k in ((34816, 5120), (2560, 9216), (2560, 2560)):
        for rows in (40, 512, 2048):
            call = functools.partial(product, rows=rows, n=n, k=k, dtype=BF16, kind="product", prefill=True)
            yield LaunchCase(f"prefill-{n}x{k}-{rows}", call)
    # The router's rows do not start at multiples of 16 bytes.
    router = functools.partial(product, rows=512, n=257, k=2048, dtype=BF16, kind="logits", prefill=True)
    yield LaunchCase("prefill-logits-257x2048", router)
    # b|a of 27B's FP8 release, and of a model in float32.
    for rows, dtype in ((4, BF16), (128, BF16), (4, FP32)):
        call = functools.partial(product, rows=rows, n=96, k=5120, dtype=dtype, kind="side")
        yield LaunchCase(f"side-96x5120-{dtype_label(dtype)}-{rows}", call)
    # The MTP layer's fc and a product before a norm: programs share tiles, tiles have two strips.
    for rows, n, k, kind in (
        (128, 5120, 10240, "product"),
        (200, 5120, 10240, "product"),
        (200, 5120, 6144, "parts2"),
    ):
        call = functools.partial(product, rows=rows, n=n, k=k, dtype=BF16, kind=kind)
        yield LaunchCase(f"shared-{n}x{k}-{kind}-{rows}", call)
    yield from large_m_cases()
    yield from resident_cases()
    for entry in read_table().get(f"sm_{capability}", {}):
        size, dtype_text = entry.split()
        n, k = map(int, size.split("x"))
        # The head and the router give float32.
        kind = "logits" if n in (HEAD_ROWS, 257) else "product"
        dtype = NAMED_DTYPES[dtype_text]
        call = functools.partial(product, rows=ROWS, n=n, k=k, dtype=dtype, kind=kind)
        yield LaunchCase(f"{kind}-{size}-{dtype_text}", call, FP8_CAPABILITY if dtype == FP8 else 80)


def large_m_cases() -> Iterator[LaunchCase]:
    """Yield each measured large-M product at each tile height and with many rows, the head, and shards."""
    products: dict[str, tuple[int, ...]] = dict.fromkeys(read_large_m_table(), (20, 100, 200, 1000))
    more = (f"{HEAD_ROWS}x5120 logits", "5120x2176 parts1", "4352x5120 gated")
    products |= dict.fromkeys(more, (20, 100))
    for name, heights in products.items():
        size, kind = name.split()
        n, k = map(int, size.split("x"))
        whole = {"5120x2176": (0, 17408), "4352x5120": (34816, 0)}.get(size, (0, 0))
        for rows in heights:
            call = functools.partial(product, rows=rows, n=n, k=k, dtype=BF16, kind=kind, whole=whole)
            yield LaunchCase(f"large-m-{size}-{kind}-{rows}", call)


def resident_cases() -> Iterator[LaunchCase]:
    """Yield each product whose weight is resident, at both tile heights."""
    for name in read_resident_table():
        size, kind = name.split()
        n, k = map(int, size.split("x"))
        for rows in (4, 12):
            call = functools.partial(product, rows=rows, n=n, k=k, dtype=BF16, kind=kind, resident=True)
            yield LaunchCase(f"resident-{size}-{kind}-{rows}", call)
