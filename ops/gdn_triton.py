"""What the GDN kernels share: the state tile, a record applied to it, and the gated norm."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.variants import KernelVariant

OPTIONS = {"enable_fp_fusion": True}

# A state tile [DK / LANES, BLOCK_V * LANES] holds state element (v, k) in row k // LANES and column
# v * LANES + k % LANES: a thread then owns whole columns, and a sum over k leaves it only for the last LANES
# elements (two shuffles). On an [v, k] tile the same sum takes ninety instructions a token.
LANES = 16
BLOCK_V = 8
NUM_WARPS = 1


@triton.jit
def tile_indices(block, DK: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    """Key index [DK / LANES, BLOCK_V * LANES] and value index [BLOCK_V * LANES] of a tile's elements."""
    column = tl.arange(0, BLOCK_V * LANES)
    row = tl.arange(0, DK // LANES)
    key = row[:, None] * LANES + (column % LANES)[None, :]
    return key, block * BLOCK_V + column // LANES


@triton.jit
def apply_record(tile, key, update, exp_g):
    """exp_g * S + u k^T: one product and one fma, in verify and in every fold."""
    return tl.fma(tl.broadcast_to(update[None, :], tile.shape), key, tile * exp_g)


@triton.jit
def fold_records(
    tile,
    ring_k,
    ring_u,
    ring_g,
    slot,
    head,
    begin,
    count,
    key,
    value,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
):
    """The tile after the records of positions [begin, begin + count)."""
    k_rows = (slot * NK + head // (NV // NK)) * RING
    v_rows = (slot * NV + head) * RING
    for step in range(count):
        row = (begin + step) % RING
        k_row = tl.load(ring_k + (k_rows + row) * DK + key)
        u_row = tl.load(ring_u + (v_rows + row) * DV + value)
        tile = apply_record(tile, k_row, u_row, tl.load(ring_g + v_rows + row))
    return tile


@triton.jit
def gated_norm_kernel(
    out,
    z,
    norm_weight,
    length,
    y,
    z_stride,
    eps,
    NV: tl.constexpr,
    DV: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, DV)
    at = (row * NV + head) * DV + lane
    x = tl.load(out + at)
    weight = tl.load(norm_weight + lane)
    gate = tl.load(z + row * z_stride + head * DV + lane).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / DV + eps)
    gate = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    result = x * scale * weight * gate
    if length is not None:
        result = tl.where(tl.full((DV,), row, tl.int64) < tl.load(length), result, 0.0)
    tl.store(y + at, result.to(y.dtype.element_ty))


def launch_gated_norm(
    out: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_activation: str,
    length: torch.Tensor | None = None,
) -> torch.Tensor:
    """rmsnorm(out [M, nv, dv]) * norm_weight * act(z [M, nv*dv]) in z's dtype, 0 in rows >= length [1]."""
    rows, heads, width = out.shape
    y = torch.empty((rows, heads * width), dtype=z.dtype, device=z.device)
    gated_norm_kernel[(heads, rows)](
        out, z, norm_weight, length, y, z.stride(0), eps,
        NV=heads, DV=width, SIGMOID=gate_activation == "sigmoid", num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


def check_head_dims(head_k_dim: int, head_v_dim: int) -> None:
    """Raise ValueError for head dims that the tiles cannot hold."""
    for name, dim in (("head_k_dim", head_k_dim), ("head_v_dim", head_v_dim)):
        if dim < LANES or dim & (dim - 1):
            raise ValueError(
                f"{name} must be a power of two of at least {LANES} on a GPU, got {dim}; run on a CPU"
            )


def gated_norm_variants() -> list[KernelVariant]:
    return [
        KernelVariant(
            name=f"gated-norm-{dtype}",
            function=gated_norm_kernel,
            signature={
                "out": "*fp32", "z": f"*{dtype}", "norm_weight": "*fp32", "y": f"*{dtype}",
                "z_stride": "i32", "eps": "fp32",
            },
            constexprs={"length": None, "NV": 48, "DV": 128, "SIGMOID": False},
            num_warps=1,
            aligned=("out", "z", "norm_weight", "y", "z_stride"),
            options=OPTIONS,
        )
        for dtype in ("bf16", "fp32")
    ]  # fmt: skip
