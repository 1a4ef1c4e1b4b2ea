"""The specifications of `linear_blocks`, its variants, and `block_rows`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.blocks import KINDS, ROWS, UNIT, products, values
from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.coded_weight import check_count, check_kind, new_product, new_sums
from compiled_mtp.ops.k_splits import add_splits, count_k_splits, is_sum
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import CONTIGUOUS, Remedy

BF16, I16 = torch.bfloat16, torch.int16
PACK = "pass what ops.blocks.pack gives"
PACK_SCALES = "pass what ops.blocks.pack_scales gives"
Rows = Annotated[Tensor, "M K", BF16, Remedy("pass rows as long as the weight's, in bfloat16")]
Words = Annotated[Tensor, "N W", I16, CONTIGUOUS, Remedy(PACK)]
Scales = Annotated[Tensor, "U N S", I16, CONTIGUOUS, Remedy(PACK_SCALES)]
# The weight is written by no kernel. A fence for the reason that `linear`'s kernels are.
LAUNCHES = (
    Launch("left_kernel", reads_early=("weight", "weight_scale"), is_fence=True),
    Launch("left_large_m_kernel", reads_early=("weight", "weight_scale"), is_fence=True),
)


def _weight_fits(kind: str, K: int, W: int, U: int, S: int, N: int) -> None:
    check_kind(("kind", "weight", "weight_scale"), kind, (N, K, W), (U, S), (PACK, PACK_SCALES))


@operator(launches=LAUNCHES, check=_weight_fits, fake=new_product)
def linear_blocks(
    x: Rows, weight: Words, weight_scale: Scales, kind: str, out_float32: bool = False, prefill: bool = False
) -> Annotated[Tensor, "M N", (torch.float32, BF16)]:
    """x @ weight.T with a weight of scaled codes, accumulated in float32 and rounded once.

    x: [M, K] bfloat16, rows at any stride. weight: words [N, W] int16 and weight_scale: [units, N, S] int16,
    as ops.blocks packs them. kind: a name in ops.blocks.KINDS. out_float32: return float32. prefill: the rows
    are a prompt's, many at a time. Returns [M, N]. The bits of a row depend on that row and on the weight
    alone, for every M and for every shard of the weight's rows.

    Values are float32 numbers; a kind that scales sums multiplies them as they are, but a prompt's products,
    and those of other kinds, take them rounded once to bfloat16. A factor per row (NVFP4) multiplies the sum,
    but a GPU multiplies a prompt's values by it before they are rounded.
    """
    y = _sums(x.float(), *_multiplied(weight, weight_scale, kind, prefill))
    return y.to(torch.float32 if out_float32 else x.dtype)


def _multiplied(
    weight: Tensor, weight_scale: Tensor, kind: str, prefill: bool
) -> tuple[Tensor, Tensor | None]:
    """The values that products take [N, K], as float32, and the factors of their sums."""
    found, factor = products(weight, weight_scale, KINDS[kind])
    if KINDS[kind].scales_sums and not prefill:
        return found, factor
    return found.bfloat16().float(), factor


def _sums(x: Tensor, values: Tensor, factor: Tensor | None) -> Tensor:
    y = F.linear(x, values)
    return y if factor is None else y * factor


def _halves_fit(kind: str, K: int, W: int, U: int, S: int, N: int) -> None:
    _weight_fits(kind, K, W, U, S, N)
    if N % (2 * ROWS):
        rule = f"have {ROWS} or a multiple of {ROWS} rows for gate and up each"
        raise fail("weight", rule, f"{N} rows", "multiply with linear_blocks and call silu_mul")


@operator(launches=LAUNCHES, check=_halves_fit)
def linear_blocks_silu_mul(
    x: Rows, weight: Words, weight_scale: Scales, kind: str
) -> Annotated[Tensor, "M N//2", BF16]:
    """silu(gate) * up with gate | up = linear_blocks(x, weight, weight_scale, kind), to the bit, in one
    launch.

    Arguments as those of `linear_blocks`; weight [2 I, W] holds the gate's rows and then up's. Returns [M, I]
    bfloat16. The bits of a row depend on that row and on the weight alone.
    """
    gate, up = linear_blocks.reference(x, weight, weight_scale, kind).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def _count_fits(
    weight: Tensor,
    kind: str,
    count: int,
    whole_k: int,
    prefill: bool,
    K: int,
    W: int,
    U: int,
    S: int,
    N: int,
) -> None:
    _weight_fits(kind, K, W, U, S, N)
    check_count(weight, count, whole_k, prefill, K)


@operator(launches=LAUNCHES, check=_count_fits, fake=new_sums)
def linear_blocks_partials(
    x: Rows,
    weight: Words,
    weight_scale: Scales,
    kind: str,
    count: int,
    whole_k: int = 0,
    prefill: bool = False,
    stacked: bool = False,
) -> Annotated[Tensor, "... N", (torch.float32, BF16)]:
    """A product before a norm with a weight of scaled codes, in P partials that the norm adds up.

    Arguments as those of `linear_blocks`; the weight may also hold neighbouring K splits of the whole weight,
    and x those columns. count = P, whole_k, prefill, stacked and the result: as `linear_partials` has them. A
    factor per row multiplies the sum of each K split. The K splits are added as a tree (ops.k_splits): every
    P gives the same bits.
    """
    if is_sum(x.shape[1], count, whole_k):
        whole = linear_blocks.reference(x, weight, weight_scale, kind, stacked, prefill)
        return whole if stacked else whole[None]
    k = x.shape[1]
    k_splits = count_k_splits(whole_k or k) * k // (whole_k or k)
    values, factor = _multiplied(weight, weight_scale, kind, prefill)
    parts = zip(x.chunk(k_splits, 1), values.chunk(k_splits, 1), strict=True)
    sums = [_sums(part.float(), value, factor) for part, value in parts]
    return add_splits(sums, count, stacked)


def _rows_fit(kind: str, W: int, U: int, S: int, N: int) -> None:
    k = KINDS[kind].columns(W) if kind in KINDS else UNIT
    _weight_fits(kind, k, W, U, S, N)


def _rows(ids: Tensor, weight: Tensor, kind: str) -> Tensor:
    shape = (ids.shape[0], KINDS[kind].columns(weight.shape[1]))
    return weight.new_empty(shape, dtype=BF16)


@operator(check=_rows_fit, fake=_rows)
def block_rows(
    ids: Annotated[Tensor, "M", torch.int64], weight: Words, weight_scale: Scales, kind: str
) -> Annotated[Tensor, "M _", BF16]:
    """The values of rows of a weight of scaled codes: an embedding's, or those of some rows of a head.

    ids: [M]; each must be below N, which is not checked because it would cost a synchronisation. weight,
    weight_scale, kind: as those of `linear_blocks`. Returns [M, K] bfloat16, each value rounded once.
    """
    blocks = ids // ROWS
    # Only the blocks of 16 rows that hold these rows are decoded.
    own = (blocks[:, None] * ROWS + torch.arange(ROWS, device=ids.device)).flatten()
    found = values(weight[own], weight_scale[:, own], KINDS[kind])
    return found[torch.arange(len(ids), device=ids.device) * ROWS + ids % ROWS].bfloat16()
