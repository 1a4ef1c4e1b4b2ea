"""Checks and registration of gdn_commit."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_shape, fail
from compiled_mtp.ops.gdn_commit import reference
from compiled_mtp.ops.registry import register


def _fake(*_: torch.Tensor) -> None:
    return None


def _launch(*args: Any) -> Any:
    from compiled_mtp.ops.gdn_commit.kernel import launch

    return launch(*args)


def _check_gdn_commit(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    check_shape("state", state, (None, None, None, None), "allocate it with StateCache")
    slots, num_v_heads, head_v_dim, head_k_dim = state.shape
    check_shape("ring_k", ring_k, (slots, None, None, head_k_dim), "allocate it with StateCache")
    ring_length = ring_k.shape[2]
    if num_v_heads % ring_k.shape[1]:
        raise fail(
            "num_v_heads", "be a multiple of num_k_heads", (num_v_heads, ring_k.shape[1]), "check the config"
        )
    check_shape("ring_u", ring_u, (slots, num_v_heads, ring_length, head_v_dim), "use ring_k's length")
    check_shape("ring_g", ring_g, (slots, num_v_heads, ring_length), "use ring_k's length")
    check_shape("base", base, tuple(state_index.shape), "pass one cursor a slot")
    check_shape("target", target, tuple(state_index.shape), "pass one cursor a slot")
    for name, tensor in (("state", state), ("ring_k", ring_k), ("ring_u", ring_u), ("ring_g", ring_g)):
        check_dtype(name, tensor, (torch.float32,), "keep it in float32")
        if not tensor.is_contiguous():
            raise fail(name, "be contiguous", list(tensor.stride()), "pass a contiguous tensor")


_OP = register(
    "gdn_commit", reference.gdn_commit, _fake, mutates=("state",), launch=_launch, check=_check_gdn_commit
)


def gdn_commit(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Fold the records of positions [base, target) into the stored states of n slots.

    state [slots, nv, dv, dk] f32, mutated at state_index [n] (int32, no slot twice); ring_k [slots, nk, R,
    dk], ring_u [slots, nv, R, dv], ring_g [slots, nv, R] f32 as gdn_verify writes them; base, target [n]
    int64. The result has the bits that gdn_verify's own fold gives. Raises ValueError for shapes and dtypes
    that do not fit.
    """
    _OP(state, ring_k, ring_u, ring_g, state_index, base, target)
