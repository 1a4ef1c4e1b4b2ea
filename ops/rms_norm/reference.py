"""The specifications of `rms_norm`, `add_rms_norm` and `pair_norm`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail, is_known, wrong_dtype, wrong_shape
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantize
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, FP8, I64, Like, Remedy

# Above this width ATen splits the sum of a single row over threads, which changes its order.
MAX_WIDTH = 32768
PART_COUNTS = (1, 2, 4, 8)
Weight = Annotated[Tensor, "H", ACTIVATION, Remedy("pass a vector as long as the rows")]
Rows = Annotated[Tensor, "M H", ACTIVATION]
Parts = Annotated[Tensor, "... _ H", ACTIVATION]


def _is_hidden_row(H: int) -> None:
    if H > MAX_WIDTH:
        raise fail("x", f"have at most {MAX_WIDTH} columns", H, "this norm is for hidden rows")


@operator(
    launches=(Launch("rms_norm_kernel", reads_early=("weight",)),),
    check=_is_hidden_row,
    has_cpu_route=True,
)
def rms_norm(x: Rows, weight: Weight, eps: float) -> Annotated[Tensor, "M H", Like("x")]:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) for each row, in float32, rounded once.

    x: [M, H] float32 or bfloat16, any row stride. weight: [H]. Returns [M, H] of x's dtype.
    Source: Zhang and Sennrich, arXiv 1910.07467; the zero-centred weight is Qwen3-Next's.
    """
    x_f32 = x.float()
    y = x_f32 * (x_f32 * x_f32).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.addcmul(y, y, weight.float()).to(x.dtype).contiguous()


def _is_sum_or_partials(x: Tensor, residual: Tensor, M: int, H: int) -> None:
    _is_hidden_row(H)
    if x.dim() > 3:
        raise fail("x", f"have shape [{M}, {H}] or [parts, {M}, {H}]", list(x.shape), "drop dimensions")
    if x.dim() == 2 and x.dtype == torch.float32:
        if not is_known(x.shape[0]):
            return
        count, rest = divmod(x.shape[0], max(M, 1))
    else:
        count, rest = 1 if x.dim() == 2 else x.shape[0], x.shape[-2] - M
    if rest:
        raise wrong_shape("residual", residual, ("rows", "H"), {"rows": x.shape[-2], "H": H}, "compare x")
    if count not in (PART_COUNTS if M else (0, *PART_COUNTS)):
        raise fail("x", f"have one of {PART_COUNTS} parts", count, "pass linear_partials' result")
    if count > 1 and x.dtype != torch.float32:
        raise wrong_dtype("x", x, (torch.float32,))
    if x.dtype not in (residual.dtype, torch.float32):
        raise wrong_dtype("residual", residual, (x.dtype,))


def as_partials(x: Tensor, residual: Tensor) -> Tensor:
    """Return x as [P, M, H], from [M, H], [P * M, H] or [P, M, H]."""
    if x.dim() == 3:
        return x
    return x[None] if x.shape[0] == residual.shape[0] else x.unflatten(0, (-1, residual.shape[0]))


def _norm_and_residual(residual: Tensor, kept_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = residual.shape[0] if kept_rows is None else kept_rows.shape[0]
    shape = (rows, residual.shape[1])
    return residual.new_empty(shape), residual.new_empty(shape)


# A layer's products, which are fences, separate the writers of residual and kept_rows from this call: neither
# may be a result of the operator directly before. With `resident` those products may be no fences, so only
# the weight is read early.
@operator(
    launches=(Launch("add_rms_norm_kernel", reads_early=("weight", "residual", "kept_rows")),),
    resident_launches=(Launch("add_rms_norm_kernel", reads_early=("weight",)),),
    check=_is_sum_or_partials,
    has_cpu_route=True,
    fake=_norm_and_residual,
)
def add_rms_norm(
    x: Parts,
    residual: Rows,
    weight: Weight,
    eps: float,
    kept_rows: Annotated[Tensor, "_", I64] | None = None,
    resident: bool = False,
) -> tuple[Rows, Rows]:
    """Return the RMS norm of x + residual, and x + residual itself, rounded before the norm, as new residual.

    x, residual: [M, H] of one dtype, any row stride. weight: [H]. x may also be the result of
    `linear_partials`: [P, M, H] or, `stacked`, [P * M, H], with P of 1, 2, 4 or 8 split-K partials in
    float32. They are added as the tree ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) and rounded to residual's
    dtype first. With P = 1, [1, M, H] may have that dtype already. kept_rows [N]: the rows to return, in that
    order; each must be below M, which is not checked because it would cost a synchronisation. resident: the
    products around this call may have resident weights (`linear`). Returns (norm, new residual), [M, H] or
    [N, H].
    """
    x = add_tree(as_partials(x, residual)).to(residual.dtype)
    if kept_rows is not None:
        x, residual = x[kept_rows], residual[kept_rows]
    new_residual = (x.float() + residual.float()).to(x.dtype).contiguous()
    return rms_norm.reference(new_residual, weight, eps), new_residual


def _is_groups(x: Tensor, residual: Tensor, M: int, H: int) -> None:
    _is_sum_or_partials(x, residual, M, H)
    if H < 2 * FP8_BLOCK or H % FP8_BLOCK:
        rule = f"have a multiple of {FP8_BLOCK} columns, two at least"
        raise fail("x", rule, H, "use add_rms_norm and quantize_rows")


def _norm_and_groups(residual: Tensor, kept_rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    norm, new_residual = _norm_and_residual(residual, kept_rows)
    rows, columns = norm.shape
    factors = norm.new_empty((rows, columns // FP8_BLOCK), dtype=F32)
    return norm, new_residual, torch.empty_like(norm, dtype=FP8), factors


@operator(
    launches=(Launch("add_rms_norm_kernel", reads_early=("weight", "residual", "kept_rows")),),
    check=_is_groups,
    has_cpu_route=True,
    fake=_norm_and_groups,
)
def add_rms_norm_quantized(
    x: Parts,
    residual: Rows,
    weight: Weight,
    eps: float,
    kept_rows: Annotated[Tensor, "_", I64] | None = None,
) -> tuple[Rows, Rows, Annotated[Tensor, "_ H", FP8], Annotated[Tensor, "_ H//128", F32]]:
    """`add_rms_norm` and `quantize_rows` of its norm, with the same bits, in one launch.

    Takes the arguments of `add_rms_norm`; H is a multiple of 128, at least 256. Returns (norm, new residual,
    e4m3 values, all [M, H] or [N, H], factors [M, H / 128] or [N, H / 128]).
    """
    norm, new_residual = add_rms_norm.reference(x, residual, weight, eps, kept_rows)
    return norm, new_residual, *quantize(norm)


@operator(
    launches=(Launch("pair_norm_kernel", reads_early=("embedding_weight", "hidden_weight")),),
    check=_is_hidden_row,
    has_cpu_route=True,
)
def pair_norm(
    table: Annotated[
        Tensor, "V H", Like("hidden"), CONTIGUOUS, Remedy("pass the embedding of the same model")
    ],
    token_ids: Annotated[Tensor, "M", I64],
    hidden: Annotated[Tensor, "M H", ACTIVATION, Remedy("pass one row a token")],
    embedding_weight: Weight,
    hidden_weight: Weight,
    eps: float,
) -> Annotated[Tensor, "M 2*H", Like("hidden")]:
    """Return the input of the MTP head's first product: norms of a token's embedding and of a hidden row.

    table: [V, H], the embedding. token_ids: [M]; each must be below V, which is not checked because it would
    cost a synchronisation. hidden: [M, H] of table's dtype, any row stride. Both weights: [H]. Returns
    [M, 2 H]: rms_norm(table[token_ids], embedding_weight) and rms_norm(hidden, hidden_weight), to the bit.
    """
    embedding = rms_norm.reference(table[token_ids], embedding_weight, eps)
    return torch.cat((embedding, rms_norm.reference(hidden, hidden_weight, eps)), dim=1)
