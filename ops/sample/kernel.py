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

from compiled_mtp.ops.sample.noise_kernel import gumbel_of_blocks, log_of
from compiled_mtp.ops.sample.reference import GREEDY_TEMPERATURE
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
):
    """Of one row and tile: raw peak and sum, best score and its id; what `finish_kernel` filters by.

    tile_floats [M, 4, TILES]: raw peak, sum of exp(raw - raw peak), best score, sum of exp(tempered - best).
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(state_index + row // QUERY_LEN).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf"))
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
    if tl.load(positions + row) < tl.load(min_position + slot):
        for i in range(STOP_IDS):
            x = tl.where(ids == tl.load(stop_ids + slot * stop_stride + i), float("-inf"), x)
    x = finite_or_minus_inf(tl.where(ids < num_valid_ids, x, float("-inf")))

    degree = tl.load(temperature + slot)
    if degree >= GREEDY:
        x = tl.div_rn(x, tl.zeros_like(x) + degree)
        limit = tl.load(top_k + slot)
        has_top_k = (limit > 0) & (limit < VOCAB)
        if has_top_k | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0):
            tl.store(tempered + row * (TILES * TILE) + ids, x)
            peaks = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), 1)
            group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(group_peaks + row * (TILES * (TILE // GROUP)) + group, peaks)
            tl.store(to + 3 * TILES, tl.sum(tl.exp(x - or_zero(tl.max(x, 0))), 0))
        else:
            block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            x = x + gumbel_of_blocks(block, tl.load(seed + slot), tl.load(positions + row), TILE)
    best = tl.max(x, 0)
    tl.store(to + 2 * TILES, best)
    tl.store(tile_ids + row * TILES + tile, tl.min(tl.where(x == best, ids, _NO_ID), 0))


@triton.jit
def key_of(x):
    """int32 keys in the order of float32 values; -0.0 as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_of_offset(threshold):
    """The int32 key of a threshold, which is counted from the lowest key."""
    return (threshold - 2147483648).to(tl.int32)


@triton.jit
def candidates(tempered, groups, num_groups, chunk, GROUP: tl.constexpr, CHUNK_GROUPS: tl.constexpr):
    """Values of a chunk of the listed groups, -inf beyond the list."""
    entry = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    group = tl.load(groups + entry, mask=entry < num_groups, other=0)
    at = tempered + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(at, mask=(entry < num_groups)[:, None], other=float("-inf"))
    return tl.reshape(x, (CHUNK_GROUPS * GROUP,))


@triton.jit
def weigh(x, peak, is_mass, threshold, step):
    """exp(x - peak), or 1, and where x reaches threshold + r * 4^step for r = 1, 2, 3, -inf excepted."""
    key = key_of(x)
    unit = tl.full((), 1, tl.int64) << (2 * step)
    is_value = x > float("-inf")
    reach1 = is_value & (key >= key_of_offset(threshold + unit))
    reach2 = is_value & (key >= key_of_offset(threshold + 2 * unit))
    reach3 = is_value & (key >= key_of_offset(threshold + 3 * unit))
    return tl.where(is_mass, tl.exp(x - peak), 1.0), reach1, reach2, reach3


@triton.jit
def add_up(mass1, mass2, mass3, number1, number2, number3, SIZE: tl.constexpr):
    """The six sums in one reduction: [8] = 0, mass1, mass2, mass3, 0, number1, number2, number3."""
    zero = tl.zeros((SIZE,), tl.float32)
    even = tl.join(tl.join(zero, zero), tl.join(mass2, number2))
    odd = tl.join(tl.join(mass1, number1), tl.join(mass3, number3))
    return tl.sum(tl.reshape(tl.join(even, odd), (SIZE, 8)), 0)


@triton.jit
def take_digit(sums, target, above, mass_end, number_end, number_low):
    """The largest r of 0..3 at which the sums, and what lies above all values summed, have the target's mass.

    Returns r, the mass and number of values from the interval's new end on, and the number from its start.
    """
    r = tl.arange(0, 8)
    digit = tl.sum(((r > 0) & (r < 4) & (sums + above >= target)).to(tl.int32), 0)
    number_low = tl.where(digit > 0, tl.sum(tl.where(r == digit + 4, sums, 0.0), 0), number_low)
    mass_end = tl.where(digit < 3, tl.sum(tl.where(r == digit + 1, sums, 0.0), 0), mass_end)
    number_end = tl.where(digit < 3, tl.sum(tl.where(r == digit + 5, sums, 0.0), 0), number_end)
    return digit, mass_end, number_end, number_low


@triton.jit
def search(x, peak, target, above, is_mass, threshold, step, last_step, SIZE: tl.constexpr):
    """The largest threshold that the target's mass reaches, two bits a step, among values in registers.

    `above` is the mass of values that are not in x and reach every threshold tried. Stops early when a single
    value is left in the interval.
    """
    mass_end = 0.0
    number_end = 0.0
    number_low = SIZE + 2.0
    step += tl.full((), 0, tl.int32)  # a literal cannot be the variable of a loop
    while (step >= last_step) & (number_low - number_end > 1.0):
        weight, reach1, reach2, reach3 = weigh(x, peak, is_mass, threshold, step)
        sums = add_up(
            tl.where(reach1, weight, 0.0),
            tl.where(reach2, weight, 0.0),
            tl.where(reach3, weight, 0.0),
            reach1.to(tl.float32),
            reach2.to(tl.float32),
            reach3.to(tl.float32),
            SIZE,
        )
        digit, mass_end, number_end, number_low = take_digit(
            sums, target, above, mass_end, number_end, number_low
        )
        threshold += digit.to(tl.int64) << (2 * step)
        step -= 1
    return threshold


@triton.jit
def fine_threshold(
    tempered,
    groups,
    num_groups,
    interval,
    peak,
    target,
    floor,
    is_mass,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
):
    """The largest threshold that the target's mass reaches, among the listed groups' values from `floor` on.

    While the interval holds more values than a chunk, every step reads the groups; the values that are left
    are then gathered in `interval` and searched in registers.
    """
    SIZE: tl.constexpr = GROUP * CHUNK_GROUPS
    lane = tl.arange(0, SIZE)
    num_chunks = tl.cdiv(num_groups, CHUNK_GROUPS)
    floor_key = key_of_offset(floor)
    # From the first digit in which the peak and the floor differ.
    step = 15
    while (step > 0) & ((((key_of(peak).to(tl.int64) + 2147483648) ^ floor) >> (2 * step)) == 0):
        step -= 1
    threshold = (floor >> (2 * step + 2)) << (2 * step + 2)
    mass_end = 0.0
    number_end = 0.0
    x = candidates(tempered, groups, num_groups, 0, GROUP, CHUNK_GROUPS)
    x = tl.where(key_of(x) >= floor_key, x, float("-inf"))
    if num_chunks > 1:
        number_low = SIZE + 1.0
        while (step >= 0) & (number_low - number_end > SIZE):
            mass1 = tl.zeros((SIZE,), tl.float32)
            mass2 = tl.zeros((SIZE,), tl.float32)
            mass3 = tl.zeros((SIZE,), tl.float32)
            numbers = tl.zeros((SIZE,), tl.int32)  # three counts of chunks, 10 bits each
            for chunk in tl.range(num_chunks, loop_unroll_factor=2):
                x = candidates(tempered, groups, num_groups, chunk, GROUP, CHUNK_GROUPS)
                x = tl.where(key_of(x) >= floor_key, x, float("-inf"))
                weight, reach1, reach2, reach3 = weigh(x, peak, is_mass, threshold, step)
                mass1 += tl.where(reach1, weight, 0.0)
                mass2 += tl.where(reach2, weight, 0.0)
                mass3 += tl.where(reach3, weight, 0.0)
                numbers += tl.where(reach1, 1, 0) + tl.where(reach2, 1 << 10, 0)
                numbers += tl.where(reach3, 1 << 20, 0)
            sums = add_up(
                mass1,
                mass2,
                mass3,
                (numbers & 1023).to(tl.float32),
                ((numbers >> 10) & 1023).to(tl.float32),
                (numbers >> 20).to(tl.float32),
                SIZE,
            )
            digit, mass_end, number_end, number_low = take_digit(
                sums, target, 0.0, mass_end, number_end, number_low
            )
            threshold += digit.to(tl.int64) << (2 * step)
            step -= 1
        if step >= 0:
            first = tl.maximum(key_of_offset(threshold), floor_key)
            last = key_of_offset(threshold + (tl.full((), 4, tl.int64) << (2 * step)) - 1)
            filled = 0
            tl.debug_barrier()  # an earlier search may still be reading the interval
            for chunk in range(num_chunks):
                x = candidates(tempered, groups, num_groups, chunk, GROUP, CHUNK_GROUPS)
                is_inside = (key_of(x) >= first) & (key_of(x) <= last) & (x > float("-inf"))
                count = is_inside.to(tl.int32)
                tl.store(interval + filled + tl.cumsum(count, 0) - 1, x, mask=is_inside)
                filled += tl.sum(count, 0)
            tl.debug_barrier()
            x = tl.load(interval + lane, mask=lane < filled, other=float("-inf"))
    threshold = search(x, peak, target, mass_end, is_mass, threshold, step, 0, SIZE)
    return tl.maximum(threshold, floor)


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
    QUERY_LEN: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Token and log-probability of one row from what `tile_kernel` left."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_index + row // QUERY_LEN).to(tl.int64)
    tile = tl.arange(0, TILES_BLOCK)
    is_tile = tile < TILES
    floats = tile_floats + row * (4 * TILES) + tile
    raw_peaks = tl.load(floats, mask=is_tile, other=float("-inf"))
    raw_sums = tl.load(floats + TILES, mask=is_tile, other=0.0)
    scores = tl.load(floats + 2 * TILES, mask=is_tile, other=float("-inf"))
    best = tl.max(scores, 0)
    best_ids = tl.load(tile_ids + row * TILES + tile, mask=is_tile, other=_NO_ID)
    best_id = tl.min(tl.where(scores == best, best_ids, _NO_ID), 0)

    degree = tl.load(temperature + slot)
    limit = tl.load(top_k + slot)
    share = tl.load(top_p + slot)
    least = tl.load(min_p + slot)
    has_top_k = (limit > 0) & (limit < VOCAB)
    has_top_p = share < 1.0
    if (degree >= GREEDY) & (has_top_k | has_top_p | (least > 0.0)) & (best > float("-inf")):
        peak = best
        sums = tl.load(floats + 3 * TILES, mask=is_tile, other=0.0)
        total = tl.sum(sums * tl.exp(scores - peak), 0)
        share = tl.maximum(share, 1e-30)  # the peak stays, whatever top_p
        lane = tl.arange(0, GROUPS_BLOCK)
        peaks = tl.load(group_peaks + row * GROUPS + lane, mask=lane < GROUPS, other=float("-inf"))
        floor = tl.full((), 0, tl.int64)
        is_listed = peaks > float("-inf")
        if has_top_k | has_top_p:
            # What the peaks alone reach, all values reach; 16 bits of that are enough to list the groups.
            target = tl.where(has_top_k, limit.to(tl.float32), share * total)
            floor = search(peaks, peak, target, 0.0, has_top_k == 0, floor, 15, 8, GROUPS_BLOCK)
            if has_top_k == 0:
                # Values that are smaller than the mass top-p may drop, shared by all ids, drop out together.
                lowest = peak + tl.log((1.0 - share) * total / VOCAB) - 0.01
                floor = tl.maximum(floor, key_of(lowest).to(tl.int64) + 2147483648)
        else:
            is_listed = is_listed & (tl.exp(peaks - peak) >= least)
        is_listed = is_listed & (key_of(peaks) >= key_of_offset(floor))
        count = is_listed.to(tl.int32)
        num_groups = tl.sum(count, 0)
        listed = groups + row * GROUPS
        tl.store(listed + tl.cumsum(count, 0) - 1, lane, mask=is_listed)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        values = tempered + row * (GROUPS * GROUP)
        left = interval + row * (CHUNK_GROUPS * GROUP)
        if has_top_k:
            target = limit.to(tl.float32)
            floor = fine_threshold(
                values, listed, num_groups, left, peak, target, floor, False, GROUP, CHUNK_GROUPS
            )
            total = 0.0
            for chunk in range(tl.cdiv(num_groups, CHUNK_GROUPS)):
                x = candidates(values, listed, num_groups, chunk, GROUP, CHUNK_GROUPS)
                is_kept = key_of(x) >= key_of_offset(floor)
                total += tl.sum(tl.where(is_kept, tl.exp(x - peak), 0.0), 0)
        if has_top_p:
            target = share * total
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
            is_kept = (key_of(x) >= key_of_offset(floor)) & (tl.exp(x - peak) >= least)
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


def launch(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty((rows,), dtype=torch.int64, device=device)
    logprob = torch.empty((rows,), dtype=torch.float32, device=device)
    if rows == 0:
        return token, logprob
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    groups = tiles * (tile // GROUP)
    tile_floats = torch.empty((rows, 4, tiles), dtype=torch.float32, device=device)
    tile_ids = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    # Written and read for rows with a filter only.
    tempered = torch.empty((rows, tiles * tile), dtype=torch.float32, device=device)
    group_peaks = torch.empty((rows, groups), dtype=torch.float32, device=device)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=device)
    interval = torch.empty((rows, CHUNK_GROUPS * GROUP), dtype=torch.float32, device=device)
    shared: dict[str, Any] = {
        "QUERY_LEN": rows // state_index.shape[0],
        "VOCAB": vocab,
        "TILES": tiles,
        "GROUP": GROUP,
        "GREEDY": GREEDY_TEMPERATURE,
        **OPTIONS,
    }
    tile_kernel[(tiles, rows)](
        logits,
        logits.stride(0),
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
        output_counts,
        output_counts.stride(0),
        prompt_seen.view(torch.uint8),
        prompt_seen.stride(0),
        bias,
        bias.stride(0),
        min_position,
        stop_ids,
        stop_ids.stride(0),
        num_valid_ids,
        tile_floats,
        tile_ids,
        tempered,
        group_peaks,
        STOP_IDS=stop_ids.shape[1] if stop_ids.shape[0] else 0,
        HAS_COUNTS=output_counts.shape[0] > 0,
        HAS_PROMPT=prompt_seen.shape[0] > 0,
        HAS_BIAS=bias.shape[0] > 0,
        TILE=tile,
        num_warps=TILE_WARPS,
        **shared,
    )
    finish_kernel[(rows,)](
        logits,
        logits.stride(0),
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
        listed,
        interval,
        token,
        logprob,
        TILES_BLOCK=triton.next_power_of_2(tiles),
        GROUPS=groups,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        CHUNK_GROUPS=CHUNK_GROUPS,
        num_warps=FINISH_WARPS,
        **shared,
    )
    return token, logprob


def variants() -> list[KernelVariant]:
    result = []
    floats = ("temperature", "top_p", "min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    left = {"tile_floats": "*fp32", "tile_ids": "*i32", "tempered": "*fp32", "group_peaks": "*fp32"}
    for name, vocab, is_full in (("plain", 248320, False), ("all", 248320, True), ("all-small", 1024, True)):
        tile = tile_of(vocab)
        tiles = triton.cdiv(vocab, tile)
        groups = tiles * (tile // GROUP)
        shared = {
            "QUERY_LEN": 4,
            "VOCAB": vocab,
            "TILES": tiles,
            "GROUP": GROUP,
            "GREEDY": GREEDY_TEMPERATURE,
        }
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
                name=f"tile-{name}-{vocab}",
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
                options=OPTIONS,
            )
        )
        if name == "plain":
            continue
        signature = {**common, "groups": "*i32", "interval": "*fp32", "token": "*i64", "logprob": "*fp32"}
        result.append(
            KernelVariant(
                name=f"finish-{vocab}",
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
                options=OPTIONS,
            )
        )
    return result
