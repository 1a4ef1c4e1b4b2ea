"""`qk_norm_rope_kv_write` on a CPU: all heads at once; two copies write a window's keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.kept import kept
from compiled_mtp.ops.numerics import number
from compiled_mtp.ops.qk_norm_rope_kv_write.reference import angles_of, write_pages


def _stacked(q_weight: Tensor, k_weight: Tensor) -> Tensor:
    return torch.stack((q_weight.detach().float(), k_weight.detach().float()))


def _write(kv: Tensor, kv_scale: Tensor | None, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Do what `write_pages` does; rows that are consecutive in one block take two plain copies."""
    slots = slot_mapping.tolist()
    first = slots[0] if slots else -1
    block, offset = divmod(first, kv.shape[3])
    is_run = first >= 0 and slots == list(range(first, first + len(slots)))
    if kv_scale is not None or not is_run or offset + len(slots) > kv.shape[3]:
        write_pages(kv, kv_scale, slot_mapping, k, v)
        return
    keys, values = kv[block].narrow(2, offset, len(slots)).unbind(0)
    keys.copy_(k.transpose(0, 1))
    values.copy_(v.transpose(0, 1))


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv: Tensor,
    kv_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
    row_end: int = 0,
    column_end: int = 0,
) -> Tensor:
    rows, hd, half = qkv.shape[0], kv.shape[4], cos_sin.shape[1] // 2
    num_heads = num_q_heads + num_kv_heads
    heads = qkv.view(rows, 2 * num_heads, hd)
    x = qkv.new_empty((rows, num_heads, hd), dtype=torch.float32)
    parts = (x[:, :num_q_heads], x[:, num_q_heads:])
    parts[0].copy_(heads[:, : 2 * num_q_heads : 2])
    k, v = heads[:, 2 * num_q_heads :].view(rows, 2, num_kv_heads, hd).unbind(1)
    parts[1].copy_(k)
    scale = (x * x).sum(-1, keepdim=True).mul_(number(1.0 / hd)).add_(number(eps)).rsqrt_()
    x.mul_(scale)
    for part, weight in zip(parts, kept(_stacked, q_weight, k_weight).unbind(0), strict=True):
        part.addcmul_(part, weight)

    angles = angles_of(cos_sin, positions, row_end, column_end)
    cos, sin = angles.view(rows, 2, 1, 1, half).unbind(1)
    turned = x.as_strided((rows, num_heads, 2, half), (num_heads * hd, hd, half, 1))
    crossed = turned * sin
    turned.mul_(cos)
    turned[:, :, 0].sub_(crossed[:, :, 1])
    turned[:, :, 1].add_(crossed[:, :, 0])

    _write(kv, kv_scale, slot_mapping, parts[1], v)
    return parts[0].to(qkv.dtype, copy=True, memory_format=torch.contiguous_format)
