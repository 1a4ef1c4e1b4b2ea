"""The specification of `moe_router`, and what runs on the CPU."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.numerics import sigmoid
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import CONTIGUOUS, F32, I32, I64, Remedy

LAUNCHES = (Launch("moe_router_kernel", is_fence=True),)


def _are_experts(columns: int, top_k: int) -> None:
    if not 0 < top_k < columns:
        raise fail("top_k", f"be in 1..{columns - 1}", top_k, "pass num_experts_per_tok")


@operator(launches=LAUNCHES, check=_are_experts)
def moe_router(
    logits: Annotated[Tensor, "M columns", F32], top_k: int, renormalize: bool
) -> tuple[Annotated[Tensor, "M top_k+1", F32], Annotated[Tensor, "M top_k+1", I32]]:
    """Choose `top_k` of E experts a row, in the order of descending probability (ties: lowest id first).

    `logits` [M, E+1], the last column being the logit of the shared expert's gate. Returns weights and ids
    [M, top_k+1]: softmax probabilities over the E experts, divided by their sum when `renormalize`; the last
    slot is the shared expert, id E, weight sigmoid(gate). A NaN logit is never chosen before another and
    makes the row's weights NaN.
    The choice is made on the logits, which the softmax orders the same way: two implementations whose `exp`
    differ by a rounding still choose the same experts. Sums run one by one (cumsum): no row depends on M.
    Source: the sparse MoE block of Qwen3-Next and Qwen3.5-MoE (transformers `modeling_qwen3_5_moe.py`).
    """
    routed, shared = logits[:, :-1], logits[:, -1:]
    ranked = torch.where(torch.isnan(routed), -math.inf, routed)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight = torch.exp(routed - routed.amax(-1, keepdim=True))
    chosen = weight.gather(1, ids)
    total = (chosen if renormalize else weight).cumsum(-1)[:, -1:]
    shared_id = torch.full_like(ids[:, :1], routed.shape[1])
    weights = torch.cat([chosen / total, sigmoid(shared)], dim=1)
    return weights, torch.cat([ids, shared_id], dim=1).to(torch.int32)


def _holds_choices(columns: int, top_k: int, width: int) -> None:
    _are_experts(columns, top_k)
    if width % top_k:
        raise fail("record", f"hold {top_k} ids a token in each block", width, "pass KVCache's")


@operator(mutates=("record",), launches=LAUNCHES, check=_holds_choices)
def recorded_router(
    logits: Annotated[Tensor, "M columns", F32],
    top_k: int,
    renormalize: bool,
    slot_mapping: Annotated[Tensor, "M", I64, Remedy("pass one entry a row")],
    record: Annotated[Tensor, "blocks width", torch.int16, CONTIGUOUS, Remedy("pass this layer's record")],
) -> tuple[Annotated[Tensor, "M top_k+1", F32], Annotated[Tensor, "M top_k+1", I32]]:
    """Do what `moe_router` does, and record each row's chosen experts, without the shared one.

    slot_mapping [M]: the kv_index of a row, -1 for a row that is not recorded. Mutates record [blocks,
    block_size * top_k]: the ids of the token at kv_index i begin at element i * top_k.
    """
    weights, ids = moe_router.reference(logits, top_k, renormalize)
    is_recorded = slot_mapping >= 0
    record.view(-1, top_k)[slot_mapping[is_recorded]] = ids[is_recorded, :top_k].to(torch.int16)
    return weights, ids
