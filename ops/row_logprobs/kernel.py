"""Log probabilities in two launches: one reduces fixed tiles of the vocabulary, one combines the tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.row_logprobs.reference import NUM_TOP

MAX_TILE = 2048
TILE_WARPS = 4
ROW_WARPS = 8
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def finite_or_minus_inf(x):
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, float("-inf"))


@triton.jit
def or_zero(peak):
    """Return a finite peak to subtract: 0 if all values are -inf."""
    return tl.where(peak > float("-inf"), peak, 0.0)


@triton.jit
def take_best(values, ids):
    """Return the largest value, the lowest id that has it, and the values without that id."""
    best = tl.max(values, 0)
    best_id = tl.min(tl.where(values == best, ids, _NO_ID), 0)
    return best, best_id, tl.where(ids == best_id, float("-inf"), values)


@triton.jit(do_not_specialize=("num_valid_ids",))
def logprob_tile_kernel(
    logits,
    logits_stride,
    chosen,
    num_valid_ids,
    tile_sums,
    tile_counts,
    values,
    value_ids,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    """Reduce one tile of one row.

    tile_sums [M, 3, TILES]: peak, and the sums of exp(x - peak) and of exp(x - peak) * (x - peak).
    tile_counts [M, TILES]: how many ids rank before the chosen one. values, value_ids [M, TILES, NUM_TOP]:
    the likeliest ids.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    x = finite_or_minus_inf(
        tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    )
    own_id = tl.load(chosen + row)
    own = finite_or_minus_inf(tl.load(logits + row * logits_stride + own_id))
    peak = tl.max(x, 0)
    to = tile_sums + row * (3 * TILES) + tile
    tl.store(to, peak)
    below = x - or_zero(peak)
    weights = tl.exp(below)
    tl.store(to + TILES, tl.sum(weights, 0))
    tl.store(to + 2 * TILES, tl.sum(tl.where(weights > 0, weights * below, 0.0), 0))
    is_valid = ids < num_valid_ids
    is_before = is_valid & ((x > own) | ((x == own) & (ids < own_id)))
    tl.store(tile_counts + row * TILES + tile, tl.sum(is_before.to(tl.int32), 0))
    x = tl.where(is_valid, x, float("-inf"))
    lane = tl.arange(0, TOP_BLOCK)
    best_values = tl.full((TOP_BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.zeros((TOP_BLOCK,), tl.int32)
    for i in range(NUM_TOP):
        best, best_id, x = take_best(x, ids)
        best_values = tl.where(lane == i, best, best_values)
        best_ids = tl.where(lane == i, best_id, best_ids)
    at = (row * TILES + tile) * NUM_TOP + lane
    tl.store(values + at, best_values, mask=lane < NUM_TOP)
    tl.store(value_ids + at, best_ids, mask=lane < NUM_TOP)


@triton.jit
def logprob_row_kernel(
    logits,
    logits_stride,
    chosen,
    tile_sums,
    tile_counts,
    values,
    value_ids,
    logprob,
    rank,
    top_ids,
    top_logprobs,
    entropy,
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    CANDIDATES_BLOCK: tl.constexpr,
    NUM_TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_BLOCK)
    is_tile = tile < TILES
    own_tiles = tile_sums + row * (3 * TILES) + tile
    peaks = tl.load(own_tiles, mask=is_tile, other=float("-inf"))
    sums = tl.load(own_tiles + TILES, mask=is_tile, other=0.0)
    weighted = tl.load(own_tiles + 2 * TILES, mask=is_tile, other=0.0)
    peak = tl.max(peaks, 0)
    has_any = peak > float("-inf")
    peak = or_zero(peak)
    scales = tl.exp(peaks - peak)
    total = tl.where(has_any, tl.sum(sums * scales, 0), 1.0)
    log_sum = tl.log(total)
    # A tile's values lie `peaks - peak` lower below the row's peak than below its own.
    weighted = tl.where(scales > 0, scales * (weighted + (peaks - peak) * sums), 0.0)
    tl.store(entropy + row, tl.where(has_any, log_sum - tl.sum(weighted, 0) / total, 0.0))
    own = finite_or_minus_inf(tl.load(logits + row * logits_stride + tl.load(chosen + row)))
    tl.store(logprob + row, tl.where(has_any, (own - peak) - log_sum, float("-inf")))
    counts = tl.load(tile_counts + row * TILES + tile, mask=is_tile, other=0)
    tl.store(rank + row, tl.sum(counts, 0) + 1)
    candidate = tl.arange(0, CANDIDATES_BLOCK)
    is_candidate = candidate < TILES * NUM_TOP
    at = row * (TILES * NUM_TOP) + candidate
    x = tl.load(values + at, mask=is_candidate, other=float("-inf"))
    ids = tl.load(value_ids + at, mask=is_candidate, other=_NO_ID)
    lane = tl.arange(0, TOP_BLOCK)
    best_values = tl.full((TOP_BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.zeros((TOP_BLOCK,), tl.int32)
    for i in range(NUM_TOP):
        best, best_id, x = take_best(x, ids)
        best_values = tl.where(lane == i, best, best_values)
        best_ids = tl.where(lane == i, tl.where(best > float("-inf"), best_id, 0), best_ids)
    at = row * NUM_TOP + lane
    tl.store(top_logprobs + at, (best_values - peak) - log_sum, mask=lane < NUM_TOP)
    tl.store(top_ids + at, best_ids, mask=lane < NUM_TOP)


def launch(args: Any) -> tuple[torch.Tensor, ...]:
    logits = args.logits
    rows, vocab = logits.shape
    device = logits.device
    logprob = torch.empty((rows,), dtype=torch.float32, device=device)
    rank = torch.empty((rows,), dtype=torch.int32, device=device)
    top_ids = torch.empty((rows, NUM_TOP), dtype=torch.int32, device=device)
    top_logprobs = torch.empty((rows, NUM_TOP), dtype=torch.float32, device=device)
    entropy = torch.empty((rows,), dtype=torch.float32, device=device)
    if rows == 0:
        return logprob, rank, top_ids, top_logprobs, entropy
    tile = max(64, min(MAX_TILE, triton.next_power_of_2(vocab)))
    tiles = triton.cdiv(vocab, tile)
    tile_sums = torch.empty((rows, 3, tiles), dtype=torch.float32, device=device)
    tile_counts = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    values = torch.empty((rows, tiles, NUM_TOP), dtype=torch.float32, device=device)
    value_ids = torch.empty((rows, tiles, NUM_TOP), dtype=torch.int32, device=device)
    top_block = triton.next_power_of_2(NUM_TOP)
    logprob_tile_kernel[(tiles, rows)](
        logits, logits.stride(0), args.chosen, args.num_valid_ids, tile_sums, tile_counts, values, value_ids,
        VOCAB=vocab, TILES=tiles, TILE=tile, NUM_TOP=NUM_TOP, TOP_BLOCK=top_block, num_warps=TILE_WARPS,
    )  # fmt: skip
    logprob_row_kernel[(rows,)](
        logits, logits.stride(0), args.chosen, tile_sums, tile_counts, values, value_ids,
        logprob, rank, top_ids, top_logprobs, entropy,
        TILES=tiles, TILES_BLOCK=triton.next_power_of_2(tiles),
        CANDIDATES_BLOCK=triton.next_power_of_2(tiles * NUM_TOP),
        NUM_TOP=NUM_TOP, TOP_BLOCK=top_block, num_warps=ROW_WARPS,
    )  # fmt: skip
    return logprob, rank, top_ids, top_logprobs, entropy
