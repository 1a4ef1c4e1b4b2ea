"""Checks and registration of `qk_norm_rope_kv_write`."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.qk_norm_rope_kv_write.reference import reference
from compiled_mtp.ops.registry import register

_FLOATS = (torch.float32, torch.bfloat16)


def _fake(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_q_heads, kv.shape[4]))


def _launch(*args: Any) -> torch.Tensor:
    # Imported late: a machine without Triton runs the reference.
    from compiled_mtp.ops.qk_norm_rope_kv_write.kernel import launch

    return launch(*args)


def _check_qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
) -> None:
    rows = qkv.shape[0]
    check_shape("kv", kv, (None, 2, num_kv_heads, None, None), "pass the cache of this layer")
    hd, block_size = kv.shape[4], kv.shape[3]
    check_shape("qkv", qkv, (None, (2 * num_q_heads + 2 * num_kv_heads) * hd), "pass q|gate heads, k, v")
    check_dtype("qkv", qkv, _FLOATS, "cast the activations")
    check_last_contiguous("qkv", qkv)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_shape(name, weight, (hd,), "pass one weight a dim of a head")
        check_last_contiguous(name, weight)
    check_shape("cos_sin", cos_sin, (None, None), "pass [positions, rotary dims]")
    check_dtype("cos_sin", cos_sin, (torch.float32,), "keep angles in float32")
    check_last_contiguous("cos_sin", cos_sin)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > hd:
        raise fail(
            "rotary dims", f"be even and at most {hd}", cos_sin.shape[1], "check partial_rotary_factor"
        )
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape(name, index, (rows,), "pass one entry a row")
        check_dtype(name, index, (torch.int64,), "pass int64")
        check_last_contiguous(name, index)
    check_last_contiguous("kv", kv)
    if kv_scale is None:
        check_dtype("kv", kv, (qkv.dtype,), "store the dtype of qkv, or float8_e4m3fn with kv_scale")
    else:
        check_dtype("kv", kv, (torch.float8_e4m3fn,), "drop kv_scale for an unquantised cache")
        check_shape("kv_scale", kv_scale, (kv.shape[0], 2, num_kv_heads, block_size), "one scale a vector")
        check_dtype("kv_scale", kv_scale, (torch.float32,), "keep scales in float32")
        check_last_contiguous("kv_scale", kv_scale)


_op = register(
    "qk_norm_rope_kv_write",
    reference,
    _fake,
    mutates=("kv", "kv_scale"),
    launch=_launch,
    check=_check_qk_norm_rope_kv_write,
)


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to the paged cache, return the queries.

    Shapes, dtypes and what is mutated: see `reference`. Raises ValueError for shapes, dtypes or strides that
    do not fit each other.
    """
    return _op(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        kv,
        kv_scale,
        num_q_heads,
        num_kv_heads,
        eps,
    )
