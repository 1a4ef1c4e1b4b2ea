"""Checks and registration of `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.paged_attention.reference import reference
from compiled_mtp.ops.registry import register


def _fake(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


def _launch(*args: Any) -> torch.Tensor:
    # Imported late: a machine without Triton runs the reference.
    from compiled_mtp.ops.paged_attention.kernel import launch

    return launch(*args)


def _check_paged_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> None:
    check_shape("q", q, (None, None, None), "pass [rows, heads, head_dim]")
    rows, num_q_heads, hd = q.shape
    check_dtype("q", q, (torch.float32, torch.bfloat16), "cast the activations")
    check_last_contiguous("q", q)
    check_shape("gate", gate, (rows, num_q_heads, hd), "pass the gate half of each query head")
    check_dtype("gate", gate, (q.dtype,), "pass q and gate in one dtype")
    check_last_contiguous("gate", gate)
    if hd not in (16, 32, 64, 128, 256):
        raise fail("head_dim", "be a power of two from 16 to 256", hd, "no kernel covers another size")
    check_shape("kv", kv, (None, 2, None, None, hd), "pass the cache of this layer")
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    if num_q_heads % num_kv_heads:
        raise fail("query heads", f"be a multiple of the {num_kv_heads} kv heads", num_q_heads, "check kv")
    if block_size % 16:
        raise fail("block_size", "be a multiple of 16", block_size, "choose another block_size")
    check_last_contiguous("kv", kv)
    if kv_scale is None:
        check_dtype("kv", kv, (q.dtype,), "store the dtype of q, or float8_e4m3fn with kv_scale")
    else:
        check_dtype("kv", kv, (torch.float8_e4m3fn,), "drop kv_scale for an unquantised cache")
        check_shape("kv_scale", kv_scale, (kv.shape[0], 2, num_kv_heads, block_size), "one scale a vector")
        check_dtype("kv_scale", kv_scale, (torch.float32,), "keep scales in float32")
        check_last_contiguous("kv_scale", kv_scale)
    check_shape("block_table", block_table, (None, None), "pass [requests, blocks]")
    check_dtype("block_table", block_table, (torch.int32,), "pass int32")
    check_last_contiguous("block_table", block_table)
    if block_table.shape[0] == 0 or rows % block_table.shape[0]:
        raise fail("rows", f"be a multiple of the {block_table.shape[0]} requests", rows, "pass W rows each")
    check_shape("positions", positions, (rows,), "pass one position a row")
    check_dtype("positions", positions, (torch.int64,), "pass int64")
    check_last_contiguous("positions", positions)
    if first_key < 0:
        raise fail("first_key", "be at least 0", first_key, "pass the first key a row may see")


_op = register("paged_attention", reference, _fake, launch=_launch, check=_check_paged_attention)


def paged_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    """Gated softmax attention of M // B rows a request over its pages, causal by absolute position.

    Shapes and dtypes: see `reference`. Raises ValueError for shapes, dtypes or strides that do not fit each
    other.
    """
    return _op(q, gate, kv, kv_scale, block_table, positions, softmax_scale, first_key)
