"""Convolution, l2norm and gates in one launch that reads the merged projection directly."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS, PROMPT_CHUNK_MULTIPLE
from compiled_mtp.ops.prompt_chunks_triton import piece_of_row
from compiled_mtp.ops.spec_conv1d.reference import gate_columns

OPTIONS = {"enable_fp_fusion": True}
# All rows of a program belong to one prompt chunk, which begins at a multiple of this.
PREFILL_ROWS = PROMPT_CHUNK_MULTIPLE
# From this number of rows on, a program takes a whole window of at most MOST_UNROLLED rows: one program per
# row would be more than an H200 runs at once.
LEAST_ROWS_OF_WINDOWS = 32
MOST_UNROLLED = 8


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias)."""
    x = a + dt_bias
    small = tl.exp(tl.minimum(x, 20.0))
    shifted = 1.0 + small
    # log1p: the ratio corrects the rounding of 1 + x; where 1 + x rounds to 1, log1p(x) is x.
    ratio = tl.where(shifted == 1.0, 1.0, small / tl.where(shifted == 1.0, 1.0, shifted - 1.0))
    softplus = tl.where(shifted == 1.0, small, tl.log(shifted) * ratio)
    return -tl.exp(a_log) * tl.where(x > 20.0, x, softplus)


@triton.jit
def head_channels(block, NK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Return the first channel and the number of channels of a head; heads are in the order q, k, v."""
    is_key = block < 2 * NK
    first = tl.where(is_key, block * DK, 2 * NK * DK + (block - 2 * NK) * DV)
    return first, tl.where(is_key, DK, DV)


# Scalar conditions are widened to blocks: the interpreter takes only blocks as masks.
@triton.jit
def in_window(token, back: tl.constexpr, inside, BLOCK: tl.constexpr):
    """Return `inside` where the row `back` rows before a token lies in the same window, else false."""
    return inside & (tl.full((BLOCK,), token, tl.int32) >= back)


@triton.jit
def load_history(
    ring, position, token, back: tl.constexpr, inside,
    CHANNELS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the row `back` positions before a token from the ring if it lies before the window, else zeros."""
    earlier = position - back
    is_before = (tl.full((BLOCK,), token, tl.int32) < back) & (tl.full((BLOCK,), earlier, tl.int64) >= 0)
    return tl.load(ring + (earlier % RING) * CHANNELS, mask=inside & is_before, other=0.0)


@triton.jit
def store_gates(own_gates, exp_g, beta, log_rate, bias, is_head, NV: tl.constexpr):
    """Store exp(g) and beta of a row's heads, computed from its columns b|a."""
    b = tl.load(own_gates, mask=is_head, other=0.0).to(tl.float32)
    a = tl.load(own_gates + NV, mask=is_head, other=0.0).to(tl.float32)
    tl.store(exp_g, tl.exp(log_decay(a, log_rate, bias)), mask=is_head)
    tl.store(beta, 1.0 / (1.0 + tl.exp(-b)), mask=is_head)


@triton.jit
def store_head(
    y, q, k, v, row, block, lane, inside,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Store silu(y) of a head's convolution y, one row or several, with l2norm for q and k."""
    y = y / (1.0 + tl.exp(-y))
    norm = tl.rsqrt(tl.sum(y * y, len(y.shape) - 1, keep_dims=len(y.shape) > 1) + 1e-6)
    if block < NK:
        tl.store(q + (row * NK + block) * DK + lane, y * norm * (DK**-0.5), mask=inside)
    elif block < 2 * NK:
        tl.store(k + (row * NK + block - NK) * DK + lane, y * norm, mask=inside)
    else:
        tl.store(v + (row * NV + block - 2 * NK) * DV + lane, y, mask=inside)


# One binary for every window length: Triton would specialise on 1 and on multiples of 16.
@triton.jit(do_not_specialize=["query_len"])
def spec_conv1d_kernel(
    proj,
    gates,
    conv_weight,
    a_log,
    dt_bias,
    conv_ring,
    state_index,
    pos,
    q,
    k,
    v,
    exp_g,
    beta,
    proj_stride,
    gates_stride,
    query_len,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Read parameters, cursors and the rows before the window before the wait (reference.py says why that is
    # safe); read the projection and write after it.
    if PDL:
        gdc_launch_dependents()
    CHANNELS: tl.constexpr = 2 * NK * DK + NV * DV
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if block == 2 * NK + NV:
        head = tl.arange(0, BLOCK_HEADS)
        is_head = head < NV
        log_rate = tl.load(a_log + head, mask=is_head, other=0.0)
        bias = tl.load(dt_bias + head, mask=is_head, other=0.0)
        if PDL:
            gdc_wait()
        own_gates = gates + row * gates_stride + head
        store_gates(own_gates, exp_g + row * NV + head, beta + row * NV + head, log_rate, bias, is_head, NV)
    else:
        request = row // query_len
        token = (row - request * query_len).to(tl.int32)
        first, width = head_channels(block, NK, DK, DV)
        lane = tl.arange(0, BLOCK)
        inside = lane < width
        channel = first + lane
        taps = conv_weight + channel * 4
        weight_3 = tl.load(taps, mask=inside, other=0.0)
        weight_2 = tl.load(taps + 1, mask=inside, other=0.0)
        weight_1 = tl.load(taps + 2, mask=inside, other=0.0)
        weight_0 = tl.load(taps + 3, mask=inside, other=0.0)
        slot = tl.load(state_index + request).to(tl.int64)
        position = tl.load(pos + request) + token
        ring = conv_ring + slot * RING * CHANNELS + channel
        old_3 = load_history(ring, position, token, 3, inside, CHANNELS, RING, BLOCK)
        old_2 = load_history(ring, position, token, 2, inside, CHANNELS, RING, BLOCK)
        old_1 = load_history(ring, position, token, 1, inside, CHANNELS, RING, BLOCK)
        if PDL:
            gdc_wait()
        at = proj + row * proj_stride + channel
        raw = tl.load(at, mask=inside, other=0.0)
        new_3 = tl.load(at - 3 * proj_stride, mask=in_window(token, 3, inside, BLOCK), other=0.0)
        new_2 = tl.load(at - 2 * proj_stride, mask=in_window(token, 2, inside, BLOCK), other=0.0)
        new_1 = tl.load(at - proj_stride, mask=in_window(token, 1, inside, BLOCK), other=0.0)
        # One of old and new is zero.
        y = weight_3.to(tl.float32) * (old_3.to(tl.float32) + new_3.to(tl.float32))
        y = tl.fma(weight_2.to(tl.float32), old_2.to(tl.float32) + new_2.to(tl.float32), y)
        y = tl.fma(weight_1.to(tl.float32), old_1.to(tl.float32) + new_1.to(tl.float32), y)
        y = tl.fma(weight_0.to(tl.float32), raw.to(tl.float32), y)
        # The ring holds the window and its history: no program of this launch reads what is written here.
        tl.store(ring + (position % RING) * CHANNELS, raw, mask=inside)
        store_head(y, q, k, v, row, block, lane, inside, NK, NV, DK, DV)


@triton.jit
def window_conv1d_kernel(
    proj,
    gates,
    conv_weight,
    a_log,
    dt_bias,
    conv_ring,
    state_index,
    pos,
    q,
    k,
    v,
    exp_g,
    beta,
    proj_stride,
    gates_stride,
    WINDOW: tl.constexpr,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`spec_conv1d_kernel` with one program for all WINDOW rows of a request, which reads each row once."""
    if PDL:
        gdc_launch_dependents()
    CHANNELS: tl.constexpr = 2 * NK * DK + NV * DV
    block = tl.program_id(0)
    request = tl.program_id(1)
    first_row = request.to(tl.int64) * WINDOW
    if block == 2 * NK + NV:
        head = tl.arange(0, BLOCK_HEADS)
        is_head = head < NV
        log_rate = tl.load(a_log + head, mask=is_head, other=0.0)
        bias = tl.load(dt_bias + head, mask=is_head, other=0.0)
        if PDL:
            gdc_wait()
        for token in tl.static_range(WINDOW):
            row = first_row + token
            own_gates = gates + row * gates_stride + head
            store_gates(
                own_gates, exp_g + row * NV + head, beta + row * NV + head, log_rate, bias, is_head, NV
            )
    else:
        first, width = head_channels(block, NK, DK, DV)
        lane = tl.arange(0, BLOCK)
        inside = lane < width
        channel = first + lane
        taps = conv_weight + channel * 4
        weight_3 = tl.load(taps, mask=inside, other=0.0).to(tl.float32)
        weight_2 = tl.load(taps + 1, mask=inside, other=0.0).to(tl.float32)
        weight_1 = tl.load(taps + 2, mask=inside, other=0.0).to(tl.float32)
        weight_0 = tl.load(taps + 3, mask=inside, other=0.0).to(tl.float32)
        slot = tl.load(state_index + request).to(tl.int64)
        position = tl.load(pos + request)
        ring = conv_ring + slot * RING * CHANNELS + channel
        back_3 = load_history(ring, position, 0, 3, inside, CHANNELS, RING, BLOCK)
        back_2 = load_history(ring, position, 0, 2, inside, CHANNELS, RING, BLOCK)
        back_1 = load_history(ring, position, 0, 1, inside, CHANNELS, RING, BLOCK)
        if PDL:
            gdc_wait()
        raws = ()
        for token in tl.static_range(WINDOW):
            raws += (tl.load(proj + (first_row + token) * proj_stride + channel, mask=inside, other=0.0),)
        # Add zero, as `spec_conv1d_kernel` does: it turns minus zero into zero, so both give the same bits.
        zero = tl.zeros((BLOCK,), tl.float32)
        old_3 = back_3.to(tl.float32) + zero
        old_2 = back_2.to(tl.float32) + zero
        old_1 = back_1.to(tl.float32) + zero
        for token in tl.static_range(WINDOW):
            row = first_row + token
            raw = raws[token]
            new = raw.to(tl.float32)
            y = weight_3 * old_3
            y = tl.fma(weight_2, old_2, y)
            y = tl.fma(weight_1, old_1, y)
            y = tl.fma(weight_0, new, y)
            old_3 = old_2
            old_2 = old_1
            old_1 = new + zero
            # The ring holds the window and its history: no program of this launch reads what is written here.
            tl.store(ring + ((position + token) % RING) * CHANNELS, raw, mask=inside)
            store_head(y, q, k, v, row, block, lane, inside, NK, NV, DK, DV)


@triton.jit(do_not_specialize=["rows", "num_pieces", "last_slot"])
def conv_prefill_kernel(
    proj,
    gates,
    conv_weight,
    a_log,
    dt_bias,
    conv_ring,
    state_index,
    start,
    length,
    first_row,
    q,
    k,
    v,
    g,
    beta,
    mark,
    proj_stride,
    gates_stride,
    rows,
    num_pieces,
    last_slot,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * NK * DK + NV * DV
    block = tl.program_id(0)
    top = tl.program_id(1) * ROWS
    piece = piece_of_row(top, first_row, num_pieces, MOST)
    used = tl.load(length + piece).to(tl.int32)
    first_of_piece = tl.load(first_row + piece).to(tl.int32)
    row = (top + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    # Row within the prompt chunk.
    step = (top - first_of_piece + tl.arange(0, ROWS))[:, None]
    is_row = row < rows
    is_used = step < used
    if block == 2 * NK + NV:
        head = tl.arange(0, BLOCK_HEADS)[None, :]
        is_head = (head < NV) & is_row
        own_gates = gates + row * gates_stride + head
        b = tl.load(own_gates, mask=is_head & is_used, other=0.0).to(tl.float32)
        a = tl.load(own_gates + NV, mask=is_head & is_used, other=0.0).to(tl.float32)
        decay = log_decay(
            a,
            tl.load(a_log + head, mask=head < NV, other=0.0),
            tl.load(dt_bias + head, mask=head < NV, other=0.0),
        )
        tl.store(g + row * NV + head, tl.where(is_used, decay, 0.0), mask=is_head)
        tl.store(beta + row * NV + head, tl.where(is_used, 1.0 / (1.0 + tl.exp(-b)), 0.0), mask=is_head)
    else:
        begin = tl.load(start + piece)
        first, width = head_channels(block, NK, DK, DV)
        lane = tl.arange(0, BLOCK)[None, :]
        inside = lane < width
        channel = first + lane
        ring = conv_ring + tl.load(state_index + piece).to(tl.int64) * RING * CHANNELS + channel
        y = tl.zeros((ROWS, BLOCK), tl.float32)
        for tap in tl.static_range(4):
            back = 3 - tap
            earlier = begin + step - back
            in_segment = inside & is_used & (step >= back)
            in_ring = inside & is_used & (step < back) & (earlier >= 0)
            new = tl.load(proj + (row - back) * proj_stride + channel, mask=in_segment, other=0.0)
            old = tl.load(ring + (earlier % RING) * CHANNELS, mask=in_ring, other=0.0)
            weight = tl.load(conv_weight + channel * 4 + tap, mask=inside, other=0.0)
            weight = tl.broadcast_to(weight.to(tl.float32), (ROWS, BLOCK))
            y = tl.fma(weight, tl.where(in_segment, new, old).to(tl.float32), y)
        store_head(y, q, k, v, row, block, lane, inside & is_row, NK, NV, DK, DV)
        if top == first_of_piece:
            # The chunk's last rows may overwrite the history in the ring. Only this program reads that
            # history, so it writes them itself, after its reads.
            tl.debug_barrier()
            last = (used - 3 + tl.arange(0, 4)).to(tl.int64)[:, None]
            kept = (last >= 0) & (last < used) & (lane < width)
            raw = tl.load(proj + (first_of_piece + last) * proj_stride + channel, mask=kept, other=0.0)
            tl.store(ring + ((begin + last) % RING) * CHANNELS, raw, mask=kept)
            if mark is not None:
                last = (tl.load(mark + piece) - 3 + tl.arange(0, 4))[:, None]
                kept = (last >= 0) & (tl.arange(0, 4)[:, None] < 3) & (lane < width)
                raw = tl.load(proj + (first_of_piece + last) * proj_stride + channel, mask=kept, other=0.0)
                marked_ring = conv_ring + last_slot.to(tl.int64) * RING * CHANNELS + channel
                tl.store(marked_ring + ((begin + last) % RING) * CHANNELS, raw, mask=kept)


def _outputs(
    rows: int, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.empty((rows, num_k_heads, head_k_dim), dtype=torch.float32, device=device)
    v = torch.empty((rows, num_v_heads, head_v_dim), dtype=torch.float32, device=device)
    gate = torch.empty((rows, num_v_heads), dtype=torch.float32, device=device)
    return q, torch.empty_like(q), v, gate, torch.empty_like(gate)


def _constants(
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, ring: int
) -> dict[str, int]:
    return {
        "NK": num_k_heads,
        "NV": num_v_heads,
        "DK": head_k_dim,
        "DV": head_v_dim,
        "RING": ring,
        "BLOCK": triton.next_power_of_2(max(head_k_dim, head_v_dim)),
        "BLOCK_HEADS": triton.next_power_of_2(num_v_heads),
    }


def _gates(args: Any) -> torch.Tensor:
    channels = args.conv_weight.shape[0]
    return gate_columns(args.proj, args.gates, channels, args.num_v_heads, args.head_v_dim)


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    proj, num_k_heads, num_v_heads = args.proj, args.num_k_heads, args.num_v_heads
    rows = proj.shape[0]
    outputs = _outputs(rows, num_k_heads, num_v_heads, args.head_k_dim, args.head_v_dim, proj.device)
    gates = _gates(args)
    has_pdl = device_of(proj.device.index).has_dependent_launch
    requests, blocks = args.state_index.shape[0], 2 * num_k_heads + num_v_heads + 1
    inputs = (
        proj, gates, args.conv_weight, args.a_log, args.dt_bias, args.conv_ring, args.state_index, args.pos,
        *outputs, proj.stride(0), gates.stride(0),
    )  # fmt: skip
    constants = {
        **_constants(num_k_heads, num_v_heads, args.head_k_dim, args.head_v_dim, args.conv_ring.shape[1]),
        "PDL": has_pdl,
        "num_warps": 1,
        "launch_pdl": has_pdl,
        **OPTIONS,
    }
    window = rows // requests
    if rows >= LEAST_ROWS_OF_WINDOWS and 1 < window <= MOST_UNROLLED:
        window_conv1d_kernel[(blocks, requests)](*inputs, WINDOW=window, **constants)
    else:
        spec_conv1d_kernel[(blocks, rows)](*inputs, window, **constants)
    return outputs


def launch_conv_prefill(
    args: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    proj, num_k_heads, num_v_heads = args.proj, args.num_k_heads, args.num_v_heads
    rows = proj.shape[0]
    outputs = _outputs(rows, num_k_heads, num_v_heads, args.head_k_dim, args.head_v_dim, proj.device)
    gates = _gates(args)
    conv_prefill_kernel[(2 * num_k_heads + num_v_heads + 1, triton.cdiv(rows, PREFILL_ROWS))](
        proj, gates, args.conv_weight, args.a_log, args.dt_bias, args.conv_ring, args.state_index, args.start,
        args.length, args.first_row, *outputs, args.mark, proj.stride(0), gates.stride(0), rows,
        args.length.shape[0],
        args.conv_ring.shape[0] - 1,
        **_constants(num_k_heads, num_v_heads, args.head_k_dim, args.head_v_dim, args.conv_ring.shape[1]),
        ROWS=PREFILL_ROWS, MOST=MAX_PROMPT_CHUNKS, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return outputs
