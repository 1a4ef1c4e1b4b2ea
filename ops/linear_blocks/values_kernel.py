"""The values of weight rows in scaled codes, rounded once to bfloat16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.blocks import KINDS, UNIT
from compiled_mtp.ops.blocks_triton import MAGIC, decode_part, factor_of, load_codes, load_fields

# Weight rows of a program that multiplies a weight out.
VALUE_ROWS = 32
# Rows of a program that decodes some rows.
SOME_ROWS = 4


@triton.jit(do_not_specialize=["rows"])
def block_rows_kernel(
    ids,
    weight,
    weight_scale,
    out,
    rows,
    n,
    magic,
    BN: tl.constexpr,
    HAS_IDS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The values of BN weight rows in one unit, rounded to bfloat16: of those that `ids` names, or of all."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    unit, units = tl.program_id(1), tl.num_programs(1)
    inside = row < rows
    if HAS_IDS:
        own = tl.load(ids + row, mask=inside, other=0)
    else:
        own = tl.where(inside, row, tl.arange(0, BN) % 16)
    unit_at = weight + ((own // 16).to(tl.int64) * units + unit) * BLOCK_WORDS
    in_block = (own % 16).to(tl.int32)
    codes = load_codes(unit_at, in_block, WIDTH, KIND)
    step = n // 2 * FIELDS
    fields_at = weight_scale.to(tl.pointer_type(tl.int32)) + own // 16 * (8 * FIELDS)
    fields = load_fields(fields_at + unit.to(tl.int64) * step, in_block, FIELDS)
    factor = factor_of(fields_at + units.to(tl.int64) * step, in_block, KIND)
    to = out + (row.to(tl.int64) * units + unit)[None, :] * 128 + tl.arange(0, WIDTH)[:, None]
    for part in tl.static_range(128 // WIDTH):
        values = decode_part(codes, fields, in_block, magic, part, WIDTH, KIND)
        if KIND == "NVFP4":
            values = (values.to(tl.float32) * factor[None, :]).to(tl.bfloat16)
        tl.store(to + part * WIDTH, values, mask=inside[None, :])


def values_of(weight: torch.Tensor, weight_scale: torch.Tensor, kind: str) -> torch.Tensor:
    """The values [N, K] of a weight, rounded to bfloat16, with the factors of rows in them."""
    return decode_rows(None, weight, weight_scale, kind)


def decode_rows(
    ids: torch.Tensor | None, weight: torch.Tensor, weight_scale: torch.Tensor, kind: str
) -> torch.Tensor:
    """The values of the rows `ids`, None for all."""
    form, n = KINDS[kind], weight.shape[0]
    rows = n if ids is None else ids.shape[0]
    k = form.columns(weight.shape[1])
    out = torch.empty((rows, k), dtype=torch.bfloat16, device=weight.device)
    if rows == 0:
        return out
    # Any number of rows has the same programs' size: one kernel for every batch.
    block = VALUE_ROWS if ids is None else SOME_ROWS
    block_rows_kernel[(triton.cdiv(rows, block), k // UNIT)](
        weight if ids is None else ids,
        weight,
        weight_scale,
        out,
        rows,
        n,
        MAGIC,
        BN=block,
        HAS_IDS=ids is not None,
        KIND=kind,
        WIDTH=form.width,
        FIELDS=form.fields,
        BLOCK_WORDS=16 * form.words,
        num_warps=4 if ids is None else 1,
    )
    return out
