"""The specification of `qk_norm_rope_kv_write` in plain PyTorch; also what runs on a CPU."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def reference(
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

    qkv [M, (2*num_q_heads + 2*num_kv_heads) * hd] float32 or bfloat16: per query head its query, then its
    gate; then the key heads, then the value heads. q_weight, k_weight [hd] enter as 1 + w. cos_sin [P, rot]
    float32 holds rot/2 cosines, then rot/2 sines, per position; dims j and j + rot/2 of the first rot dims
    turn together (NeoX halves). positions [M] int64; slot_mapping [M] int64 is block * block_size + offset,
    -1 writes nothing.
    Mutates kv [num_blocks, 2, num_kv_heads, block_size, hd] (keys, then values; the dtype of qkv, or
    float8_e4m3fn with kv_scale [num_blocks, 2, num_kv_heads, block_size] float32, absmax / 448 of a vector).
    Returns q [M, num_q_heads, hd] in the dtype of qkv; arithmetic is float32 with one rounding at the end.
    """
    rows, hd = qkv.shape[0], kv.shape[4]
    q_end = 2 * num_q_heads * hd
    k_end = q_end + num_kv_heads * hd
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q = _norm_rope(qkv[:, :q_end].view(rows, num_q_heads, 2, hd)[:, :, 0], q_weight, cos, sin, eps)
    k = _norm_rope(qkv[:, q_end:k_end].view(rows, num_kv_heads, hd), k_weight, cos, sin, eps)
    v = qkv[:, k_end:].view(rows, num_kv_heads, hd)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, offset = slots // kv.shape[3], slots % kv.shape[3]
    for half, values in enumerate((k, v)):
        values = values[written]
        if kv_scale is None:
            kv[block, half, :, offset] = values.to(kv.dtype)
        else:
            values = values.float()
            scale = values.abs().amax(-1) / E4M3_MAX
            divisor = torch.where(scale == 0.0, 1.0, scale).unsqueeze(-1)
            stored = (values / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(kv.dtype)
            kv.view(torch.uint8)[block, half, :, offset] = stored.view(torch.uint8)
            kv_scale[block, half, :, offset] = scale
    return q.to(qkv.dtype)


def _norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm over the last dimension with factor 1 + w, then the rotation of its first dims; float32."""
    x = x.float()
    x = x * (1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)) * (1.0 + weight.float())
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
