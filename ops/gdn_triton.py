"""The parts that the GDN kernels share: state tile, application of a record, gated norm."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS
from compiled_mtp.ops.prompt_chunks_triton import pieces_of_rows

OPTIONS = {"enable_fp_fusion": True}

# A state tile [DK / LANES, BLOCK_V * LANES] holds state element (v, k) in row k // LANES and column
# v * LANES + k % LANES. A thread then owns whole columns, and a sum over k crosses threads only for its last
# LANES elements; on a tile [v, k] the same sum takes ninety shuffles per token. The 16 values of v of a warp
# share the loads of vectors over k: from four requests on, this is faster on an H200 than 4 or 8 values, or
# 32 values in four warps.
LANES = 32
BLOCK_V = 16
NUM_WARPS = 1
MIN_HEAD_DIM = 16

NORM_PAIRS = 8
NORM_WARPS = 4


@triton.jit
def state_offsets(block, DK: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    """Return offsets [DK / LANES, BLOCK_V * LANES] of a tile's elements in one head's state [dv, dk]."""
    column = tl.arange(0, BLOCK_V * LANES)
    row = tl.arange(0, DK // LANES)
    value = block * BLOCK_V + column // LANES
    return value[None, :] * DK + row[:, None] * LANES + (column % LANES)[None, :]


@triton.jit
def load_key(at, DK: tl.constexpr, LANES: tl.constexpr):
    """Load a vector over k as [DK / LANES, LANES]."""
    row = tl.arange(0, DK // LANES)
    lane = tl.arange(0, LANES)
    return tl.load(at + row[:, None] * LANES + lane[None, :])


@triton.jit
def widen_key(key, BLOCK_V: tl.constexpr):
    """Repeat a vector over k for every v of a tile."""
    ROWS: tl.constexpr = key.shape[0]
    LANES: tl.constexpr = key.shape[1]
    wide = tl.broadcast_to(key[:, None, :], (ROWS, BLOCK_V, LANES))
    return tl.reshape(wide, (ROWS, BLOCK_V * LANES))


@triton.jit
def apply_record(tile, wide_key, update, exp_g, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    """Return exp_g * S + u k^T by one product and one fma: verify and every fold give the same bits."""
    wide = tl.reshape(tl.broadcast_to(update[:, None], (BLOCK_V, LANES)), (1, BLOCK_V * LANES))
    return tl.fma(tl.broadcast_to(wide, tile.shape), wide_key, tile * exp_g)


@triton.jit
def load_record(
    ring_k, ring_u, ring_g, k_rows, v_rows, position, value,
    DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Load the key, the update of the rows `value`, and exp_g of one position."""
    row = position % RING
    key = load_key(ring_k + (k_rows + row) * DK, DK, LANES)
    return key, tl.load(ring_u + (v_rows + row) * DV + value), tl.load(ring_g + v_rows + row)


@triton.jit
def fold_records(
    tile,
    ring_k,
    ring_u,
    ring_g,
    k_rows,
    v_rows,
    begin,
    count,
    value,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):
    """Apply the records of positions [begin, begin + count), count > 0, to the tile of the rows `value`.

    k_rows and v_rows are the first rows of the head's rings in ring_k and ring_u. Returns the new tile.
    """
    last = begin + count - 1
    key, update, exp_g = load_record(
        ring_k, ring_u, ring_g, k_rows, v_rows, begin, value, DK, DV, RING, LANES
    )
    key_1, update_1, exp_g_1 = load_record(
        ring_k, ring_u, ring_g, k_rows, v_rows, tl.minimum(begin + 1, last), value,
        DK, DV, RING, LANES,
    )  # fmt: skip
    for step in range(count):
        # Two records load while one is applied; the last steps load the last record again.
        key_2, update_2, exp_g_2 = load_record(
            ring_k, ring_u, ring_g, k_rows, v_rows, tl.minimum(begin + step + 2, last), value,
            DK, DV, RING, LANES,
        )  # fmt: skip
        tile = apply_record(tile, widen_key(key, BLOCK_V), update, exp_g, BLOCK_V, LANES)
        key, update, exp_g = key_1, update_1, exp_g_1
        key_1, update_1, exp_g_1 = key_2, update_2, exp_g_2
    return tile


@triton.jit(do_not_specialize=["pairs", "num_pieces"])
def gated_norm_kernel(
    out,
    z,
    norm_weight,
    length,
    first_row,
    y,
    z_stride,
    pairs,
    num_pieces,
    eps,
    NV: tl.constexpr,
    DV: tl.constexpr,
    PAIRS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
    RESIDENT: tl.constexpr,
    MOST: tl.constexpr,
):
    if PDL and RESIDENT:
        # The next product loads its resident weight while gdn_verify still reads states.
        gdc_launch_dependents()
    lane = tl.arange(0, DV)[None, :]
    weight = tl.load(norm_weight + lane)  # no kernel writes it
    if PDL:
        # Launching dependents after the wait makes the kernel a fence (`registry.Launch`): calls of
        # gdn_verify may then follow one another directly.
        gdc_wait()
        if not RESIDENT:
            gdc_launch_dependents()
    # A program takes PAIRS (token, head) pairs: with one pair it would take longer to start than to run.
    pair = (tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS))[:, None]
    inside = pair < pairs
    row = pair // NV
    at = pair * DV + lane
    x = tl.load(out + at, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + (pair % NV) * DV + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None]
    gate = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    result = x * scale * weight * gate
    if length is not None:
        own_row = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)) // NV
        piece = pieces_of_rows(own_row, first_row, num_pieces, MOST)
        is_real = own_row - tl.load(first_row + piece) < tl.load(length + piece)
        result = tl.where(is_real[:, None], result, 0.0)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


def launch_gated_norm(
    out: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_activation: str,
    length: torch.Tensor | None = None,
    first_row: torch.Tensor | None = None,
    resident: bool = False,
) -> torch.Tensor:
    """Return rmsnorm(out [M, nv, dv]) * norm_weight * act(z [M, nv*dv]) in z's dtype.

    length, first_row [P]: the prompt chunks of a prefill launch; rows outside them become 0. None: every row
    counts. resident: the weight of the next product may be resident; the kernel is then no fence.
    """
    rows, heads, width = out.shape
    y = torch.empty((rows, heads * width), dtype=z.dtype, device=z.device)
    has_pdl = device_of(z.device.index).has_dependent_launch
    pairs = rows * heads
    gated_norm_kernel[(triton.cdiv(pairs, NORM_PAIRS),)](
        out, z, norm_weight, length, first_row, y, z.stride(0), pairs,
        0 if first_row is None else first_row.shape[0], eps,
        NV=heads, DV=width, PAIRS=NORM_PAIRS, SIGMOID=gate_activation == "sigmoid", PDL=has_pdl,
        RESIDENT=resident, MOST=MAX_PROMPT_CHUNKS, num_warps=NORM_WARPS, launch_pdl=has_pdl, **OPTIONS,
    )  # fmt: skip
    return y


def check_head_dims(head_k_dim: int, head_v_dim: int) -> None:
    """Raise ValueError for head dims that the tiles cannot hold."""
    for name, dim in (("head_k_dim", head_k_dim), ("head_v_dim", head_v_dim)):
        if dim < MIN_HEAD_DIM or dim & (dim - 1):
            raise ValueError(
                f"{name} must be a power of two of at least {MIN_HEAD_DIM} on a GPU, got {dim}; run on a CPU"
            )


def tile_constants(
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, ring: int
) -> dict[str, int]:
    """Return the constexpr arguments of gdn_verify; they depend on the layer's shape alone."""
    check_head_dims(head_k_dim, head_v_dim)
    return {
        "NK": num_k_heads,
        "NV": num_v_heads,
        "DK": head_k_dim,
        "DV": head_v_dim,
        "RING": ring,
        "BLOCK_V": BLOCK_V,
        "LANES": min(LANES, head_k_dim),
    }
