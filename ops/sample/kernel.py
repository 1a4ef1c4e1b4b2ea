"""Sampling in two launches: fixed tiles of the vocabulary, then one program a row.

The first reads every logit once. It leaves the sums of the log-softmax, the best noisy value of every tile
and, for a row with a filter, the tempered values and the peak of every group of 64 ids. The second combines
them. For a row with a filter it finds from the peaks which groups can hold a kept id at all, and searches the
threshold among those, two bits of the value a step; only a flat distribution under top-p or min-p makes it
read most groups. No sort, no atomics, and every order is fixed by the vocabulary alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.sample.noise_kernel import gumbel_of_blocks, log_of
from compiled_mtp.ops.sample.reference import GREEDY_TEMPERATURE
from compiled_mtp.ops.sample.threshold_kernel import (
    candidates,
    fine_threshold,
    key_of,
    key_of_offset,
    search,
)
from compiled_mtp.ops.variants import KernelVariant

# Contraction would give other processed logits than the reference has.
OPTIONS = {"enable_fp_fusion": False}
GROUP = 64
MAX_TILE = 2048
CHUNK_GROUPS = 32
TILE_WARPS = 4
FINISH_WARPS = 16
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def finite_or_minus_inf(x):
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, float("-inf"))


@triton.jit
def or_zero(peak):
    """A peak to subtract from values that may all be -inf."""
    return tl.where(peak > float("-inf"), peak, 0.0)


@triton.jit
def tile_kernel(
    logits,
    logits_stride,
    tokens,
    positions,
    state_index,
    temperature,
    top_p,
    min_p,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    top_k,
    seed,
    counts,
    counts_stride,
    prompt,
    prompt_stride,
    bias,
    bias_stride,
    min_position,
    stop_ids,
    stop_stride,
    num_valid_ids,
    tile_floats,
    tile_ids,
    tempered,
    group_peaks,
    QUERY_LEN: tl.constexpr,
    STOP_IDS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_PROMPT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of one row and tile: raw peak and sum, best score and its id; what `finish_kernel` filters by.

    tile_floats [M, 4, TILES]: raw peak, sum of exp(raw - raw peak), best score, sum of exp(tempered - best).
    tile_ids [M, 2, TILES]: the best id, and how many raw logits at valid ids are not finite.
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(state_index + row // QUERY_LEN).to(tl.int64)
    position = tl.load(positions + row)
    own_min_position = tl.load(min_position + slot)
    own_temperature = tl.load(temperature + slot)
    own_top_k = tl.load(top_k + slot)
    has_top_k = (own_top_k > 0) & (own_top_k < VOCAB)
    has_filter = has_top_k | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0)
    if PDL:
        gdc_wait()
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf"))
    is_odd = (ids < num_valid_ids) & ((tl.abs(x) <= 3.4028234663852886e38) == 0)
    tl.store(tile_ids + row * (2 * TILES) + TILES + tile, tl.sum(is_odd.to(tl.int32), 0))
    x = finite_or_minus_inf(x)
    to = tile_floats + row * (4 * TILES) + tile
    peak = tl.max(x, 0)
    tl.store(to, peak)
    tl.store(to + TILES, tl.sum(tl.exp(x - or_zero(peak)), 0))

    if HAS_COUNTS or HAS_PROMPT:
        repetition = tl.load(repetition_penalty + slot)
        presence = tl.load(presence_penalty + slot)
        frequency = tl.load(frequency_penalty + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count = tl.zeros((TILE,), tl.int32)
            if HAS_COUNTS:
                count = tl.load(counts + slot * counts_stride + ids, mask=inside, other=0)
                first = row - row % QUERY_LEN
                for draft in range(first + 1, row + 1):
                    count += (ids == tl.load(tokens + draft)).to(tl.int32)
            is_seen = count > 0
            if HAS_PROMPT:
                is_seen = is_seen | (tl.load(prompt + slot * prompt_stride + ids, mask=inside, other=0) != 0)
            smaller = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(is_seen, smaller, x)
            if HAS_COUNTS:
                x = x - presence * (count > 0).to(tl.float32)
                x = x - frequency * count.to(tl.float32)
    if HAS_BIAS:
        x = x + tl.load(bias + slot * bias_stride + ids, mask=inside, other=0.0)
    if position < own_min_position:
        for i in range(STOP_IDS):
            x = tl.where(ids == tl.load(stop_ids + slot * stop_stride + i), float("-inf"), x)
    x = finite_or_minus_inf(tl.where(ids < num_valid_ids, x, float("-inf")))

    if own_temperature >= GREEDY:
        x = tl.div_rn(x, tl.zeros_like(x) + own_temperature)
        if has_filter:
            tl.store(tempered + row * (TILES * TILE) + ids, x)
            peaks = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), 1)
            group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(group_peaks + row * (TILES * (TILE // GROUP)) + group, peaks)
            tl.store(to + 3 * TILES, tl.sum(tl.exp(x - or_zero(tl.max(x, 0))), 0))
        else:
            block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            x = x + gumbel_of_blocks(block, tl.load(seed + slot), position, TILE)
    best = tl.max(x, 0)
    tl.store(to + 2 * TILES, best)
    tl.store(tile_ids + row * (2 * TILES) + tile, tl.min(tl.where(x == best, ids, _NO_ID), 0))


@triton.jit
def finish_kernel(
    logits,
    logits_stride,
    positions,
    state_index,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    tile_floats,
    tile_ids,
    tempered,
    group_peaks,
    groups,
    interval,
    token,
    logprob,
    is_finite,
    QUERY_LEN: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Token, log-probability and finiteness of one row from what `tile_kernel` left."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_index + row // QUERY_LEN).to(tl.int64)
    own_temperature = tl.load(temperature + slot)
    own_top_k = tl.load(top_k + slot)
    own_top_p = tl.load(top_p + slot)
    own_min_p = tl.load(min_p + slot)
    if PDL:
        gdc_wait()
    tile = tl.arange(0, TILES_BLOCK)
    is_tile = tile < TILES
    floats = tile_floats + row * (4 * TILES) + tile
    raw_peaks = tl.load(floats, mask=is_tile, other=float("-inf"))
    raw_sums = tl.load(floats + TILES, mask=is_tile, other=0.0)
    scores = tl.load(floats + 2 * TILES, mask=is_tile, other=float("-inf"))
    best = tl.max(scores, 0)
    best_ids = tl.load(tile_ids + row * (2 * TILES) + tile, mask=is_tile, other=_NO_ID)
    num_odd = tl.load(tile_ids + row * (2 * TILES) + TILES + tile, mask=is_tile, other=0)
    tl.store(is_finite + row, (tl.sum(num_odd, 0) == 0).to(tl.uint8))
    best_id = tl.min(tl.where(scores == best, best_ids, _NO_ID), 0)

    has_top_k = (own_top_k > 0) & (own_top_k < VOCAB)
    has_top_p = own_top_p < 1.0
    if (own_temperature >= GREEDY) & (has_top_k | has_top_p | (own_min_p > 0.0)) & (best > float("-inf")):
        peak = best
        sums = tl.load(floats + 3 * TILES, mask=is_tile, other=0.0)
        total = tl.sum(sums * tl.exp(scores - peak), 0)
        own_top_p = tl.maximum(own_top_p, 1e-30)  # the peak stays, whatever top_p
        lane = tl.arange(0, GROUPS_BLOCK)
        peaks = tl.load(group_peaks + row * GROUPS + lane, mask=lane < GROUPS, other=float("-inf"))
        floor = tl.full((), 0, tl.int64)
        is_listed = peaks > float("-inf")
        if has_top_k | has_top_p:
            # What the peaks alone reach, all values reach; 16 bits of that are enough to list the groups.
            target = tl.where(has_top_k, own_top_k.to(tl.float32), own_top_p * total)
            floor = search(peaks, peak, target, 0.0, has_top_k == 0, floor, 15, 8, GROUPS_BLOCK)
            if has_top_k == 0:
                # Values that are smaller than the mass top-p may drop, shared by all ids, drop out together.
                lowest = peak + tl.log((1.0 - own_top_p) * total / VOCAB) - 0.01
                floor = tl.maximum(floor, key_of(lowest).to(tl.int64) + 2147483648)
        else:
            is_listed = is_listed & (tl.exp(peaks - peak) >= own_min_p)
        is_listed = is_listed & (key_of(peaks) >= key_of_offset(floor))
        count = is_listed.to(tl.int32)
        num_groups = tl.sum(count, 0)
        listed = groups + row * GROUPS
        tl.store(listed + tl.cumsum(count, 0) - 1, lane, mask=is_listed)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        values = tempered + row * (GROUPS * GROUP)
        left = interval + row * (CHUNK_GROUPS * GROUP)
        if has_top_k:
            target = own_top_k.to(tl.float32)
            floor = fine_threshold(
                values, listed, num_groups, left, peak, target, floor, False, GROUP, CHUNK_GROUPS
            )
            total = 0.0
            for chunk in range(tl.cdiv(num_groups, CHUNK_GROUPS)):
                x = candidates(values, listed, num_groups, chunk, GROUP, CHUNK_GROUPS)
                is_kept = key_of(x) >= key_of_offset(floor)
                total += tl.sum(tl.where(is_kept, tl.exp(x - peak), 0.0), 0)
        if has_top_p:
            target = own_top_p * total
            floor = fine_threshold(
                values, listed, num_groups, left, peak, target, floor, True, GROUP, CHUNK_GROUPS
            )
        key = tl.load(seed + slot)
        position = tl.load(positions + row)
        best = float("-inf")
        best_id = _NO_ID
        quad = tl.arange(0, CHUNK_GROUPS * GROUP // 4)
        lane = tl.arange(0, CHUNK_GROUPS * GROUP)
        for chunk in range(tl.cdiv(num_groups, CHUNK_GROUPS)):
            x = candidates(values, listed, num_groups, chunk, GROUP, CHUNK_GROUPS)
            entry = chunk * CHUNK_GROUPS + lane // GROUP
            ids = tl.load(listed + entry, mask=entry < num_groups, other=0) * GROUP + lane % GROUP
            entry = chunk * CHUNK_GROUPS + quad // (GROUP // 4)
            block = tl.load(listed + entry, mask=entry < num_groups, other=0) * (GROUP // 4) + quad % (
                GROUP // 4
            )
            is_kept = (key_of(x) >= key_of_offset(floor)) & (tl.exp(x - peak) >= own_min_p)
            noise = gumbel_of_blocks(block, key, position, CHUNK_GROUPS * GROUP)
            score = tl.where(is_kept, x + noise, float("-inf"))
            chunk_best = tl.max(score, 0)
            chunk_id = tl.min(tl.where(score == chunk_best, ids, _NO_ID), 0)
            if chunk_best > best:
                best = chunk_best
                best_id = chunk_id

    chosen = tl.where(best > float("-inf"), best_id, 0)
    raw_peak = tl.max(raw_peaks, 0)
    total = tl.sum(raw_sums * tl.exp(raw_peaks - or_zero(raw_peak)), 0)
    raw = finite_or_minus_inf(tl.load(logits + row * logits_stride + chosen))
    has_any = raw_peak > float("-inf")
    value = (raw - or_zero(raw_peak)) - log_of(tl.where(has_any, total, 1.0))
    tl.store(token + row, chosen.to(tl.int64))
    tl.store(logprob + row, tl.where(has_any, value, float("-inf")))


def tile_of(vocab: int) -> int:
    return max(GROUP, min(MAX_TILE, triton.next_power_of_2(vocab)))


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, tables = args.logits, args.tables
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty((rows,), dtype=torch.int64, device=device)
    logprob = torch.empty((rows,), dtype=torch.float32, device=device)
    is_finite = torch.empty((rows,), dtype=torch.bool, device=device)
    if rows == 0:
        return token, logprob, is_finite
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    groups = tiles * (tile // GROUP)
    tile_floats = torch.empty((rows, 4, tiles), dtype=torch.float32, device=device)
    tile_ids = torch.empty((rows, 2, tiles), dtype=torch.int32, device=device)
    # Written and read for rows with a filter only.
    tempered = torch.empty((rows, tiles * tile), dtype=torch.float32, device=device)
    group_peaks = torch.empty((rows, groups), dtype=torch.float32, device=device)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=device)
    interval = torch.empty((rows, CHUNK_GROUPS * GROUP), dtype=torch.float32, device=device)
    has_pdl = device_of(device.index).has_dependent_launch
    shared: dict[str, Any] = {
        "QUERY_LEN": rows // args.state_index.shape[0],
        "VOCAB": vocab,
        "TILES": tiles,
        "GROUP": GROUP,
        "GREEDY": GREEDY_TEMPERATURE,
        "PDL": has_pdl,
        "launch_pdl": has_pdl,
        **OPTIONS,
    }
    parameters = (tables.temperature, tables.top_p, tables.min_p)
    penalties = (tables.repetition_penalty, tables.presence_penalty, tables.frequency_penalty)
    counts, prompt, bias, stop_ids = tables.output_counts, tables.prompt_seen, tables.bias, tables.stop_ids
    tile_kernel[(tiles, rows)](
        logits, logits.stride(0), args.tokens, args.positions, args.state_index,
        *parameters, *penalties, tables.top_k, tables.seed,
        counts, counts.stride(0), prompt.view(torch.uint8), prompt.stride(0), bias, bias.stride(0),
        tables.min_position, stop_ids, stop_ids.stride(0), args.num_valid_ids,
        tile_floats, tile_ids, tempered, group_peaks,
        STOP_IDS=stop_ids.shape[1] if stop_ids.shape[0] else 0,
        HAS_COUNTS=counts.shape[0] > 0,
        HAS_PROMPT=prompt.shape[0] > 0,
        HAS_BIAS=bias.shape[0] > 0,
        TILE=tile,
        num_warps=TILE_WARPS,
        **shared,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, logits.stride(0), args.positions, args.state_index, *parameters, tables.top_k, tables.seed,
        tile_floats, tile_ids, tempered, group_peaks, listed, interval,
        token, logprob, is_finite.view(torch.uint8),
        TILES_BLOCK=triton.next_power_of_2(tiles),
        GROUPS=groups,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        CHUNK_GROUPS=CHUNK_GROUPS,
        num_warps=FINISH_WARPS,
        **shared,
    )  # fmt: skip
    return token, logprob, is_finite


def variants() -> list[KernelVariant]:
    result = []
    floats = ("temperature", "top_p", "min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    left = {"tile_floats": "*fp32", "tile_ids": "*i32", "tempered": "*fp32", "group_peaks": "*fp32"}
    for name, vocab, is_full, pdl in (
        ("plain", 248320, False, False),
        ("plain", 248320, False, True),
        ("all", 248320, True, False),
        ("all", 248320, True, True),
        ("all-small", 1024, True, False),
    ):
        tile = tile_of(vocab)
        tiles = triton.cdiv(vocab, tile)
        groups = tiles * (tile // GROUP)
        shared = {
            "QUERY_LEN": 4,
            "VOCAB": vocab,
            "TILES": tiles,
            "GROUP": GROUP,
            "GREEDY": GREEDY_TEMPERATURE,
            "PDL": pdl,
        }
        launched = {"options": {**OPTIONS, "launch_pdl": pdl}, "min_capability": 90 if pdl else 80}
        common = {
            "logits": "*fp32",
            "logits_stride": "i32",
            "positions": "*i64",
            "state_index": "*i32",
            **dict.fromkeys(floats, "*fp32"),
            "top_k": "*i32",
            "seed": "*i64",
            **left,
        }
        signature = {
            **common,
            "tokens": "*i64",
            **dict.fromkeys(penalties, "*fp32"),
            "counts": "*i32",
            "counts_stride": "i32",
            "prompt": "*u8",
            "prompt_stride": "i32",
            "bias": "*fp32",
            "bias_stride": "i32",
            "min_position": "*i64",
            "stop_ids": "*i64",
            "stop_stride": "i32",
            "num_valid_ids": "i32",
        }
        result.append(
            KernelVariant(
                name=f"tile-{name}-{vocab}" + "-pdl" * pdl,
                function=tile_kernel,
                signature=signature,
                constexprs={
                    **shared,
                    "STOP_IDS": 4 if is_full else 0,
                    "HAS_COUNTS": is_full,
                    "HAS_PROMPT": is_full,
                    "HAS_BIAS": is_full,
                    "TILE": tile,
                },
                num_warps=TILE_WARPS,
                aligned=tuple(n for n in signature if n not in ("stop_stride", "num_valid_ids")),
                **launched,
            )
        )
        if name == "plain":
            continue
        signature = {**common, "groups": "*i32", "interval": "*fp32"}
        signature |= {"token": "*i64", "logprob": "*fp32", "is_finite": "*u8"}
        result.append(
            KernelVariant(
                name=f"finish-{vocab}" + "-pdl" * pdl,
                function=finish_kernel,
                signature=signature,
                constexprs={
                    **shared,
                    "TILES_BLOCK": triton.next_power_of_2(tiles),
                    "GROUPS": groups,
                    "GROUPS_BLOCK": triton.next_power_of_2(groups),
                    "CHUNK_GROUPS": CHUNK_GROUPS,
                },
                num_warps=FINISH_WARPS,
                aligned=tuple(signature),
                **launched,
            )
        )
    return result
