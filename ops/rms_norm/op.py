"""Checks and registration of `rms_norm`, `add_rms_norm` and `pair_norm`."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.rms_norm.reference import (
    add_rms_norm_reference,
    pair_norm_reference,
    rms_norm_reference,
)

# One row is one sum, which ATen splits over threads beyond this length when there is no other row.
MAX_WIDTH = 32768
PART_COUNTS = (1, 2, 4, 8)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = residual.shape
    shape = (rows if kept_rows is None else kept_rows.shape[0], width)
    return residual.new_empty(shape), residual.new_empty(shape)


# Imported on first use: without a GPU nothing needs Triton.
def _rms_norm_launch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from compiled_mtp.ops.rms_norm.kernel import launch_rms_norm

    return launch_rms_norm(x, weight, eps)


def _add_rms_norm_launch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from compiled_mtp.ops.rms_norm.kernel import launch_add_rms_norm

    return launch_add_rms_norm(*args)


def _check_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _check(x, weight)


_rms_norm = register(
    "rms_norm", rms_norm_reference, _rms_norm_fake, launch=_rms_norm_launch, check=_check_rms_norm
)


def _check_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept_rows: torch.Tensor | None = None,
) -> None:
    if x.dim() == 3:
        if x.shape[0] not in PART_COUNTS:
            raise fail("x", f"have one of {PART_COUNTS} parts", x.shape[0], "pass linear_parts' result")
        _check(x[0], weight)
        dtypes = (x.dtype,) if x.shape[0] == 1 else (torch.float32, torch.bfloat16)
        if x.shape[0] > 1:
            check_dtype("x", x, (torch.float32,), "pass parts as linear_parts gives them")
    else:
        _check(x, weight)
        dtypes = (x.dtype,)
    check_shape("residual", residual, tuple(x.shape[-2:]), "pass the residual of the same rows")
    check_dtype("residual", residual, dtypes, "use one dtype for activations and residual")
    check_last_contiguous("residual", residual)
    if kept_rows is not None:
        check_shape("kept_rows", kept_rows, (None,), "pass the numbers of rows")
        check_dtype("kept_rows", kept_rows, (torch.int64,), "cast the numbers")
        check_last_contiguous("kept_rows", kept_rows)


_add_rms_norm = register(
    "add_rms_norm",
    add_rms_norm_reference,
    _add_rms_norm_fake,
    launch=_add_rms_norm_launch,
    check=_check_add_rms_norm,
)


def _pair_norm_fake(
    table: torch.Tensor, token_ids: torch.Tensor, hidden: torch.Tensor, *_: object
) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], 2 * hidden.shape[1]))


def _pair_norm_launch(*args: Any) -> torch.Tensor:
    from compiled_mtp.ops.rms_norm.kernel import launch_pair_norm

    return launch_pair_norm(*args)


def _check_pair_norm(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> None:
    _check(hidden, hidden_weight)
    _check(table, embedding_weight)
    check_shape("table", table, (None, hidden.shape[1]), "pass the embedding of the same model")
    check_dtype("table", table, (hidden.dtype,), "use one dtype for activations and embedding")
    if not table.is_contiguous():
        raise fail("table", "be contiguous", table.stride(), "pass the embedding itself")
    check_shape("token_ids", token_ids, (hidden.shape[0],), "pass a token for each hidden row")
    check_dtype("token_ids", token_ids, (torch.int64,), "cast the ids")
    check_last_contiguous("token_ids", token_ids)


_pair_norm = register(
    "pair_norm", pair_norm_reference, _pair_norm_fake, launch=_pair_norm_launch, check=_check_pair_norm
)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_dtype("x", x, (torch.float32, torch.bfloat16), "cast the activations")
    check_shape("x", x, (None, weight.shape[-1]), "pass rows as long as the weight")
    check_last_contiguous("x", x)
    if x.shape[1] > MAX_WIDTH:
        raise fail("x", f"have at most {MAX_WIDTH} columns", x.shape[1], "this norm is for hidden rows")
    check_shape("weight", weight, (None,), "pass a vector")
    check_last_contiguous("weight", weight)
    check_dtype("weight", weight, (torch.float32, torch.bfloat16), "cast the weight")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) for each row, in float32, rounded once.

    x: [M, H] float32 or bfloat16, rows at any stride. weight: [H]. Returns [M, H] of x's dtype.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    Source: Zhang and Sennrich, arXiv 1910.07467; the zero-centred weight is Qwen3-Next's.
    """
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual x + residual, rounded to x's dtype, and the RMS norm of that rounded value.

    x, residual: [M, H] of one dtype, float32 or bfloat16, rows at any stride. weight: [H]. x may also be
    what `linear_parts` gives, [P, M, H]: P of 2, 4 or 8 float32 parts, to be added as the tree
    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) and rounded to residual's dtype first, or with P = 1 the sum in
    that dtype. kept_rows [N] int64, if given, names the rows that are wanted, in that order (each below M,
    not checked: it would cost a synchronisation). Returns (norm, new residual), [M, H] or [N, H]. On a GPU
    the residual and kept_rows are read while the operator before still runs: neither may be that one's result
    (ops.device says what lies between).
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    return _add_rms_norm(x, residual, weight, eps, kept_rows)


def pair_norm(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What the MTP head's first product reads: a token's embedding and a hidden row, each after its norm.

    table: [V, H], the embedding. token_ids: [M] int64, each within the table (not checked: it would cost a
    synchronisation). hidden: [M, H] of table's dtype, float32 or bfloat16, rows at any stride. The weights:
    [H]. Returns [M, 2 H]: rms_norm(table[token_ids], embedding_weight), then rms_norm(hidden, hidden_weight),
    to the bit. Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    return _pair_norm(table, token_ids, hidden, embedding_weight, hidden_weight, eps)
