"""What spec_conv1d and conv_prefill compute."""

from __future__ import annotations

import torch

from compiled_mtp.ops.numerics import sigmoid, silu, softplus

HISTORY = 3  # rows before the first one that a kernel of 4 taps reads
L2_EPS = 1e-6


def _convolve(window: torch.Tensor, conv_weight: torch.Tensor) -> torch.Tensor:
    """silu of the causal convolution, oldest tap first: window [B, rows + 3, C] f32 -> [B, rows, C]."""
    rows = window.shape[1] - HISTORY
    taps = conv_weight.float().t().contiguous()
    total = window[:, :rows] * taps[0]
    for tap in range(1, HISTORY + 1):
        total.addcmul_(window[:, tap : tap + rows], taps[tap])
    return silu(total)


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _split_heads(
    mixed: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channels [rows, C] to q (l2norm * dk^-0.5), k (l2norm), v, each [rows, heads, dim] and contiguous."""
    rows = mixed.shape[0]
    key = num_k_heads * head_k_dim
    q = _l2norm(mixed[:, :key].view(rows, num_k_heads, head_k_dim)) * head_k_dim**-0.5
    k = _l2norm(mixed[:, key : 2 * key].view(rows, num_k_heads, head_k_dim))
    v = mixed[:, 2 * key :].contiguous().view(rows, num_v_heads, head_v_dim)
    return q, k, v


def _gates(
    proj: torch.Tensor, first_column: int, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g (log decay) and beta, [rows, nv] f32, from the b and a columns of proj."""
    heads = a_log.shape[0]
    b = proj[:, first_column : first_column + heads].float().contiguous()
    a = proj[:, first_column + heads : first_column + 2 * heads].float().contiguous()
    return -torch.exp(a_log) * softplus(a + dt_bias), sigmoid(b)


def _history(conv_ring: torch.Tensor, state_index: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Raw inputs of the three positions before `first` [B], [B, 3, C] f32, zero before position 0."""
    positions = first[:, None] + torch.arange(-HISTORY, 0, device=first.device)
    rows = conv_ring[state_index.long()[:, None], positions % conv_ring.shape[1]]
    return rows.float().masked_fill((positions < 0)[..., None], 0.0)


def spec_conv1d(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    pos: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = proj.shape[0]
    channels = conv_weight.shape[0]
    batch = state_index.shape[0]
    query_len = rows // batch
    raw = proj[:, :channels].view(batch, query_len, channels)
    window = torch.cat((_history(conv_ring, state_index, pos), raw.float()), dim=1)
    positions = pos[:, None] + torch.arange(query_len, device=pos.device)
    conv_ring[state_index.long()[:, None], positions % conv_ring.shape[1]] = raw
    mixed = _convolve(window, conv_weight).view(rows, channels)
    q, k, v = _split_heads(mixed, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    g, beta = _gates(proj, channels + num_v_heads * head_v_dim, a_log, dt_bias)
    return q, k, v, torch.exp(g), beta


def conv_prefill(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = proj.shape[0]
    channels = conv_weight.shape[0]
    steps = torch.arange(rows, device=proj.device)
    is_padding = (steps >= length)[:, None]
    raw = proj[:, :channels]
    window = torch.cat((_history(conv_ring, state_index, start)[0], raw.float()))[None]
    kept = steps[(steps < length) & (steps >= length - HISTORY)]
    conv_ring[state_index.long(), (start + kept) % conv_ring.shape[1]] = raw[kept]
    mixed = _convolve(window, conv_weight)[0].masked_fill(is_padding, 0.0)
    q, k, v = _split_heads(mixed, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    g, beta = _gates(proj, channels + num_v_heads * head_v_dim, a_log, dt_bias)
    return q, k, v, g.masked_fill(is_padding, 0.0), beta.masked_fill(is_padding, 0.0)
