"""Registration of `moe_router` and the checks on its arguments."""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.moe_router import reference
from compiled_mtp.ops.registry import register


def _fake(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, top_k + 1), logits.new_empty(rows, top_k + 1, dtype=torch.int32)


def _launch(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from compiled_mtp.ops.moe_router.kernel import launch

    return launch(logits, top_k, renormalize)


def _check_moe_router(logits: torch.Tensor, top_k: int, renormalize: bool) -> None:
    check_shape("logits", logits, (None, None), "pass router logits with the shared gate as the last column")
    check_dtype("logits", logits, (torch.float32,), "compute the router in float32")
    check_last_contiguous("logits", logits)
    experts = logits.shape[1] - 1
    if not 0 < top_k <= experts:
        raise fail("top_k", f"be in 1..{experts}", top_k, "pass num_experts_per_tok")


_moe_router = register("moe_router", reference.moe_router, _fake, launch=_launch, check=_check_moe_router)


def moe_router(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` of E experts a row, in the order of descending probability (ties: lowest id first).

    `logits` [M, E+1] f32, the last column being the logit of the shared expert's gate. Returns weights
    [M, top_k+1] f32 and ids [M, top_k+1] i32: softmax probabilities over the E experts, divided by their sum
    when `renormalize`; the last slot is the shared expert, id E, weight sigmoid(gate). A NaN logit is never
    chosen before another and makes the row's weights NaN. Mutates nothing; raises ValueError on shapes and
    dtypes.
    Source: the sparse MoE block of Qwen3-Next and Qwen3.5-MoE (transformers `modeling_qwen3_5_moe.py`).
    """
    return _moe_router(logits, top_k, renormalize)
