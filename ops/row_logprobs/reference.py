"""The specification of `row_logprobs`.

A sum over the vocabulary adds tiles of 4,096 values, then the tile sums in order: ATen would split a float
sum with a single output over its threads.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import F32, I32, I64, Remedy

NUM_TOP = 20
"""How many of the likeliest ids are returned per row."""
_TILE = 4096


class RowLogprobs(NamedTuple):
    """Per row: log probability and rank of the chosen id, the likeliest ids in order, and the entropy.

    The entropy is in nats. rank counts from 1; among equally likely ids the lowest comes first, here and in
    top_ids. Where fewer ids have a probability, top_logprobs is -inf and top_ids 0.
    """

    logprob: Annotated[Tensor, "M", F32]
    rank: Annotated[Tensor, "M", I32]
    top_ids: Annotated[Tensor, f"M {NUM_TOP}", I32]
    top_logprobs: Annotated[Tensor, f"M {NUM_TOP}", F32]
    entropy: Annotated[Tensor, "M", F32]


def _row_sum(x: Tensor) -> Tensor:
    """Sum a contiguous [M, N] over its last dimension, in an order that depends on N alone."""
    whole = x.shape[1] // _TILE * _TILE
    tiles = x[:, :whole].view(x.shape[0], whole // _TILE, _TILE).sum(-1)
    return torch.cat([tiles, x[:, whole:].sum(-1, keepdim=True)], dim=1).cumsum(-1)[:, -1]


def _likeliest(x: Tensor, count: int) -> Tensor:
    """Return the ids [M, count] of the largest values of x [M, N], the lowest id first among equal ones.

    They begin a stable sort of the row, which takes ten times as long: only the values from the count-th
    largest on are sorted here.
    """
    least = x.topk(count, dim=-1).values[:, -1:]
    row, column = (x >= least).nonzero(as_tuple=True)
    by_value = x[row, column].sort(descending=True, stable=True).indices
    order = by_value[row[by_value].sort(stable=True).indices]
    ends = row.bincount(minlength=x.shape[0]).cumsum(0)
    first = torch.nn.functional.pad(ends[:-1], (1, 0))[:, None] + torch.arange(count, device=x.device)
    return column[order[first]]


def _has_ids(num_valid_ids: int, V: int) -> None:
    if not 0 < num_valid_ids <= V:
        raise fail("num_valid_ids", f"be in 1..{V}", num_valid_ids, "pass the tokenizer's number")


@operator(check=_has_ids)
def row_logprobs(
    logits: Annotated[Tensor, "M V", F32],
    chosen: Annotated[Tensor, "M", I64, Remedy("pass one id for each row of logits")],
    num_valid_ids: int,
) -> RowLogprobs:
    """Return the log softmax of every row of logits [M, V] at its `chosen` id [M] and at the likeliest ids.

    Ids from num_valid_ids on count in the softmax and in the entropy, but are neither ranked nor listed. A
    logit that is not finite counts as -inf; a row without a finite logit has log probabilities of -inf and
    entropy 0.
    """
    x = torch.where(torch.isfinite(logits), logits, -math.inf)
    peak = x.amax(-1, keepdim=True)
    has_any = peak > -math.inf
    peak = torch.where(has_any, peak, 0.0)
    weights = torch.exp(x - peak)
    total = _row_sum(weights.contiguous())
    log_sum = torch.log(total)[:, None]
    # The entropy is log_sum minus the mean of x - peak.
    weighted = torch.where(weights > 0, weights * (x - peak), 0.0)
    entropy = torch.where(has_any[:, 0], log_sum[:, 0] - _row_sum(weighted.contiguous()) / total, 0.0)

    def logprob_of(values: Tensor) -> Tensor:
        return torch.where(has_any, (values - peak) - log_sum, -math.inf)

    own = x.gather(1, chosen[:, None])
    valid = x[:, :num_valid_ids]
    ids = torch.arange(num_valid_ids, device=x.device)
    is_before = (valid > own) | ((valid == own) & (ids < chosen[:, None]))
    count = min(NUM_TOP, num_valid_ids)
    order = _likeliest(valid, count)
    missing = (0, NUM_TOP - count)
    top = torch.nn.functional.pad(valid.gather(1, order), missing, value=-math.inf)
    top_ids = torch.nn.functional.pad(order, missing).masked_fill(top == -math.inf, 0)
    return RowLogprobs(
        logprob_of(own).squeeze(1),
        (is_before.sum(-1) + 1).to(torch.int32),
        top_ids.to(torch.int32),
        logprob_of(top),
        entropy,
    )
