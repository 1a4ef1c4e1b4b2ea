"""The specification of `paged_attention`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import check_prompt_chunks, fail, is_known, wrong_dtype
from compiled_mtp.ops.numerics import sigmoid
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, I32, I64, Like, Remedy

MAX_VERIFY_WINDOW = 16
"""The most rows of a verify window; more rows of a request are a prompt chunk."""
_CHUNKS = Remedy("pass one for each prompt chunk")


def _cache_and_rows_fit(
    q: Tensor, kv: Tensor, kv_scale: Tensor | None,
    M: int, Hq: int, D: int, Hk: int, block_size: int, B: int, first_key: int, first_row: Tensor | None,
    length: Tensor | None,
) -> None:  # fmt: skip
    if D not in (16, 32, 64, 128, 256):
        raise fail("head_dim", "be a power of two from 16 to 256", D, "no kernel covers another size")
    if Hq % Hk:
        raise fail("query heads", f"be a multiple of the {Hk} kv heads", Hq, "check kv")
    if block_size % 16:
        raise fail("block_size", "be a multiple of 16", block_size, "choose another block_size")
    dtype = q.dtype if kv_scale is None else FP8
    if kv.dtype != dtype:
        raise wrong_dtype("kv", kv, (dtype,))
    if (first_row is None) != (length is None):
        raise fail("first_row and length", "come together", (first_row, length), "pass both or none")
    if first_row is not None:
        check_prompt_chunks(B)
    elif B == 0 or M % B:
        raise fail("rows", f"be a multiple of the {B} requests", M, "pass W rows each")
    elif is_known(M) and M // B > MAX_VERIFY_WINDOW:
        remedy = "pass first_row and length for prompt chunks"
        raise fail("a window", f"have at most {MAX_VERIFY_WINDOW} rows", M // B, remedy)
    if first_key < 0:
        raise fail("first_key", "be at least 0", first_key, "pass the first key a row may see")


# A fence separates the writer of the positions from this call: the projection, or the embedding or the
# draft's fc where the projection's weight is resident. Queries, keys, values and gates are not read early.
@operator(
    launches=(
        Launch("verify_kernel", reads_early=("positions",)),
        Launch("combine_kernel", reads_early=("positions",)),
    ),
    check=_cache_and_rows_fit,
    has_cpu_route=True,
)
def paged_attention(
    q: Annotated[Tensor, "M Hq D", ACTIVATION],
    gate: Annotated[Tensor, "M Hq D", Like("q"), Remedy("pass the gate half of each query head")],
    kv: Annotated[Tensor, "blocks 2 Hk block_size D", (*ACTIVATION, FP8), Remedy("pass this layer's cache")],
    kv_scale: Annotated[Tensor, "blocks 2 Hk block_size", F32, Remedy("pass one scale a vector")] | None,
    block_table: Annotated[Tensor, "B _", I32],
    positions: Annotated[Tensor, "M", I64, Remedy("pass one position a row")],
    softmax_scale: float,
    first_key: int,
    first_row: Annotated[Tensor, "B", I64, _CHUNKS] | None = None,
    length: Annotated[Tensor, "B", I64, _CHUNKS] | None = None,
) -> Annotated[Tensor, "M Hq*D", Like("q")]:
    """softmax(softmax_scale * q k^T) v * sigmoid(gate) over the keys first_key <= j <= position of each row.

    q, gate [M, Hq, D] float32 or bfloat16 (any strides, the last one 1), rows request-major: request b owns
    rows b*W .. b*W + W-1, W = M // B <= 16, or, for prompt chunks, length[b] rows from first_row[b] on (see
    conv_prefill); rows outside all chunks may hold anything and give 0. kv [blocks, 2, Hk, block_size, D]
    (keys, then values) in the dtype of q, or float8_e4m3fn with kv_scale [blocks, 2, Hk, block_size].
    block_table [B, max_blocks], -1 for a block that is not reserved: its keys are not read. positions [M].
    Query head h uses kv head h // (Hq // Hk). Returns [M, Hq * D] in the dtype of q; a row without keys gives
    0. Keys that a row does not see may hold anything, NaN included. Arithmetic is float32, rounded once.
    """
    rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    query_len = rows // block_table.shape[0]
    if first_row is None or length is None:
        spans = [(request * query_len, query_len) for request in range(block_table.shape[0])]
    else:
        spans = list(zip(first_row.tolist(), length.tolist(), strict=True))
    key = torch.arange(block_table.shape[1] * block_size, device=q.device)
    out = torch.zeros((rows, num_q_heads * head_dim), dtype=torch.float32, device=q.device)
    for (first, count), table in zip(spans, block_table.long(), strict=True):
        own = slice(first, first + count)
        blocks = table.clamp(min=0)
        stored = torch.stack([kv[block].float() for block in blocks], dim=2)  # [2, Hk, blocks, block_size, D]
        if kv_scale is not None:
            stored = stored * kv_scale[blocks].permute(1, 2, 0, 3)[..., None]
        k, v = stored.flatten(2, 3)
        is_key = (table >= 0).repeat_interleave(block_size) & (key >= first_key)
        is_seen = is_key & (key <= positions[own, None])  # [W, keys]
        queries = q[own].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("whgd,hkd->whgk", queries, k) * softmax_scale
        weights = scores.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1)
        # A row without keys has NaN weights. An unseen key has weight 0, but 0 * NaN is NaN.
        weights, v = weights.nan_to_num(0.0), v.nan_to_num(0.0, 0.0, 0.0)
        result = torch.einsum("whgk,hkd->whgd", weights, v).flatten(1)
        out[own] = result * sigmoid(gate[own].flatten(1).float())
    return out.to(q.dtype)
