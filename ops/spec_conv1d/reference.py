"""The specifications of `spec_conv1d` and `conv_prefill`; the latter is also the CPU route."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import check_prompt_chunks, fail
from compiled_mtp.ops.numerics import sigmoid, silu, softplus
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, I32, I64, Like, Remedy

HISTORY = 3  # earlier rows that a convolution of 4 taps reads
L2_EPS = 1e-6


def _convolve(window: Tensor, conv_weight: Tensor) -> Tensor:
    """Return silu(causal convolution), oldest tap first: window [B, rows + 3, C] f32 -> [B, rows, C]."""
    rows = window.shape[1] - HISTORY
    taps = conv_weight.float().t().contiguous()
    total = window[:, :rows] * taps[0]
    for tap in range(1, HISTORY + 1):
        total.addcmul_(window[:, tap : tap + rows], taps[tap])
    return silu(total)


def _split_heads(
    mixed: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split channels [rows, C] into q (l2norm * dk^-0.5), k (l2norm), v, [rows, heads, dim], contiguous."""
    rows = mixed.shape[0]
    key = num_k_heads * head_k_dim
    both = mixed[:, : 2 * key].view(rows, 2, num_k_heads, head_k_dim)
    scale = (both * both).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
    q, k = (both * scale).unbind(1)
    v = mixed[:, 2 * key :].contiguous().view(rows, num_v_heads, head_v_dim)
    return q * head_k_dim**-0.5, k.contiguous(), v


def gate_columns(proj: Tensor, gates: Tensor | None, channels: int, num_v_heads: int, v_dim: int) -> Tensor:
    """Return b|a [rows, 2 nv]: `gates` if given, else the columns of proj after its channels and z."""
    first = channels + num_v_heads * v_dim
    return proj[:, first : first + 2 * num_v_heads] if gates is None else gates


def _decay_and_beta(columns: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return g (log decay) and beta, [rows, nv] f32, from the columns b|a."""
    b, a = columns.float().view(-1, 2, a_log.shape[0]).unbind(1)
    return softplus(a + dt_bias).mul_(a_log.exp()).neg_(), sigmoid(b).contiguous()


def _history(conv_ring: Tensor, state_index: Tensor, first: Tensor) -> Tensor:
    """Return the raw inputs [B, 3, C] f32 of the 3 positions before `first` [B], zero before position 0."""
    positions = first[:, None] + torch.arange(-HISTORY, 0, device=first.device)
    rows = conv_ring[state_index.long()[:, None], positions % conv_ring.shape[1]]
    if int(first.min()) >= HISTORY:
        return rows.float()
    return rows.float().masked_fill((positions < 0)[..., None], 0.0)


class GDNInputs(NamedTuple):
    """The gated delta rule's inputs per row: q, k [rows, nk, dk], v [rows, nv, dv], decay, beta [rows, nv].

    decay is exp(g) from spec_conv1d, and the log decay g from conv_prefill.
    """

    q: Annotated[Tensor, "rows num_k_heads head_k_dim", F32]
    k: Annotated[Tensor, "rows num_k_heads head_k_dim", F32]
    v: Annotated[Tensor, "rows num_v_heads head_v_dim", F32]
    decay: Annotated[Tensor, "rows num_v_heads", F32]
    beta: Annotated[Tensor, "rows num_v_heads", F32]


_SHAPES = Remedy("check the head counts and head dims")
_CHUNKS = Remedy("pass one for each prompt chunk")
_CHANNELS = "2*num_k_heads*head_k_dim+num_v_heads*head_v_dim"
Projection = Annotated[Tensor, "rows columns", ACTIVATION, Remedy("flatten requests and window into rows")]
ConvWeight = Annotated[Tensor, f"{_CHANNELS} 4", Like("proj"), CONTIGUOUS, _SHAPES]
Gates = Annotated[Tensor, "rows 2*num_v_heads", Like("proj"), Remedy("pass b|a of the same rows")]
HeadVector = Annotated[Tensor, "num_v_heads", F32, CONTIGUOUS, _SHAPES]
ConvRing = Annotated[Tensor, f"_ R {_CHANNELS}", Like("proj"), CONTIGUOUS, _SHAPES]


def _holds_all_columns(
    columns: int, R: int, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int,
    gates: Tensor | None,
) -> None:  # fmt: skip
    if num_v_heads % num_k_heads:
        heads = (num_v_heads, num_k_heads)
        raise fail("num_v_heads", "be a multiple of num_k_heads", heads, "check the config")
    wanted = 2 * (num_k_heads * head_k_dim + num_v_heads * head_v_dim)
    names = "q|k|v|z"
    if gates is None:
        wanted, names = wanted + 2 * num_v_heads, "q|k|v|z|b|a"
    if columns < wanted:
        raise fail("proj", f"have at least {wanted} columns ({names})", columns, _SHAPES.text)
    if R < HISTORY:
        raise fail("conv_ring", f"hold {HISTORY} rows", R, "use a longer ring")


def _windows_fit(
    rows: int, B: int, columns: int, R: int,
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, gates: Tensor | None,
) -> None:  # fmt: skip
    _holds_all_columns(columns, R, num_k_heads, num_v_heads, head_k_dim, head_v_dim, gates)
    if B == 0 or rows % B:
        raise fail("proj", "have the same number of rows for each request", (rows, B), "pad windows")
    if rows // B + HISTORY > R:
        raise fail("conv_ring", f"hold a window and {HISTORY} rows", R, "use a longer ring")


def _chunks_fit(
    columns: int, R: int, P: int,
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, gates: Tensor | None,
) -> None:  # fmt: skip
    _holds_all_columns(columns, R, num_k_heads, num_v_heads, head_k_dim, head_v_dim, gates)
    check_prompt_chunks(P)


# Ring and cursors are written before a fence: in_proj, or the embedding where in_proj's weight is resident
# (see gdn_verify).
@operator(
    mutates=("conv_ring",),
    launches=tuple(
        Launch(name, reads_early=("conv_weight", "a_log", "dt_bias", "conv_ring", "state_index", "pos"))
        for name in ("spec_conv1d_kernel", "window_conv1d_kernel")
    ),
    check=_windows_fit,
    has_cpu_route=True,
)
def spec_conv1d(
    proj: Projection,
    conv_weight: ConvWeight,
    a_log: HeadVector,
    dt_bias: HeadVector,
    conv_ring: ConvRing,
    state_index: Annotated[Tensor, "B", I32],
    pos: Annotated[Tensor, "B", I64],
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    gates: Gates | None = None,
) -> GDNInputs:
    """Compute causal convolution of 4 taps with silu, l2norm of q and k, and gates of B windows of W rows.

    proj [B*W, P] (any row stride) has the columns q|k|v|z|b|a and optional padding, or q|k|v|z with b|a in
    gates [B*W, 2 nv]; conv_weight [C, 4], oldest tap first; both of proj's dtype; a_log, dt_bias [nv].
    Mutates conv_ring [slots, R, C] of proj's dtype: in slot state_index[b], the three rows before position
    pos[b] are read (zero before position 0), and row b*W+k is written to ring entry (pos[b] + k) mod R.
    Returns q [B*W, nk, dk] (l2norm, times dk^-0.5), k [B*W, nk, dk] (l2norm), v [B*W, nv, dv], exp(g) and
    beta [B*W, nv], with g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b).
    Source: Gated Delta Networks, arXiv 2412.06464.
    """
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
    columns = gate_columns(proj, gates, channels, num_v_heads, head_v_dim)
    g, beta = _decay_and_beta(columns, a_log, dt_bias)
    return GDNInputs(q, k, v, g.exp_(), beta)


@operator(mutates=("conv_ring",), check=_chunks_fit)
def conv_prefill(
    proj: Projection,
    conv_weight: ConvWeight,
    a_log: HeadVector,
    dt_bias: HeadVector,
    conv_ring: ConvRing,
    state_index: Annotated[Tensor, "P", I32, _CHUNKS],
    start: Annotated[Tensor, "P", I64, _CHUNKS],
    length: Annotated[Tensor, "P", I64, _CHUNKS],
    first_row: Annotated[Tensor, "P", I64, _CHUNKS],
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    mark: Annotated[Tensor, "P", I64, _CHUNKS] | None = None,
    gates: Gates | None = None,
) -> GDNInputs:
    """`spec_conv1d` over P prompt chunks in T rows.

    Shared arguments are those of spec_conv1d. Prompt chunk p has length[p] rows at positions from start[p]
    on, in the rows from first_row[p] on, a multiple of 8. first_row never falls; chunks of length 0 come last
    and change nothing. At most 16 chunks, one per slot. Mutates conv_ring: a chunk's last three rows are
    written to it, fewer if the chunk is shorter. Where mark[p], the snapshot offset, is not 0, it is at least
    3, and the last three of the chunk's first mark[p] rows are also written to the last slot. Returns q, k,
    v, g (the log decay, not its exponential) and beta; rows outside the chunks are zero in all five.
    """
    rows, device = proj.shape[0], proj.device
    channels = conv_weight.shape[0]
    columns = gate_columns(proj, gates, channels, num_v_heads, head_v_dim)
    key = (rows, num_k_heads, head_k_dim)
    shapes = (key, key, (rows, num_v_heads, head_v_dim), (rows, num_v_heads), (rows, num_v_heads))
    found = GDNInputs(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes))
    for chunk, (used, first) in enumerate(zip(length.tolist(), first_row.tolist(), strict=True)):
        if not used:
            continue
        begin, slot = start[chunk : chunk + 1], state_index[chunk : chunk + 1]
        own = proj[first : first + used]
        raw = own[:, :channels]
        window = torch.cat((_history(conv_ring, slot, begin)[0], raw.float()))[None]
        kept = torch.arange(max(used - HISTORY, 0), used, device=device)
        conv_ring[slot.long(), (begin + kept) % conv_ring.shape[1]] = raw[kept]
        if mark is not None and (marked := int(mark[chunk])):
            kept = torch.arange(marked - HISTORY, marked, device=device)
            conv_ring[-1, (begin + kept) % conv_ring.shape[1]] = raw[kept]
        mixed = _convolve(window, conv_weight)[0]
        heads = _split_heads(mixed, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        parts = (*heads, *_decay_and_beta(columns[first : first + used], a_log, dt_bias))
        for whole, part in zip(found, parts, strict=True):
            whole[first : first + used] = part
    return found
