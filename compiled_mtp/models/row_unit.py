"""The row unit of a CPU: row counts at whose multiples a row's bits do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch
from torch import nn

from compiled_mtp.models.linear import Linear
from compiled_mtp.models.moe import Router
from compiled_mtp.models.weight_format import FP8
from compiled_mtp.ops.k_splits import count_cpu_k_splits, count_k_splits
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.packed_weight import find_packed

CANDIDATES = (1, 2, 4, 8)
# Every engine compares with the same row count, so two engines that pass agree with each other too.
_CANONICAL_ROWS = 64
# The most rows of a test matrix: a copy of a model's output head may not fit into memory.
_MOST_WEIGHT_ROWS = 8192


def weights_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The weights of the products among `modules`, without those in packed codes."""
    return [
        module.weight
        for module in modules
        if isinstance(module, Router) or (isinstance(module, Linear) and not module.is_packed)
    ]


def k_splits_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The first K split of every matrix whose products a CPU sums in K splits, unless it is packed."""
    k_splits = []
    for module in modules:
        if not isinstance(module, Linear) or not module.is_before_norm or module.is_packed:
            continue
        weight, world = module.weight, 1 if module.communicator is None else module.communicator.world
        count = count_k_splits if module.quantizes_rows else count_cpu_k_splits
        if find_packed(weight) is None:
            k_splits.append(weight[:, : weight.shape[1] * world // count(weight.shape[1] * world)])
    return k_splits


def find_row_unit(weights: Iterable[torch.Tensor], row_counts: Sequence[int]) -> int | None:
    """Return the smallest unit in 1, 2, 4, 8 whose multiples up to max(row_counts) give bit-equal rows, or
    None.

    weights: the [N, K] matrices of the decode path, packed or not. BLAS libraries choose their loops by shape
    and do not document for which row counts the order of a row's sum stays the same, so this function
    measures it: on one matrix of each shape, with random rows and the current number of threads. bfloat16
    matrices are tried with float32 and bfloat16 results, which are computed by different routines. FP8
    matrices are tried with float32 rows and scales of one: no loop depends on their values. Rounding to
    bfloat16 hides nearly every change of order, so bfloat16 results are tried on `cancelling` numbers.
    """
    shapes = {(weight.shape, weight.dtype, find_packed(weight) is None): weight for weight in weights}
    generator = torch.Generator().manual_seed(0)
    largest = max((*row_counts, 1))
    unit_index = 0
    for weight in shapes.values():
        size = max(_CANONICAL_ROWS, largest)
        is_fp8 = weight.dtype == FP8.storage
        scale = torch.ones(FP8.scale_shape(tuple(weight.shape)), dtype=torch.float32) if is_fp8 else None
        x = torch.randn(size, weight.shape[1], generator=generator, dtype=torch.float32)
        tries = {True: (x if is_fp8 else x.to(weight.dtype), weight)}
        if weight.dtype == torch.bfloat16:
            tries[False] = cancelling(
                size, min(weight.shape[0], _MOST_WEIGHT_ROWS), weight.shape[1], generator
            )
        counts = sorted({count for count in range(1, largest + 1) if count <= 16 or count in row_counts})
        expected = {
            out_float32: linear(rows[:_CANONICAL_ROWS], matrix, scale, out_float32, False)
            for out_float32, (rows, matrix) in tries.items()
        }
        for count, (out_float32, (rows, matrix)) in product(counts, tries.items()):
            if count % CANDIDATES[unit_index]:
                continue
            common = min(count, _CANONICAL_ROWS)
            y = linear(rows[:count], matrix, scale, out_float32, False)
            # NaN in a weight is no fault of the library: requests that meet it end with an error.
            if torch.equal(y[:common].nan_to_num(), expected[out_float32][:common].nan_to_num()):
                continue
            while count % CANDIDATES[unit_index] == 0:
                unit_index += 1
                if unit_index == len(CANDIDATES):
                    return None
    return CANDIDATES[unit_index]


def cancelling(rows: int, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, k] and a matrix [n, k], both bfloat16, whose products are zero except for rounding errors.

    Sums in another order then differ even after rounding to bfloat16.
    """
    order = torch.randperm(k, generator=generator)
    # Terms of very different sizes: a few of them are enough to make sums round.
    sizes = torch.randint(0, 16, (k // 2,), generator=generator).exp2()
    half, last = torch.randn(rows, k // 2, generator=generator) * sizes, torch.zeros(rows, k % 2)
    x = torch.cat((half, half, last), dim=1)[:, order]
    half, last = torch.randn(n, k // 2, generator=generator), torch.zeros(n, k % 2)
    matrix = torch.cat((half, -half, last), dim=1)[:, order]
    return x.bfloat16(), matrix.bfloat16()
