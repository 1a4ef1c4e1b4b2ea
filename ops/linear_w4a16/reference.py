"""The specifications of `linear_w4a16`, `linear_w4a16_silu_mul` and `linear_w4a16_partials`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.coded_weight import check_count, new_product, new_sums
from compiled_mtp.ops.int4 import GROUPS, ROWS, UNIT, dequantize
from compiled_mtp.ops.k_splits import add_splits, count_k_splits, is_sum
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import CONTIGUOUS, Remedy

BF16, I16 = torch.bfloat16, torch.int16
PACK = "pass what ops.int4.pack gives"
PACK_GROUPS = "pass what ops.int4.pack_groups gives"
Rows = Annotated[Tensor, "M K", BF16, Remedy("pass rows as long as the weight's, in bfloat16")]
Words = Annotated[Tensor, "N W", I16, CONTIGUOUS, Remedy(PACK)]
Groups = Annotated[Tensor, "G N 2", (torch.float16, BF16), CONTIGUOUS, Remedy(PACK_GROUPS)]
# No kernel writes the weight or its groups. Fences for the reason that `linear`'s kernels are.
LAUNCHES = (
    Launch("left_kernel", reads_early=("weight", "weight_scale"), is_fence=True),
    Launch("left_large_m_kernel", reads_early=("weight", "weight_scale"), is_fence=True),
)


def _weight_fits(K: int, W: int, G: int, N: int) -> None:
    if W * 4 != K or K % UNIT or N % ROWS:
        rule = f"have rows of {K} codes, a multiple of {UNIT}, and a multiple of {ROWS} rows"
        raise fail("weight", rule, [N, W], PACK)
    if G == 0 or K % G or K // G not in GROUPS:
        rule = f"have groups of {', '.join(map(str, GROUPS))} columns of {K}"
        raise fail("weight_scale", rule, f"{G} groups", PACK_GROUPS)


@operator(launches=LAUNCHES, check=_weight_fits, fake=new_product)
def linear_w4a16(
    x: Rows, weight: Words, weight_scale: Groups, out_float32: bool = False, prefill: bool = False
) -> Annotated[Tensor, "M N", (torch.float32, BF16)]:
    """x @ weight.T with a four-bit weight, accumulated in float32 and rounded once.

    x: [M, K] bfloat16, rows at any stride. weight: words [N, K / 4] int16 and weight_scale: groups
    [K / group, N, 2], as ops.int4 packs them. out_float32: return float32. prefill: the rows are a prompt's,
    many at a time; a GPU then rounds each value of the weight once to bfloat16 and multiplies by those.
    Returns [M, N]. The bits of a row depend on that row and on the weight alone, for every M and for every
    shard of the weight's rows.

    A GPU sums 32 to 128 columns of one group of exact q - z in a tensor core, multiplies the sum by the scale
    in float32, and adds the groups in order.
    """
    return F.linear(x.float(), dequantize(weight, weight_scale)).to(torch.float32 if out_float32 else x.dtype)


@operator(launches=LAUNCHES, check=_weight_fits)
def linear_w4a16_silu_mul(x: Rows, weight: Words, weight_scale: Groups) -> Annotated[Tensor, "M N//2", BF16]:
    """silu(gate) * up with gate | up = linear_w4a16(x, weight, weight_scale), to the bit, in one launch.

    Arguments as those of `linear_w4a16`; weight [2 I, K / 4] holds the gate's rows and then up's. Returns
    [M, I] bfloat16. The bits of a row depend on that row and on the weight alone.
    """
    gate, up = linear_w4a16.reference(x, weight, weight_scale).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def _count_fits(
    weight: Tensor, count: int, whole_k: int, prefill: bool, K: int, W: int, G: int, N: int
) -> None:
    _weight_fits(K, W, G, N)
    check_count(weight, count, whole_k, prefill, K)


@operator(launches=LAUNCHES, check=_count_fits, fake=new_sums)
def linear_w4a16_partials(
    x: Rows,
    weight: Words,
    weight_scale: Groups,
    count: int,
    whole_k: int = 0,
    prefill: bool = False,
    stacked: bool = False,
) -> Annotated[Tensor, "... N", (torch.float32, BF16)]:
    """A product before a norm with a four-bit weight, in P partials that the norm adds up.

    Arguments as those of `linear_w4a16`; the weight may also hold neighbouring K splits of the whole weight,
    and x those columns. count = P, whole_k, prefill, stacked and the result: as `linear_partials` has them.
    The K splits are added as a tree (ops.k_splits): every P gives the same bits.
    """
    if is_sum(x.shape[1], count, whole_k):
        whole = linear_w4a16.reference(x, weight, weight_scale, stacked)
        return whole if stacked else whole[None]
    k = x.shape[1]
    k_splits = count_k_splits(whole_k or k) * k // (whole_k or k)
    values = dequantize(weight, weight_scale).chunk(k_splits, 1)
    sums = [F.linear(part.float(), value) for part, value in zip(x.chunk(k_splits, 1), values, strict=True)]
    return add_splits(sums, count, stacked)
