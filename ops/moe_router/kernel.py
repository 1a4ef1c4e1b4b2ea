"""The router in one program a row: the whole row in registers, top_k by repeated maximum."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of

OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def value_of(order):
    """The float32 number of an integer that stands for it in the order of values."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def moe_router_kernel(
    logits,
    weights,
    ids,
    row_stride,
    slot_mapping,
    record,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The choices of one row, in descending order, and the shared expert behind them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    value = tl.load(logits + row * row_stride + column, mask=column < EXPERTS, other=float("-inf"))
    # Integers in the order of values: a NaN ranks as -inf, and -0.0 as 0.0. A warp reduces 32-bit integers
    # in one instruction, floats in five steps.
    ranked = tl.where((value == value) & (value != 0.0), value, tl.where(value == 0.0, 0.0, float("-inf")))
    bits = ranked.to(tl.int32, bitcast=True)
    order = tl.where(column < EXPERTS, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -(2**31))
    peak = value_of(tl.max(order, 0))
    chosen_id = tl.full((SLOTS,), EXPERTS, tl.int32)
    chosen_weight = tl.zeros((SLOTS,), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(order, 0)
        best_id = tl.min(tl.where(order == best, column, BLOCK), 0)
        chosen_id = tl.where(slot == i, best_id, chosen_id)
        chosen_weight = tl.where(slot == i, tl.exp(value_of(best) - peak), chosen_weight)
        order = tl.where(column == best_id, -(2**31), order)
    if RENORMALIZE:
        total = tl.sum(chosen_weight, 0)
    else:
        total = tl.sum(tl.where(column < EXPERTS, tl.exp(value - peak), 0.0), 0)
    # A NaN anywhere in the row reaches every weight.
    total = tl.where(tl.max((value != value).to(tl.int32), 0) > 0, float("nan"), total)
    gate = tl.load(logits + row * row_stride + EXPERTS)
    weight = tl.where(slot == TOP_K, 1.0 / (1.0 + tl.exp(-gate)), tl.div_rn(chosen_weight, total))
    to = row * (TOP_K + 1) + slot
    tl.store(weights + to, weight, mask=slot <= TOP_K)
    tl.store(ids + to, chosen_id, mask=slot <= TOP_K)
    if record is not None:
        at = tl.load(slot_mapping + row)
        if at >= 0:
            tl.store(record + at * TOP_K + slot, chosen_id.to(tl.int16), mask=slot < TOP_K)


def configuration(experts: int, top_k: int) -> tuple[int, int]:
    """Widths in registers of a row and of its slots; functions of the model alone."""
    return max(32, triton.next_power_of_2(experts)), triton.next_power_of_2(top_k + 1)


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run(args.logits, args.top_k, args.renormalize, None, None)


def launch_recorded_router(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run(args.logits, args.top_k, args.renormalize, args.slot_mapping, args.record)


def run(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping: torch.Tensor | None,
    record: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, experts = logits.shape[0], logits.shape[1] - 1
    block, slots = configuration(experts, top_k)
    weights = torch.empty((rows, top_k + 1), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k + 1), dtype=torch.int32, device=logits.device)
    if rows:
        has_pdl = device_of(logits.device.index).has_dependent_launch
        moe_router_kernel[(rows,)](
            logits,
            weights,
            ids,
            logits.stride(0),
            slot_mapping,
            record,
            EXPERTS=experts,
            BLOCK=block,
            TOP_K=top_k,
            SLOTS=slots,
            RENORMALIZE=renormalize,
            PDL=has_pdl,
            num_warps=1,
            launch_pdl=has_pdl,
            **OPTIONS,
        )
    return weights, ids
