"""The specification of `qk_norm_rope_kv_write`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail, wrong_dtype
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, FP8, I64, Like, Remedy

E4M3_MAX = 448.0
Vector = Annotated[Tensor, "D", ACTIVATION, Remedy("pass one weight a dim of a head")]


def _cache_and_angles_fit(
    qkv: Tensor, positions: Tensor, kv: Tensor, kv_scale: Tensor | None, rotary: int, D: int
) -> None:
    if rotary % 2 or rotary > D:
        raise fail("rotary dims", f"be even and at most {D}", rotary, "check partial_rotary_factor")
    if positions.dim() > 2 or (positions.dim() == 2 and positions.shape[0] != 3):
        raise fail("positions", "have shape (M,) or (3, M)", tuple(positions.shape), "pass one or three axes")
    dtype = qkv.dtype if kv_scale is None else FP8
    if kv.dtype != dtype:
        raise wrong_dtype("kv", kv, (dtype,))


# Positions and slots are written before a fence: the projection or, where its weight is resident, the
# embedding or the draft's fc. Queries, keys and values are not read early.
@operator(
    mutates=("kv", "kv_scale"),
    launches=(
        Launch(
            "qk_norm_rope_kv_write_kernel",
            reads_early=("q_weight", "k_weight", "cos_sin", "positions", "slot_mapping"),
        ),
    ),
    check=_cache_and_angles_fit,
    has_cpu_route=True,
)
def qk_norm_rope_kv_write(
    qkv: Annotated[
        Tensor, "M (2*num_q_heads+2*num_kv_heads)*D", ACTIVATION, Remedy("pass q|gate heads, k, v")
    ],
    q_weight: Vector,
    k_weight: Vector,
    cos_sin: Annotated[Tensor, "_ rotary", F32, Remedy("pass [positions, rotary dims]")],
    positions: Annotated[Tensor, "... M", I64, CONTIGUOUS, Remedy("pass one entry a row")],
    slot_mapping: Annotated[Tensor, "M", I64, Remedy("pass one entry a row")],
    kv: Annotated[
        Tensor, "blocks 2 num_kv_heads block_size D", (*ACTIVATION, FP8), Remedy("pass this layer's cache")
    ],
    kv_scale: Annotated[Tensor, "blocks 2 num_kv_heads block_size", F32, Remedy("pass one scale a vector")]
    | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
    row_end: int = 0,
    column_end: int = 0,
) -> Annotated[Tensor, "M num_q_heads D", Like("qkv")]:
    """Normalise and rotate queries and keys, write keys and values to the paged cache, return the queries.

    qkv [M, (2*num_q_heads + 2*num_kv_heads) * D] float32 or bfloat16: per query head its query, then its
    gate; then the key heads, then the value heads. q_weight, k_weight [D] enter as 1 + w. cos_sin [P, rot]
    holds rot/2 cosines, then rot/2 sines, per position; dims j and j + rot/2 of the first rot dims turn
    together (NeoX halves). positions [M], or [3, M]: of times, rows and columns (see `angles_of`);
    slot_mapping [M] is block * block_size + offset, or -1 to write
    nothing. Mutates kv [blocks, 2, num_kv_heads, block_size, D] (keys, then values; the dtype of qkv, or
    float8_e4m3fn with kv_scale [blocks, 2, num_kv_heads, block_size], absmax / 448 of a vector).
    Returns q [M, num_q_heads, D] in the dtype of qkv; arithmetic is float32 with one rounding at the end.
    """
    rows, hd = qkv.shape[0], kv.shape[4]
    q_end = 2 * num_q_heads * hd
    k_end = q_end + num_kv_heads * hd
    cos, sin = angles_of(cos_sin, positions, row_end, column_end).unsqueeze(1).chunk(2, dim=-1)
    q = _norm_rope(qkv[:, :q_end].view(rows, num_q_heads, 2, hd)[:, :, 0], q_weight, cos, sin, eps)
    k = _norm_rope(qkv[:, q_end:k_end].view(rows, num_kv_heads, hd), k_weight, cos, sin, eps)
    v = qkv[:, k_end:].view(rows, num_kv_heads, hd)
    write_pages(kv, kv_scale, slot_mapping, k, v)
    return q.to(qkv.dtype)


def angles_of(cos_sin: Tensor, positions: Tensor, row_end: int, column_end: int) -> Tensor:
    """Return the cosines and sines [M, rot] of positions [M] or [3, M].

    Of three axes, frequencies 1, 4, .. below row_end take the row, 2, 5, .. below column_end the column, and
    all others the time (interleaved M-RoPE of Qwen3-VL).
    """
    if positions.dim() == 1:
        return cos_sin.index_select(0, positions)
    frequency = torch.arange(cos_sin.shape[1] // 2, device=cos_sin.device)
    is_row = (frequency % 3 == 1) & (frequency < row_end)
    is_column = (frequency % 3 == 2) & (frequency < column_end)
    at = positions[is_row.long() + 2 * is_column.long()].t().repeat(1, 2)
    return cos_sin[at, torch.arange(cos_sin.shape[1], device=at.device)]


def write_pages(kv: Tensor, kv_scale: Tensor | None, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [M, num_kv_heads, D] to kv at slot_mapping [M], -1 for rows that are not written."""
    written = slot_mapping >= 0
    is_whole = bool(written.all())
    slots = slot_mapping if is_whole else slot_mapping[written]
    block, offset = slots // kv.shape[3], slots % kv.shape[3]
    for half, values in enumerate((k, v)):
        values = values if is_whole else values[written]
        if kv_scale is None:
            kv[block, half, :, offset] = values.to(kv.dtype)
        else:
            values = values.float()
            scale = values.abs().amax(-1) / E4M3_MAX
            divisor = torch.where(scale == 0.0, 1.0, scale).unsqueeze(-1)
            stored = (values / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(kv.dtype)
            kv.view(torch.uint8)[block, half, :, offset] = stored.view(torch.uint8)
            kv_scale[block, half, :, offset] = scale


def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x with factor 1 + w, its first dims rotated by cos and sin; float32."""
    x = x.float()
    x = x * (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    x = torch.addcmul(x, x, weight.float())
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(turned)
    return x
