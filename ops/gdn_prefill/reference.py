"""The specification of `gdn_prefill`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import check_prompt_chunks
from compiled_mtp.ops.gdn_math import apply_record, check_gdn_heads, gated_norm
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, I32, I64, Like, Remedy

_OUTPUTS = Remedy("pass the outputs of conv_prefill")
_CHUNKS = Remedy("pass one for each prompt chunk")


def _chunks_fit(Hk: int, Hv: int, P: int, gate_activation: str) -> None:
    check_gdn_heads(Hk, Hv, gate_activation)
    check_prompt_chunks(P)


@operator(mutates=("state",), check=_chunks_fit, has_cpu_route=True)
def gdn_prefill(
    q: Annotated[Tensor, "T Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    k: Annotated[Tensor, "T Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    v: Annotated[Tensor, "T Hv Dv", F32, CONTIGUOUS, _OUTPUTS],
    g: Annotated[Tensor, "T Hv", F32, CONTIGUOUS, _OUTPUTS],
    beta: Annotated[Tensor, "T Hv", F32, CONTIGUOUS, _OUTPUTS],
    z: Annotated[Tensor, "T Hv*Dv", ACTIVATION, Remedy("slice the z columns of the projection")],
    norm_weight: Annotated[Tensor, "Dv", F32, CONTIGUOUS, Remedy("pass linear_attn.norm.weight")],
    state: Annotated[Tensor, "_ Hv Dv Dk", F32, CONTIGUOUS, Remedy("allocate it with StateCache")],
    state_index: Annotated[Tensor, "P", I32, _CHUNKS],
    start: Annotated[Tensor, "P", I64, _CHUNKS],
    length: Annotated[Tensor, "P", I64, _CHUNKS],
    first_row: Annotated[Tensor, "P", I64, _CHUNKS],
    eps: float,
    gate_activation: str,
    mark: Annotated[Tensor, "P", I64, _CHUNKS] | None = None,
) -> Annotated[Tensor, "T Hv*Dv", Like("z")]:
    """Apply the gated delta rule, norm and gate to P prompt chunks.

    q, k [T, nk, dk], v [T, nv, dv], g, beta [T, nv] are the outputs of conv_prefill; z [T, nv*dv] (any row
    stride); norm_weight [dv]. Prompt chunk p has length[p] rows from row first_row[p] on (see conv_prefill).
    Mutates state [slots, nv, dv, dk]: chunk p starts from state[state_index[p]], or from zero where start[p]
    is 0, and its final state is written to state[state_index[p]]. mark[p] is the snapshot offset, a multiple
    of 64, or 0 for none: the state after the chunk's first mark[p] rows is also written to the last row of
    state. At most one chunk has one. gdn_verify gives the recurrence and the norm; here g is the log decay.
    Returns y [T, nv*dv] in z's dtype, 0 in rows outside the chunks.
    Source: Gated Delta Networks, arXiv 2412.06464; kernel and CPU route use the chunked form of section 3.3.
    """
    group = v.shape[1] // k.shape[1]
    y = torch.zeros_like(z, memory_format=torch.contiguous_format)
    marks = torch.zeros_like(length) if mark is None else mark
    chunks = zip(*(column.tolist() for column in (state_index, start, length, first_row, marks)), strict=True)
    for slot, begin, used, first, marked in chunks:
        if not used:
            continue
        current = state[slot].clone() if begin > 0 else torch.zeros_like(state[slot])
        out, own = torch.empty_like(v[:used]), slice(first, first + used)
        for index, row in enumerate(range(first, first + used)):
            key, query = (x[row].repeat_interleave(group, 0) for x in (k, q))  # [nv, dk]
            exp_g = torch.exp(g[row])
            read = exp_g[:, None] * torch.einsum("hvk,hk->hv", current, key)
            apply_record(current, key, beta[row, :, None] * (v[row] - read), exp_g)
            out[index] = torch.einsum("hvk,hk->hv", current, query)
            if index + 1 == marked:
                state[-1] = current
        state[slot] = current
        y[own] = gated_norm(out, z[own], norm_weight, eps, gate_activation)
    return y
