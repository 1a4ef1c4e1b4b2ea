"""RMS norm alone, after a residual add, and of a pair: one program per norm, one configuration per width."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.fp8_triton import quantize_groups
from compiled_mtp.ops.k_splits import NARROW_ROWS
from compiled_mtp.ops.rms_norm.reference import as_partials

OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def load_row(at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Load a row as f32 in two blocks: the first BLOCK columns, and the rest zero-padded to TAIL."""
    head = tl.load(at + tl.arange(0, BLOCK)).to(tl.float32)
    column = BLOCK + tl.arange(0, TAIL)
    if BLOCK + TAIL == WIDTH:
        tail = tl.load(at + column)
    else:
        tail = tl.load(at + column, mask=column < WIDTH, other=0.0)
    return head, tail.to(tl.float32)


@triton.jit
def load_tree(
    at, part_stride, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """Load COUNT split-K partials of a row and add them as a tree."""
    if COUNT == 1:
        head, tail = load_row(at, WIDTH, BLOCK, TAIL)
    else:
        head, tail = load_tree(at, part_stride, COUNT // 2, WIDTH, BLOCK, TAIL)
        at += COUNT // 2 * part_stride
        right_head, right_tail = load_tree(at, part_stride, COUNT // 2, WIDTH, BLOCK, TAIL)
        head += right_head
        tail += right_tail
    return head, tail


@triton.jit
def store_row(at, head, tail, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    tl.store(at + tl.arange(0, BLOCK), head)
    column = BLOCK + tl.arange(0, TAIL)
    if BLOCK + TAIL == WIDTH:
        tl.store(at + column, tail)
    else:
        tl.store(at + column, tail, mask=column < WIDTH)


@triton.jit
def store_groups(at, scale, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Store COUNT columns of a row from FIRST on, up to its WIDTH, in e4m3 with their factors."""
    groups = tl.reshape(values.to(tl.float32), (COUNT // 128, 128))
    quantized, factors = quantize_groups(groups, 1)
    group = FIRST // 128 + tl.arange(0, COUNT // 128)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(at + column, quantized, mask=column < WIDTH)
    tl.store(scale + group, factors, mask=group < WIDTH // 128)


@triton.jit
def norm_factor(head, tail, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Return 1 / rms of a row; each thread adds its own squares before the one sum over threads."""
    squares = tl.sum(tl.reshape(head * head, (TAIL, BLOCK // TAIL)), 1) + tail * tail
    return tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)


@triton.jit
def scale_row(
    x, out, head_scale, tail_scale, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """Store the norm of the row at x, times 1 + scale, at out."""
    head, tail = load_row(x, WIDTH, BLOCK, TAIL)
    factor = norm_factor(head, tail, eps, WIDTH, BLOCK, TAIL)
    head = head * factor * (1.0 + head_scale)
    tail = tail * factor * (1.0 + tail_scale)
    dtype = out.dtype.element_ty
    store_row(out, head.to(dtype), tail.to(dtype), WIDTH, BLOCK, TAIL)


# x of add_rms_norm may be PARTS split-K partials in float32, part_stride apart: the kernel adds them as a
# tree and rounds the sum.
# Every kernel loads the weight before the wait: no kernel writes weights. add_rms_norm also loads the
# residual early, because a product, a fence, has run after the residual's writer, unless that product's
# weight is RESIDENT. These loads from memory take as long as everything after them.
@triton.jit
def rms_norm_kernel(
    x, weight, out, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head_scale, tail_scale = load_row(weight, WIDTH, BLOCK, TAIL)
    if PDL:
        gdc_wait()
    scale_row(x + row * x_stride, out + row * WIDTH, head_scale, tail_scale, eps, WIDTH, BLOCK, TAIL)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, kept_rows, out, new_residual, quantized, quantized_scale, x_stride, part_stride,
    residual_stride, eps,
    PARTS: tl.constexpr, RESIDENT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head_scale, tail_scale = load_row(weight, WIDTH, BLOCK, TAIL)
    source = row
    if not RESIDENT:
        if kept_rows is not None:
            source = tl.load(kept_rows + row)
        head_before, tail_before = load_row(residual + source * residual_stride, WIDTH, BLOCK, TAIL)
    if PDL:
        gdc_wait()
    if RESIDENT:
        if kept_rows is not None:
            source = tl.load(kept_rows + row)
        head_before, tail_before = load_row(residual + source * residual_stride, WIDTH, BLOCK, TAIL)
    head, tail = load_tree(x + source * x_stride, part_stride, PARTS, WIDTH, BLOCK, TAIL)
    dtype = new_residual.dtype.element_ty
    if PARTS > 1 or x.dtype.element_ty != dtype:
        head = head.to(dtype).to(tl.float32)
        tail = tail.to(dtype).to(tl.float32)
    head_sum = (head + head_before).to(dtype)
    tail_sum = (tail + tail_before).to(dtype)
    store_row(new_residual + row * WIDTH, head_sum, tail_sum, WIDTH, BLOCK, TAIL)
    head = head_sum.to(tl.float32)
    tail = tail_sum.to(tl.float32)
    factor = norm_factor(head, tail, eps, WIDTH, BLOCK, TAIL)
    dtype = out.dtype.element_ty
    head = (head * factor * (1.0 + head_scale)).to(dtype)
    tail = (tail * factor * (1.0 + tail_scale)).to(dtype)
    store_row(out + row * WIDTH, head, tail, WIDTH, BLOCK, TAIL)
    if quantized is not None:
        quantized += row * WIDTH
        quantized_scale += row * (WIDTH // 128)
        store_groups(quantized, quantized_scale, head, 0, WIDTH, BLOCK)
        store_groups(quantized, quantized_scale, tail, BLOCK, WIDTH, TAIL)


@triton.jit
def pair_norm_kernel(
    table, token_ids, hidden, embedding_weight, hidden_weight, out, hidden_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    out += row * (2 * WIDTH)
    if tl.program_id(1) == 0:
        head_scale, tail_scale = load_row(embedding_weight, WIDTH, BLOCK, TAIL)
        if PDL:
            gdc_wait()
        token = tl.load(token_ids + row)
        scale_row(table + token * WIDTH, out, head_scale, tail_scale, eps, WIDTH, BLOCK, TAIL)
    else:
        head_scale, tail_scale = load_row(hidden_weight, WIDTH, BLOCK, TAIL)
        if PDL:
            gdc_wait()
        at = hidden + row * hidden_stride
        scale_row(at, out + WIDTH, head_scale, tail_scale, eps, WIDTH, BLOCK, TAIL)


def configuration(width: int) -> tuple[int, int, int]:
    """Return block, tail and warps; the width alone decides, so that a row's sum keeps its order."""
    block = max(1, triton.next_power_of_2(width) // 2)
    tail = max(1, triton.next_power_of_2(width - block))
    # From a width of 2048 on, a thread loads 16 bytes of bfloat16 at a time.
    return block, tail, max(4, min(16, block // 256))


def launch_options(x: torch.Tensor) -> dict[str, object]:
    """Return the launch arguments that width and device alone decide."""
    block, tail, warps = configuration(x.shape[-1])
    has_pdl = device_of(x.device.index).has_dependent_launch
    fixed = {"WIDTH": x.shape[-1], "BLOCK": block, "TAIL": tail, "PDL": has_pdl}
    return {**fixed, "num_warps": warps, "launch_pdl": has_pdl, **OPTIONS}


def row_stride(x: torch.Tensor) -> int:
    """Return the row stride, or the width if there is one row.

    A single row may have any stride, and other values would compile another kernel.
    """
    return x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]


def launch(args: Any) -> torch.Tensor:
    x = args.x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](x, args.weight, out, row_stride(x), args.eps, **launch_options(x))
    return out


def launch_add_rms_norm(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Weights are resident for at most NARROW_ROWS rows.
    return add_and_norm(args, resident=args.resident and args.residual.shape[0] <= NARROW_ROWS)


def launch_add_rms_norm_quantized(
    args: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    residual, kept_rows = args.residual, args.kept_rows
    rows = residual.shape[0] if kept_rows is None else kept_rows.shape[0]
    values = torch.empty((rows, residual.shape[1]), dtype=torch.float8_e4m3fn, device=residual.device)
    factors = torch.empty((rows, residual.shape[1] // 128), dtype=torch.float32, device=residual.device)
    return *add_and_norm(args, values, factors), values, factors


def add_and_norm(
    args: Any,
    values: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    resident: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm and new residual; write the quantized norm to `values` and `factors` if given."""
    x, residual, kept_rows = args.x, args.residual, args.kept_rows
    rows = residual.shape[0] if kept_rows is None else kept_rows.shape[0]
    out = torch.empty((rows, residual.shape[1]), dtype=residual.dtype, device=residual.device)
    new_residual = torch.empty_like(out)
    partials = as_partials(x, residual)
    if rows:
        strides = (row_stride(partials), partials.stride(0), row_stride(residual))
        add_rms_norm_kernel[(rows,)](
            x, residual, args.weight, kept_rows, out, new_residual, values, factors, *strides, args.eps,
            PARTS=partials.shape[0], RESIDENT=resident, **launch_options(residual),
        )  # fmt: skip
    return out, new_residual


def launch_pair_norm(args: Any) -> torch.Tensor:
    hidden = args.hidden
    rows, width = hidden.shape
    out = torch.empty((rows, 2 * width), dtype=hidden.dtype, device=hidden.device)
    if rows:
        pair_norm_kernel[(rows, 2)](
            args.table, args.token_ids, hidden, args.embedding_weight, args.hidden_weight, out,
            row_stride(hidden), args.eps, **launch_options(hidden),
        )  # fmt: skip
    return out
