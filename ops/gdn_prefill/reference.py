"""The specification of `gdn_prefill`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import check_pieces
from compiled_mtp.ops.gdn_math import apply_record, check_gdn_heads, gated_norm
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, I32, I64, Like, Remedy

_OUTPUTS = Remedy("pass the outputs of conv_prefill")
_PIECES = Remedy("pass one a piece")


def _pieces_fit(Hk: int, Hv: int, P: int, gate_activation: str) -> None:
    check_gdn_heads(Hk, Hv, gate_activation)
    check_pieces(P)


@operator(mutates=("state",), check=_pieces_fit, has_cpu_route=True)
def gdn_prefill(
    q: Annotated[Tensor, "T Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    k: Annotated[Tensor, "T Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    v: Annotated[Tensor, "T Hv Dv", F32, CONTIGUOUS, _OUTPUTS],
    g: Annotated[Tensor, "T Hv", F32, CONTIGUOUS, _OUTPUTS],
    beta: Annotated[Tensor, "T Hv", F32, CONTIGUOUS, _OUTPUTS],
    z: Annotated[Tensor, "T Hv*Dv", ACTIVATION, Remedy("slice the z columns of the projection")],
    norm_weight: Annotated[Tensor, "Dv", F32, CONTIGUOUS, Remedy("pass linear_attn.norm.weight")],
    state: Annotated[Tensor, "_ Hv Dv Dk", F32, CONTIGUOUS, Remedy("allocate it with StateCache")],
    state_index: Annotated[Tensor, "P", I32, _PIECES],
    start: Annotated[Tensor, "P", I64, _PIECES],
    length: Annotated[Tensor, "P", I64, _PIECES],
    first_row: Annotated[Tensor, "P", I64, _PIECES],
    eps: float,
    gate_activation: str,
    mark: Annotated[Tensor, "P", I64, _PIECES] | None = None,
) -> Annotated[Tensor, "T Hv*Dv", Like("z")]:
    """The gated delta rule over pieces of prompts.

    q, k [T, nk, dk], v [T, nv, dv], g, beta [T, nv] as conv_prefill returns them; z [T, nv*dv] (row stride
    free); norm_weight [dv]. PromptChunk p is `length` rows from `first_row` on (see conv_prefill). state
    [slots, nv, dv, dk], mutated: read at state_index[p] unless start[p] is 0 (then the initial state is zero
    and the slot is not read), written with the state after the piece. Where mark[p], a multiple of 64 of at
    most one piece, is not 0, the state after so many of its rows is written to the last row of state. Per
    token and norm: see gdn_verify, with exp(g) of the log decay g. Returns y [T, nv*dv] in z's dtype, 0 in
    rows of no piece.
    Source: Gated Delta Networks, arXiv 2412.06464, whose section 3.3 is the chunked form of kernel and CPU.
    """
    group = v.shape[1] // k.shape[1]
    y = torch.zeros_like(z, memory_format=torch.contiguous_format)
    marks = torch.zeros_like(length) if mark is None else mark
    pieces = zip(*(column.tolist() for column in (state_index, start, length, first_row, marks)), strict=True)
    for slot, begin, used, first, marked in pieces:
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
