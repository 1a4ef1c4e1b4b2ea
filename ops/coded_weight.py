"""What products with packed weights, in four-bit or scaled codes, check, split and allocate alike."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.blocks import KINDS, ROWS, UNIT
from compiled_mtp.ops.checks import fail, is_known
from compiled_mtp.ops.k_splits import count_k_splits, is_sum, new_partials, part_counts


def check_kind(
    names: tuple[str, str, str],
    kind: str,
    sizes: tuple[int, int, int],
    scales: tuple[int, int],
    remedies: tuple[str, str],
) -> None:
    """Raise ValueError unless a weight and its scales fit `kind`.

    names: those of the arguments kind, weight and scales. sizes: the weight's rows, columns and words of a
    row. scales: units and fields. remedies: what to pass as weight and scales.
    """
    rows, columns, words = sizes
    if kind not in KINDS:
        raise fail(names[0], f"be one of {', '.join(KINDS)}", kind, "multiply the weight out")
    form = KINDS[kind]
    if columns % UNIT or columns // UNIT * form.words != words or rows % ROWS:
        rule = f"have {form.words} words per {UNIT} of {columns} columns, and a multiple of {ROWS} rows"
        raise fail(names[1], rule, [rows, words], remedies[0])
    if (form.units(columns), form.fields) != scales:
        rule = f"have {form.units(columns)} units of {form.fields} numbers"
        raise fail(names[2], rule, "{} of {}".format(*scales), remedies[1])


def check_count(weight: Tensor, count: int, whole_k: int, prefill: bool, k: int) -> None:
    """Raise ValueError unless `count` partials can share a sum over `k` of the weight's `whole_k` columns."""
    whole = whole_k or k
    if whole % k or k * count_k_splits(whole) % whole:
        rule = f"be a multiple of {k} in whole K splits"
        raise fail("whole_k", rule, whole_k, "pass K of the whole weight")
    if prefill and whole > k and weight.is_cuda:
        remedy = "its order for prompts has no K splits there: pass the whole weight"
        raise fail("prefill", "be False for a shard of a weight's columns on a GPU", prefill, remedy)
    counts = part_counts(k, whole) if weight.is_cuda else (1,)
    if is_known(count) and count not in counts:
        rule = f"be one of {counts} for this weight and device"
        raise fail("count", rule, count, "pass what count_partials gives for the weight")


def count_partials(weight: Tensor, k: int, whole_k: int = 0) -> int:
    """In how many parts a product before a norm fills the processors with this weight of `k` columns; 1 on a
    CPU. No count changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    # Measured with 27B's down and out at 4 to 128 rows: one K split a program is the fastest.
    return part_counts(k, whole_k or k)[-1] if weight.device.type == "cuda" else 1


def new_product(x: Tensor, weight: Tensor, out_float32: bool) -> Tensor:
    """Allocate the product of x [M, K] and a weight of N rows, [M, N]."""
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if out_float32 else x.dtype)


def new_sums(x: Tensor, weight: Tensor, count: int, whole_k: int, stacked: bool) -> Tensor:
    """Allocate a product's partials, float32 unless they are one whole sum."""
    is_rounded = not stacked and is_sum(x.shape[1], count, whole_k)
    return new_partials(x, weight, count, stacked, x.dtype if is_rounded else torch.float32)
