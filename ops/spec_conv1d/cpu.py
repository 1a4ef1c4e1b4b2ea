"""`spec_conv1d` on a CPU: few torch calls, which cost more than the few rows of a round."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compiled_mtp.ops.kept import kept
from compiled_mtp.ops.numerics import log_sigmoid, number, silu
from compiled_mtp.ops.spec_conv1d.reference import HISTORY, L2_EPS, GDNInputs, gate_columns


def _taps(conv_weight: Tensor) -> Tensor:
    """Return the taps [4, C] float32, the oldest first."""
    return conv_weight.detach().float().t().contiguous()


def _gate_factors(a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return sign, bias and factor, [3, 2 nv], that turn the columns b|a into beta and exp(g).

    Both are exp(factor logsigmoid(sign x + bias)): exp(logsigmoid(x)) = sigmoid(x) gives beta, and
    logsigmoid(-x) = -softplus(x) gives exp(g).
    """
    one = torch.ones_like(a_log)
    sign, bias = torch.cat((one, -one)), torch.cat((torch.zeros_like(one), -dt_bias.detach()))
    return torch.stack((sign, bias, torch.cat((one, a_log.detach().exp()))))


@functools.lru_cache(maxsize=64)
def _ring_rows(
    length: int, query_len: int, slots: tuple[int, ...], starts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the flat ring rows of the 3 rows before each window, and of its own; starts are mod length."""
    pairs = list(zip(slots, starts, strict=True))
    before = [slot * length + (start - back) % length for slot, start in pairs for back in (3, 2, 1)]
    own = [slot * length + (start + row) % length for slot, start in pairs for row in range(query_len)]
    return torch.tensor(before), torch.tensor(own)


def _windows(raw: Tensor, conv_ring: Tensor, slots: list[int], starts: list[int]) -> Tensor:
    """Return the 3 rows before each window and its own, [B, 3 + W, C] float32; write its own to conv_ring."""
    batch, channels, length = len(slots), raw.shape[1], conv_ring.shape[1]
    query_len = raw.shape[0] // batch
    residues = tuple([start % length for start in starts])
    before, own = _ring_rows(length, query_len, tuple(slots), residues)
    ring = conv_ring.view(-1, channels)
    history = ring.index_select(0, before)
    if min(starts) < HISTORY:
        for request, start in enumerate(starts):
            first = request * HISTORY
            history[first : first + max(HISTORY - start, 0)] = 0
    ring.index_copy_(0, own, raw)
    parts = (history, raw)
    if batch > 1:
        parts = (history.view(batch, HISTORY, channels), raw.view(batch, query_len, channels))
    return torch.cat(parts, dim=-2).float()


def spec_conv1d(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_ring: Tensor,
    state_index: Tensor,
    pos: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    gates: Tensor | None,
) -> GDNInputs:
    slots, starts = state_index.tolist(), pos.tolist()
    rows, channels, batch = proj.shape[0], conv_weight.shape[0], len(slots)
    query_len = rows // batch
    window = _windows(proj[:, :channels], conv_ring, slots, starts)
    strides = (channels, (query_len + HISTORY) * channels, channels, 1)
    shifted = window.as_strided((HISTORY + 1, batch, query_len, channels), strides).unbind(0)
    taps = kept(_taps, conv_weight).unbind(0)
    total = shifted[0] * taps[0]
    for tap in range(1, HISTORY + 1):
        total.addcmul_(shifted[tap], taps[tap])
    mixed = silu(total)

    heads = mixed.as_strided(
        (rows, 2, num_k_heads, head_k_dim), (channels, num_k_heads * head_k_dim, head_k_dim, 1)
    )
    scales = (heads * heads).sum(-1, keepdim=True).add_(number(L2_EPS)).rsqrt_()
    (q, k), (q_scale, k_scale) = heads.unbind(1), scales.unbind(1)
    first_value = 2 * num_k_heads * head_k_dim
    v = mixed.as_strided((rows, num_v_heads, head_v_dim), (channels, head_v_dim, 1), first_value)

    sign, bias, factor = kept(_gate_factors, a_log, dt_bias).unbind(0)
    columns = gate_columns(proj, gates, channels, num_v_heads, head_v_dim).float()
    logarithms = log_sigmoid(torch.addcmul(bias, columns, sign)).mul_(factor)
    beta, decay = logarithms.view(rows, 2, num_v_heads).unbind(1)
    return GDNInputs(
        q * q_scale.mul_(number(head_k_dim**-0.5)),
        k * k_scale,
        v.contiguous(),
        torch.exp(decay),
        torch.exp(beta),
    )
