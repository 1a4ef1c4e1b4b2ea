"""Cases of `linear_blocks`, `linear_blocks_silu_mul` and `linear_blocks_partials`: the products of weights in
scaled codes; --set kind=0 to 7 for Q4_K, Q5_K, Q6_K, Q8_0, Q4_0, IQ4_XS, NVFP4, MXFP4 (default: Q4_K),
prefill=1 for a prompt's rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from compiled_mtp.ops.blocks import KINDS, UNIT, pack_scales, values
from compiled_mtp.ops.coded_weight import count_partials
from compiled_mtp.ops.linear_blocks import (
    block_rows,
    linear_blocks,
    linear_blocks_partials,
    linear_blocks_silu_mul,
)
from compiled_mtp.ops.numerics import silu
from op_cases import BF16, INT16, INT64, LaunchCase, ModelShape, OpCase, tensor
from op_cases.linear import BEFORE_NORM, GATE_UP, projections, relative_error

MAX_RELATIVE_ERROR = 6e-3


def make_inputs(device: str, seed: int, rows: int, n: int, k: int, kind: str) -> tuple[torch.Tensor, ...]:
    generator, form = torch.Generator(device).manual_seed(seed), KINDS[kind]
    x = torch.randn(rows, k, device=device, generator=generator).to(BF16)
    weight = torch.empty(n, k // UNIT * form.words, dtype=INT16, device=device)
    weight.random_(-(1 << 15), 1 << 15, generator=generator)
    # Positive numbers of moderate size as float16, as e4m3 and as exponents.
    numbers = torch.empty(n, k // UNIT, 2 * form.fields, dtype=torch.uint8, device=device)
    least = 0x70 if kind == "MXFP4" else 0x20
    fields = numbers.random_(least, least + 9, generator=generator).view(INT16)
    factor = torch.full((n,), 0.01, device=device) if form.has_factor else None
    return x, weight, pack_scales(fields, form, factor)


def call(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kind: str, how: str, prefill: bool
) -> torch.Tensor:
    if how == "gated" and not prefill:
        return linear_blocks_silu_mul(x, weight, scale, kind)
    if how == "parts":
        count = 1 if prefill else count_partials(weight, x.shape[1])
        return linear_blocks_partials(x, weight, scale, kind, count, 0, prefill)
    return linear_blocks(x, weight, scale, kind, False, prefill)


def check(args: tuple[torch.Tensor, ...], kind: str, how: str, prefill: bool) -> None:
    x, weight, scale = args
    got = call(x, weight, scale, kind, how, prefill).double()
    exact = x.double() @ values(weight, scale, KINDS[kind]).double().T
    if how == "gated" and not prefill:
        gate, up = exact.chunk(2, -1)
        exact = silu(gate) * up
    error = relative_error(got.sum(0) if how == "parts" else got, exact)
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.1e}"


def cublas(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """In bfloat16."""
    return x @ _values(weight, scale, kind).T


@functools.lru_cache(maxsize=1)
def _values(weight: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    return values(weight, scale, KINDS[kind]).to(BF16)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """One a weight; partials for the norm that follows where there is one."""
    kind, prefill = tuple(KINDS)[settings.get("kind", 0)], bool(settings.get("prefill", 0))
    result = []
    for name, (n, k) in projections(shape, True).items():
        how = "parts" if name in BEFORE_NORM else "gated" if name == GATE_UP else "product"
        result.append(
            OpCase(
                label=f"{name} {n}x{k} {kind}",
                make_inputs=functools.partial(make_inputs, rows=rows, n=n, k=k, kind=kind),
                call=functools.partial(call, kind=kind, how=how, prefill=prefill),
                bytes_moved=int(n * k * KINDS[kind].bits_per_value / 8) + rows * 2 * (k + n),
                check=functools.partial(check, kind=kind, how=how, prefill=prefill),
                alternative=functools.partial(cublas, kind=kind),
                alternative_name="cuBLAS, bfloat16",
            )
        )
    return result


def blocks_product(
    device: torch.device, rows: int, n: int, k: int, kind: str, how: str, prefill: bool = False
) -> None:
    """A product of made-up tensors."""
    form = KINDS[kind]
    x = tensor(device, rows, k, dtype=BF16)
    weight = tensor(device, n, k // UNIT * form.words, dtype=INT16)
    scale = tensor(device, form.units(k), n, form.fields, dtype=INT16)
    if how == "gated":
        linear_blocks_silu_mul(x, weight, scale, kind)
    elif how.startswith("parts"):
        linear_blocks_partials(x, weight, scale, kind, int(how.removeprefix("parts")), 0, prefill)
    else:
        linear_blocks(x, weight, scale, kind, False, prefill)


def gather(device: torch.device, kind: str) -> None:
    """Some rows of a made-up weight."""
    form, (n, k) = KINDS[kind], (2048, 1024)
    weight = tensor(device, n, k // UNIT * form.words, dtype=INT16)
    scale = tensor(device, form.units(k), n, form.fields, dtype=INT16)
    block_rows(tensor(device, 4, dtype=INT64), weight, scale, kind)


def launches(capability: int) -> Iterator[LaunchCase]:
    """Each kind at each height of a tile; whole, gated and in partials; a prompt's values of each kind."""
    down, gate_up = (5120, 17408), (34816, 5120)
    for kind in KINDS:
        for rows, (n, k), how in (
            (4, gate_up, "gated"),
            (4, down, "parts8"),
            (12, gate_up, "gated"),
            (20, gate_up, "product"),
            (20, down, "parts8"),
            (50, gate_up, "product"),
            (100, gate_up, "product"),
        ):
            call = functools.partial(blocks_product, rows=rows, n=n, k=k, kind=kind, how=how)
            yield LaunchCase(f"{kind}-{n}x{k}-{how}-{rows}", call)
        call = functools.partial(
            blocks_product, rows=256, n=2048, k=1024, kind=kind, how="product", prefill=True
        )
        yield LaunchCase(f"{kind}-2048x1024-prompt-256", call)
        yield LaunchCase(f"{kind}-2048x1024-gather-4", functools.partial(gather, kind=kind))
