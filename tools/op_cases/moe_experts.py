"""Cases of `moe_experts`, `moe_experts_blocks`, `moe_experts_w4a16` and `moe_experts_w8a8`: the block after
the router.

--set prefill=1 for a prompt's rows, which codes multiply as any others; of four-bit weights group=32 or 64
for smaller groups, and shared=1 for a plain shared expert; codes=1 for scaled codes alone, in the pairs of
kinds of KIND_PAIRS.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.blocks import KINDS, UNIT
from compiled_mtp.ops.int4 import pack_groups
from compiled_mtp.ops.moe_experts import (
    moe_experts,
    moe_experts_blocks,
    moe_experts_w4a16,
    moe_experts_w8a8,
    moe_hidden,
    moe_hidden_w4a16,
    moe_hidden_w8a8,
    moe_sums,
    moe_sums_w4a16,
    moe_sums_w8a8,
)
from compiled_mtp.ops.quantize_rows import quantize_rows
from op_cases import (
    BF16,
    FP8,
    FP32,
    INT16,
    INT32,
    PREFILL_ROWS,
    ROWS,
    SHAPES,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
    tensor,
)

MAX_RELATIVE_ERROR = 4e-3
# Kinds of scaled codes of gate and up, and of down.
KIND_PAIRS = (
    *(("Q4_K", "Q6_K"), ("Q5_K", "Q5_K"), ("Q8_0", "Q4_0")),
    *(("IQ4_XS", "IQ4_XS"), ("MXFP4", "Q8_0"), ("NVFP4", "NVFP4")),
)
# Rows are quantised again between the two products: values halfway between two steps may round either way.
MAX_QUANTISED_ERROR = 4e-2


def quantise_inputs(x: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    return *quantize_rows(x), *rest


def routing(shape: ModelShape, rows: int) -> torch.Tensor:
    """Return ids of independent, uniform choices: the worst case for the number of experts that are read."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, shape.experts, generator=generator).argsort(-1)[:, : shape.top_k]
    return torch.cat([ids, torch.full((rows, 1), shape.experts)], 1).to(torch.int32)


def make_inputs(
    device: Any, seed: int | None, shape: ModelShape, rows: int, fp8: bool, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor | None, ...]:
    source = Source(device, seed)
    experts, width, inner = shape.experts + 1, shape.hidden, shape.expert_intermediate

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = torch.empty(experts, n, k, dtype=FP8 if fp8 else dtype, device=device)
        for expert in range(0 if seed is None else experts):
            result[expert] = (source.normal(n, k) * (50.0 if fp8 else k**-0.5)).to(result.dtype)
        if not fp8:
            return result, None
        return result, (source.uniform(experts, -(-n // 128), -(-k // 128)) + 0.5) * (k**-0.5 / 50.0)

    x, weights = source.normal(rows, width, dtype=dtype), source.uniform(rows, shape.top_k + 1)
    ids = tensor(device, *weights.shape, dtype=INT32) if seed is None else routing(shape, rows).to(device)
    gate_up, gate_up_scale = weight(2 * inner, width)
    down, down_scale = weight(width, inner)
    return x, weights, ids, gate_up, down, gate_up_scale, down_scale


def plain_inputs(
    device: Any, seed: int | None, shape: ModelShape, rows: int, fp8: bool, prefill: bool
) -> tuple[Any, ...]:
    return *make_inputs(device, seed, shape, rows, fp8), prefill


def four_bit_inputs(
    device: Any,
    seed: int | None,
    shape: ModelShape,
    rows: int,
    group: int = 128,
    is_shared_plain: bool = False,
) -> tuple[Any, ...]:
    """Arguments of moe_experts_w4a16, whose values have about the size of those of `make_inputs`."""
    source = Source(device, seed)
    width, inner = shape.hidden, shape.expert_intermediate
    experts = shape.experts + (not is_shared_plain)

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.empty(experts, n, k // 4, dtype=INT16, device=device)
        if seed is None:
            return words, tensor(device, experts, k // group, n, 2, dtype=torch.float16)
        words.random_(-(1 << 15), 1 << 15, generator=source.generator)
        scales = (source.uniform(n, k // group) + 0.5).half() * (k**-0.5 / 5)
        zeros = torch.full(scales.shape, 8, device=device)
        return words, pack_groups(scales, zeros).expand(experts, -1, -1, -1).contiguous()

    x, weights = source.normal(rows, width, dtype=BF16), source.uniform(rows, shape.top_k + 1)
    ids = tensor(device, *weights.shape, dtype=INT32) if seed is None else routing(shape, rows).to(device)
    (gate_up, gate_up_scale), (down, down_scale) = weight(2 * inner, width), weight(width, inner)
    shared: tuple[Any, ...] = (None, None)
    if is_shared_plain:
        sizes = ((2 * inner, width), (width, inner))
        shared = tuple((source.normal(n, k) * k**-0.5).to(BF16) for n, k in sizes)
    return x, weights, ids, gate_up, down, gate_up_scale, down_scale, *shared


def block_inputs(
    device: Any,
    seed: int | None,
    shape: ModelShape,
    rows: int,
    kinds: tuple[str, str] = KIND_PAIRS[0],
) -> tuple[Any, ...]:
    """Arguments of moe_experts_blocks, with experts of two kinds: gate and up, and down."""
    source = Source(device, seed)
    width, inner = shape.hidden, shape.expert_intermediate

    def weight(n: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        form = KINDS[kind]
        words = torch.empty(shape.experts, n, k // UNIT * form.words, dtype=INT16, device=device)
        scales = torch.empty(shape.experts, form.units(k), n, form.fields, dtype=INT16, device=device)
        if seed is not None:
            words.random_(-(1 << 15), 1 << 15, generator=source.generator)
            # Small numbers, whatever the bits mean.
            scales.view(torch.uint8).random_(0x0C, 0x11, generator=source.generator)
        return words, scales

    x, weights = source.normal(rows, width, dtype=BF16), source.uniform(rows, shape.top_k + 1)
    ids = tensor(device, *weights.shape, dtype=INT32) if seed is None else routing(shape, rows).to(device)
    sizes = ((2 * inner, width), (width, inner))
    gate_up, down = (weight(*size, kind) for size, kind in zip(sizes, kinds, strict=True))
    shared = [(source.normal(n, k) * k**-0.5).to(BF16) for n, k in sizes]
    return x, weights, ids, gate_up[0], down[0], gate_up[1], down[1], *shared, *kinds


def block_case(shape: ModelShape, rows: int, kinds: tuple[str, str], count: int) -> OpCase:
    """Experts in scaled codes, of which `count` distinct ones are read, the plain shared one included."""
    numbers = shape.hidden * shape.expert_intermediate
    bits = [KINDS[kind].bits_per_value for kind in kinds]
    size = int(numbers * (2 * bits[0] + bits[1]) / 8)
    make = functools.partial(block_inputs, shape=shape, rows=rows, kinds=kinds)
    return OpCase(
        label=f"{count} distinct experts {' and '.join(kinds)}",
        make_inputs=make,
        call=moe_experts_blocks,
        bytes_moved=(count - 1) * size + 6 * numbers + 4 * rows * shape.hidden,
        check=functools.partial(check_reference, moe_experts_blocks, most=MAX_RELATIVE_ERROR),
    )


def four_bit_case(shape: ModelShape, rows: int, settings: Mapping[str, int], count: int) -> OpCase:
    """Four-bit weights, of which `count` distinct experts are read."""
    group, is_shared_plain = settings.get("group", 128), bool(settings.get("shared", 0))
    numbers = 3 * shape.hidden * shape.expert_intermediate
    size = numbers // 2 + numbers // group * 4
    beside = numbers * 2 - size if is_shared_plain else 0
    make = functools.partial(four_bit_inputs, shape=shape, rows=rows, group=group)
    return OpCase(
        label=f"{count} distinct experts int4 g{group}",
        make_inputs=functools.partial(make, is_shared_plain=is_shared_plain),
        call=moe_experts_w4a16,
        bytes_moved=count * size + beside + 4 * rows * shape.hidden,
        check=functools.partial(check_reference, moe_experts_w4a16, most=MAX_RELATIVE_ERROR),
    )


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return cases with four-bit weights, bf16 weights, then FP8 weights in both recipes unless --set fp8=0.

    Bytes count each distinct expert once.
    """
    if not shape.experts:
        raise ValueError(f"shape must be a mixture of experts, got {shape.name}; try 35b-a3b")
    chosen = routing(shape, rows).unique()
    prefill = bool(settings.get("prefill", 0))
    if settings.get("codes", 0):
        return [block_case(shape, rows, kinds, len(chosen)) for kinds in KIND_PAIRS]
    result = [four_bit_case(shape, rows, settings, len(chosen))]
    for fp8 in (False, True) if settings.get("fp8", 1) else (False,):
        size = 3 * shape.hidden * shape.expert_intermediate * (1 if fp8 else 2)
        result.append(
            OpCase(
                label=f"{len(chosen)} distinct experts {'fp8' if fp8 else 'bf16'}",
                make_inputs=functools.partial(plain_inputs, shape=shape, rows=rows, fp8=fp8, prefill=prefill),
                call=moe_experts,
                bytes_moved=len(chosen) * size + 4 * rows * shape.hidden,
                check=functools.partial(check_reference, moe_experts, most=MAX_RELATIVE_ERROR),
            )
        )
    if settings.get("fp8", 1):
        plain = result[-1]
        result.append(
            OpCase(
                label=f"{len(chosen)} distinct experts w8a8",
                make_inputs=lambda device, seed: quantise_inputs(*plain.make_inputs(device, seed)[:-1]),
                call=moe_experts_w8a8,
                bytes_moved=plain.bytes_moved,
                check=functools.partial(check_reference, moe_experts_w8a8, most=MAX_QUANTISED_ERROR),
            )
        )
    return result


def quantised(device: torch.device, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 rows for a recorded launch, and their factors."""
    return tensor(device, rows, width, dtype=FP8), tensor(device, rows, width // 128)


def w8a8_experts(device: torch.device, rows: int) -> None:
    _, *rest = make_inputs(device, None, SHAPES["35b-a3b"], rows, True)
    given: tuple[Any, ...] = (*quantised(device, rows, 2048), *rest)
    moe_experts_w8a8(*given)


def four_bit_shards(device: torch.device, rows: int, is_shared_plain: bool) -> None:
    """Call what one of two ranks computes with four-bit weights."""
    empty = functools.partial(tensor, device)
    count, width, inner = 257 - is_shared_plain, 1024, 256
    ids, weights = empty(rows, 9, dtype=INT32), empty(rows, 9)
    gate_up = (empty(count, 2 * inner, width // 2, dtype=INT16), empty(count, 16, 2 * inner, 2, dtype=BF16))
    down = (empty(count, width, inner // 2, dtype=INT16), empty(count, 4, width, 2, dtype=BF16))
    shared = [
        empty(n, k, dtype=BF16) if is_shared_plain else None
        for n, k in ((2 * inner, 2 * width), (width, 2 * inner))
    ]
    moe_hidden_w4a16(empty(rows, 2 * width, dtype=BF16), ids, *gate_up, shared[0])
    moe_sums_w4a16(empty(9 * rows, 2 * inner, dtype=BF16), weights, ids, *down, shared[1])


def expert_shards(device: torch.device, rows: int, is_fp8: bool) -> None:
    """Call what one of two ranks computes: half of the hidden columns, and half of the sums."""
    empty = functools.partial(tensor, device)
    count, width, inner = 257, 1024, 256
    ids, weights = empty(rows, 9, dtype=INT32), empty(rows, 9)
    dtype = FP8 if is_fp8 else BF16
    up, down = empty(count, 2 * inner, 2 * width, dtype=dtype), empty(count, width, 2 * inner, dtype=dtype)
    if is_fp8:
        moe_hidden_w8a8(*quantised(device, rows, 2 * width), ids, up, empty(count, 4, 16))
        moe_sums_w8a8(*quantised(device, 9 * rows, 2 * inner), weights, ids, down, empty(count, 8, 4))
    else:
        moe_hidden(empty(rows, 2 * width, dtype=BF16), ids, up)
        moe_sums(empty(9 * rows, 2 * inner, dtype=BF16), weights, ids, down)


def launches(capability: int) -> Iterator[LaunchCase]:
    for name, rows in (("w8a8", ROWS), ("tall-w8a8", PREFILL_ROWS)):
        yield LaunchCase(name, functools.partial(w8a8_experts, rows=rows), 90)
    for name, rows, dtype in (
        ("decode", ROWS, BF16),
        ("decode", ROWS, FP8),
        ("decode", ROWS, FP32),
        # So many rows that their (row, expert) pairs outnumber the tiles.
        ("many", 60, BF16),
        # So many pairs per expert that tiles are taller.
        ("tall", 512, BF16),
        ("prefill", PREFILL_ROWS, BF16),
        ("prefill", PREFILL_ROWS, FP8),
    ):
        is_fp8 = dtype == FP8
        make = functools.partial(
            make_inputs, shape=SHAPES["35b-a3b"], rows=rows, fp8=is_fp8, dtype=BF16 if is_fp8 else dtype
        )
        call = functools.partial(moe_experts, prefill=name == "prefill")
        yield launch(f"{name}-{dtype_label(dtype)}", call, make, dtype)
    # Tiles of 8 pairs, for three numbers of rows, of 16, 32 and 64. All formats have the first and the third.
    groups = ((128, False), (128, True), (64, False), (32, False))
    for rows in (ROWS, 8, 32, 256, 512, PREFILL_ROWS):
        for group, is_shared_plain in groups if rows in (ROWS, 32) else groups[:1]:
            inputs = functools.partial(
                four_bit_inputs,
                shape=SHAPES["35b-a3b"],
                rows=rows,
                group=group,
                is_shared_plain=is_shared_plain,
            )
            label = f"{rows}-int4-g{group}{'-plain-shared' if is_shared_plain else ''}"
            yield launch(label, moe_experts_w4a16, inputs)
        for kinds in KIND_PAIRS if rows in (ROWS, 32) else KIND_PAIRS[:1]:
            inputs = functools.partial(block_inputs, shape=SHAPES["35b-a3b"], rows=rows, kinds=kinds)
            yield launch(f"{rows}-{'-'.join(kinds)}", moe_experts_blocks, inputs)
    shards = functools.partial(expert_shards, rows=PREFILL_ROWS, is_fp8=False)
    yield LaunchCase("halves", shards)
    for name, is_shared_plain in (("halves-int4", False), ("halves-int4-plain-shared", True)):
        shards = functools.partial(four_bit_shards, rows=PREFILL_ROWS, is_shared_plain=is_shared_plain)
        yield LaunchCase(name, shards)
    for name, rows in (("halves-w8a8", ROWS), ("tall-halves-w8a8", PREFILL_ROWS)):
        yield LaunchCase(name, functools.partial(expert_shards, rows=rows, is_fp8=True), 90)
