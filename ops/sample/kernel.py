"""Sampling in two launches: fixed tiles of the vocabulary, then one program per row.

The first launch reads every logit once. It stores the best noisy value of every tile and, for a row with a
filter, the processed values and the peak of every group of 64 columns. The second launch combines them. For a
row with a filter, the peaks tell which groups can hold a kept id; it searches those for the threshold, two
bits of the value per step. Only a flat distribution under top-p or min-p makes it read most groups. No sort,
no atomics; the size of the vocabulary alone fixes every order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.features import (
    ALL_MASKED,
    BAD_WORDS,
    BIAS,
    DRAWN,
    NOT_FINITE,
    PENALTIES,
    RECENT_IDS,
    STOP_IDS,
)
from compiled_mtp.ops.sample.noise_kernel import gumbel_of_blocks, gumbel_of_ids
from compiled_mtp.ops.sample.processor_kernel import penalized, without_bad_words, without_stops
from compiled_mtp.ops.sample.reference import GREEDY_TEMPERATURE
from compiled_mtp.ops.sample.threshold_kernel import (
    candidates,
    fine_threshold,
    key_of,
    key_of_offset,
    search,
    tempered,
)

# Fused multiply-adds would change the processed logits, which must equal the reference's.
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
    """Return a finite peak to subtract: 0 if all values are -inf."""
    return tl.where(peak > float("-inf"), peak, 0.0)


# One binary for every window length: Triton would specialise on 1 and on multiples of 16.
@triton.jit(do_not_specialize=("query_len", "num_drafts", "drafts_stride", "masks_stride"))
def tile_kernel(
    logits,
    logits_stride,
    drafts,
    drafts_stride,
    num_drafts,
    positions,
    state_index,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    features,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    counts,
    counts_stride,
    prompt,
    prompt_stride,
    bias,
    bias_stride,
    min_position,
    stop_ids,
    stop_stride,
    bad_words,
    bad_word_lengths,
    recent_ids,
    column_ids,
    masks,
    masks_stride,
    num_valid_ids,
    tile_floats,
    tile_ids,
    processed,
    group_peaks,
    query_len,
    NUM_STOPS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    RECENT_IDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    BIAS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    HAS_COLUMN_IDS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce one tile of one row to its peak, best score and best id, and to what `finish_kernel` filters.

    tile_floats [M, 3, TILES]: the peak of the processed logits; without a filter, the best noisy tempered
    value relative to that peak; with a filter, the sum of exp(tempered) relative to it. tile_ids [M, 2,
    TILES]: the best id; the number of raw logits at valid ids that are not finite. KEEPS_ALL: write
    `processed` for every row.
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    request = row // query_len
    slot = tl.load(state_index + request).to(tl.int64)
    position = tl.load(positions + row)
    own_features = tl.load(features + slot)
    own_temperature = tl.load(temperature + slot)
    own_top_k = tl.load(top_k + slot)
    has_top_k = (own_top_k > 0) & (own_top_k < VOCAB)
    has_filter = has_top_k | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0)
    if PDL:
        gdc_wait()
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < VOCAB
    if HAS_COLUMN_IDS:
        ids = tl.load(column_ids + columns, mask=inside, other=_NO_ID).to(tl.int32)
    else:
        ids = columns
    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=float("-inf"))
    is_odd = (ids < num_valid_ids) & ((tl.abs(x) <= 3.4028234663852886e38) == 0)
    tl.store(tile_ids + row * (2 * TILES) + TILES + tile, tl.sum(is_odd.to(tl.int32), 0))
    x = finite_or_minus_inf(x)

    if own_features != 0:
        own_drafts = drafts + request * drafts_stride
        num_counted = num_drafts - (query_len - 1) + (row % query_len).to(tl.int32)
        if own_features & PENALTIES:
            x = penalized(
                x,
                ids,
                inside,
                own_drafts,
                num_counted,
                counts + slot * counts_stride,
                prompt + slot * prompt_stride,
                tl.load(repetition_penalty + slot),
                tl.load(presence_penalty + slot),
                tl.load(frequency_penalty + slot),
            )
        if own_features & BIAS:
            x = x + tl.load(bias + slot * bias_stride + ids, mask=inside, other=0.0)
        if (own_features & STOP_IDS) != 0 and position < tl.load(min_position + slot):
            x = without_stops(x, ids, stop_ids + slot * stop_stride, NUM_STOPS)
        if own_features & BAD_WORDS:
            x = without_bad_words(
                x,
                ids,
                own_drafts,
                num_counted,
                recent_ids + slot * RECENT_IDS,
                position,
                bad_words + slot * (NUM_WORDS * RECENT_IDS),
                bad_word_lengths + slot * NUM_WORDS,
                NUM_WORDS,
                RECENT_IDS,
            )
    if HAS_MASKS:
        word = tl.load(masks + row * masks_stride + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))
    x = finite_or_minus_inf(tl.where(ids < num_valid_ids, x, float("-inf")))

    peak = tl.max(x, 0)
    to = tile_floats + row * (3 * TILES) + tile
    tl.store(to, peak)
    is_random = own_temperature >= GREEDY
    if KEEPS_ALL or (is_random & has_filter):
        tl.store(processed + row * (TILES * TILE) + columns, x)
    best = peak
    if is_random:
        if has_filter:
            peaks = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), 1)
            group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(group_peaks + row * (TILES * (TILE // GROUP)) + group, peaks)
            tl.store(to + 2 * TILES, tl.sum(tl.exp(tempered(x, or_zero(peak), own_temperature)), 0))
        else:
            x = tempered(x, or_zero(peak), own_temperature)
            if HAS_COLUMN_IDS:
                x = x + gumbel_of_ids(ids, tl.load(seed + slot), position)
            else:
                block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
                x = x + gumbel_of_blocks(block, tl.load(seed + slot), position, TILE)
            best = tl.max(x, 0)
            tl.store(to + TILES, best)
    tl.store(tile_ids + row * (2 * TILES) + tile, tl.min(tl.where(x == best, ids, _NO_ID), 0))


@triton.jit(do_not_specialize=("query_len",))
def finish_kernel(
    positions,
    state_index,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    column_ids,
    tile_floats,
    tile_ids,
    processed,
    group_peaks,
    groups,
    interval,
    token,
    outcome,
    row_peaks,
    row_floors,
    query_len,
    HAS_COLUMN_IDS: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GREEDY: tl.constexpr,
    DRAWN: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute token and outcome of one row from `tile_kernel`'s results; KEEPS_ALL: also peak, threshold."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_index + row // query_len).to(tl.int64)
    own_temperature = tl.load(temperature + slot)
    own_top_k = tl.load(top_k + slot)
    own_top_p = tl.load(top_p + slot)
    own_min_p = tl.load(min_p + slot)
    if PDL:
        gdc_wait()
    tile = tl.arange(0, TILES_BLOCK)
    is_tile = tile < TILES
    floats = tile_floats + row * (3 * TILES) + tile
    peaks_of_tiles = tl.load(floats, mask=is_tile, other=float("-inf"))
    row_peak = tl.max(peaks_of_tiles, 0)
    is_random = own_temperature >= GREEDY
    has_top_k = (own_top_k > 0) & (own_top_k < VOCAB)
    has_top_p = own_top_p < 1.0
    has_filter = has_top_k | has_top_p | (own_min_p > 0.0)
    scores = peaks_of_tiles
    if is_random:
        # Values relative to a tile's peak become relative to the row's peak.
        scores = tempered(peaks_of_tiles, or_zero(row_peak), own_temperature)
        if has_filter == 0:
            scores += tl.load(floats + TILES, mask=is_tile, other=float("-inf"))
    best = tl.max(scores, 0)
    best_ids = tl.load(tile_ids + row * (2 * TILES) + tile, mask=is_tile, other=_NO_ID)
    num_odd = tl.load(tile_ids + row * (2 * TILES) + TILES + tile, mask=is_tile, other=0)
    best_id = tl.min(tl.where(scores == best, best_ids, _NO_ID), 0)
    floor = tl.full((), 0, tl.int64)
    if is_random & has_filter & (row_peak > float("-inf")):
        peak = row_peak - row_peak  # 0, the peak of the tempered values
        sums = tl.load(floats + 2 * TILES, mask=is_tile, other=0.0)
        total = tl.sum(sums * tl.exp(scores), 0)
        own_top_p = tl.maximum(own_top_p, 1e-30)  # top-p always keeps the peak
        lane = tl.arange(0, GROUPS_BLOCK)
        peaks = tl.load(group_peaks + row * GROUPS + lane, mask=lane < GROUPS, other=float("-inf"))
        peaks = tempered(peaks, row_peak, own_temperature)
        is_listed = peaks > float("-inf")
        if has_top_k | has_top_p:
            # The group peaks are some of the values: their threshold is a lower bound. 16 bits of it suffice
            # to list the groups.
            target = tl.where(has_top_k, own_top_k.to(tl.float32), own_top_p * total)
            floor = search(peaks, peak, target, 0.0, has_top_k == 0, floor, 15, 8, GROUPS_BLOCK)
            if has_top_k == 0:
                # Even VOCAB values below this have less mass than top-p drops: none of them is kept.
                lowest = peak + tl.log((1.0 - own_top_p) * total / VOCAB) - 0.01
                floor = tl.maximum(floor, key_of(lowest).to(tl.int64) + 2147483648)
        else:
            is_listed = is_listed & (tl.exp(peaks - peak) >= own_min_p)
        is_listed = is_listed & (key_of(peaks) >= key_of_offset(floor))
        count = is_listed.to(tl.int32)
        num_groups = tl.sum(count, 0)
        listed = groups + row * GROUPS
        tl.store(listed + tl.cumsum(count, 0) - 1, lane, mask=is_listed)
        tl.debug_barrier()  # threads read entries that other threads wrote

        values = processed + row * (GROUPS * GROUP)
        left = interval + row * (CHUNK_GROUPS * GROUP)
        if has_top_k:
            target = own_top_k.to(tl.float32)
            floor = fine_threshold(
                values, listed, num_groups, left, row_peak, own_temperature, peak, target, floor, False,
                GROUP, CHUNK_GROUPS,
            )  # fmt: skip
            total = 0.0
            for chunk in range(tl.cdiv(num_groups, CHUNK_GROUPS)):
                x = candidates(
                    values, listed, num_groups, chunk, row_peak, own_temperature, GROUP, CHUNK_GROUPS
                )
                is_kept = key_of(x) >= key_of_offset(floor)
                total += tl.sum(tl.where(is_kept, tl.exp(x - peak), 0.0), 0)
        if has_top_p:
            target = own_top_p * total
            floor = fine_threshold(
                values, listed, num_groups, left, row_peak, own_temperature, peak, target, floor, True,
                GROUP, CHUNK_GROUPS,
            )  # fmt: skip
        key = tl.load(seed + slot)
        position = tl.load(positions + row)
        best = float("-inf")
        best_id = _NO_ID
        quad = tl.arange(0, CHUNK_GROUPS * GROUP // 4)
        lane = tl.arange(0, CHUNK_GROUPS * GROUP)
        for chunk in range(tl.cdiv(num_groups, CHUNK_GROUPS)):
            x = candidates(values, listed, num_groups, chunk, row_peak, own_temperature, GROUP, CHUNK_GROUPS)
            entry = chunk * CHUNK_GROUPS + lane // GROUP
            ids = tl.load(listed + entry, mask=entry < num_groups, other=0) * GROUP + lane % GROUP
            is_kept = (key_of(x) >= key_of_offset(floor)) & (tl.exp(x - peak) >= own_min_p)
            if HAS_COLUMN_IDS:
                ids = tl.load(column_ids + ids, mask=ids < VOCAB, other=_NO_ID).to(tl.int32)
                noise = gumbel_of_ids(ids, key, position)
            else:
                entry = chunk * CHUNK_GROUPS + quad // (GROUP // 4)
                block = tl.load(listed + entry, mask=entry < num_groups, other=0) * (GROUP // 4)
                noise = gumbel_of_blocks(block + quad % (GROUP // 4), key, position, CHUNK_GROUPS * GROUP)
            score = tl.where(is_kept, x + noise, float("-inf"))
            chunk_best = tl.max(score, 0)
            chunk_id = tl.min(tl.where(score == chunk_best, ids, _NO_ID), 0)
            if (chunk_best > best) | ((chunk_best == best) & (chunk_id < best_id)):
                best = chunk_best
                best_id = chunk_id

    has_any = row_peak > float("-inf")
    tl.store(token + row, tl.where(has_any, best_id, 0).to(tl.int64))
    drawn = tl.where(has_any, DRAWN, ALL_MASKED)
    tl.store(outcome + row, tl.where(tl.sum(num_odd, 0) == 0, drawn, NOT_FINITE).to(tl.uint8))
    if KEEPS_ALL:
        tl.store(row_peaks + row, or_zero(row_peak))
        tl.store(row_floors + row, floor)


@triton.jit(do_not_specialize=("query_len",))
def filtered_kernel(
    state_index,
    temperature,
    min_p,
    processed,
    row_peaks,
    row_floors,
    filtered,
    query_len,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Compute one tile of a row of `filter_logits` from the results of the other two kernels."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(state_index + row // query_len).to(tl.int64)
    own_temperature = tl.load(temperature + slot)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(processed + row * (TILES * TILE) + columns)
    if own_temperature >= GREEDY:
        x = tempered(x, tl.load(row_peaks + row), own_temperature)
        is_kept = (key_of(x) >= key_of_offset(tl.load(row_floors + row))) & (
            tl.exp(x) >= tl.load(min_p + slot)
        )
        x = tl.where(is_kept, x, float("-inf"))
    tl.store(filtered + row * VOCAB + columns, x, mask=columns < VOCAB)


def tile_of(vocab: int) -> int:
    return max(GROUP, min(MAX_TILE, triton.next_power_of_2(vocab)))


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    token, outcome, _ = _launch(args, keeps_all=False)
    return token, outcome


def launch_filter_logits(args: Any) -> torch.Tensor:
    return _launch(args, keeps_all=True)[2]


def _launch(args: Any, keeps_all: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, tables = args.logits, args.tables
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty((rows,), dtype=torch.int64, device=device)
    outcome = torch.empty((rows,), dtype=torch.uint8, device=device)
    filtered = torch.empty((rows, vocab) if keeps_all else (0,), dtype=torch.float32, device=device)
    if rows == 0:
        return token, outcome, filtered
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    groups = tiles * (tile // GROUP)
    tile_floats = torch.empty((rows, 3, tiles), dtype=torch.float32, device=device)
    tile_ids = torch.empty((rows, 2, tiles), dtype=torch.int32, device=device)
    # These four are used only for rows with a filter, except `processed` if keeps_all.
    processed = torch.empty((rows, tiles * tile), dtype=torch.float32, device=device)
    group_peaks = torch.empty((rows, groups), dtype=torch.float32, device=device)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=device)
    interval = torch.empty((rows, CHUNK_GROUPS * GROUP), dtype=torch.float32, device=device)
    row_peaks = torch.empty((rows,) if keeps_all else (0,), dtype=torch.float32, device=device)
    row_floors = torch.empty((rows,) if keeps_all else (0,), dtype=torch.int64, device=device)
    has_pdl = device_of(device.index).has_dependent_launch and not keeps_all
    query_len = rows // args.state_index.shape[0]
    has_columns, has_masks = args.column_ids is not None, args.masks is not None
    # An absent tensor still needs a pointer; the kernel never reads it.
    column_ids = args.column_ids if has_columns else args.state_index
    masks = args.masks if has_masks else args.state_index
    shared: dict[str, Any] = {
        "HAS_COLUMN_IDS": has_columns,
        "KEEPS_ALL": keeps_all,
        "VOCAB": vocab,
        "TILES": tiles,
        "GROUP": GROUP,
        "GREEDY": GREEDY_TEMPERATURE,
        "PDL": has_pdl,
        "launch_pdl": has_pdl,
        **OPTIONS,
    }
    filters = (tables.temperature, tables.top_p, tables.min_p, tables.top_k)
    penalties = (tables.repetition_penalty, tables.presence_penalty, tables.frequency_penalty)
    counts, prompt, bias, stop_ids = tables.output_counts, tables.prompt_seen, tables.bias, tables.stop_ids
    tile_kernel[(tiles, rows)](
        logits, logits.stride(0), args.drafts, args.drafts.stride(0), args.drafts.shape[1],
        args.positions, args.state_index, *filters, tables.seed, tables.features, *penalties,
        counts, counts.stride(0), prompt.view(torch.uint8), prompt.stride(0), bias, bias.stride(0),
        tables.min_position, stop_ids, stop_ids.stride(0),
        tables.bad_words, tables.bad_word_lengths, tables.recent_ids,
        column_ids, masks, masks.stride(0), args.num_valid_ids,
        tile_floats, tile_ids, processed, group_peaks, query_len,
        NUM_STOPS=stop_ids.shape[1], NUM_WORDS=tables.bad_words.shape[1], RECENT_IDS=RECENT_IDS,
        PENALTIES=PENALTIES, BIAS=BIAS, STOP_IDS=STOP_IDS, BAD_WORDS=BAD_WORDS, HAS_MASKS=has_masks,
        TILE=tile, num_warps=TILE_WARPS, **shared,
    )  # fmt: skip
    finish_kernel[(rows,)](
        args.positions, args.state_index, *filters, tables.seed, column_ids,
        tile_floats, tile_ids, processed, group_peaks, listed, interval,
        token, outcome, row_peaks, row_floors, query_len,
        DRAWN=DRAWN,
        ALL_MASKED=ALL_MASKED,
        NOT_FINITE=NOT_FINITE,
        TILES_BLOCK=triton.next_power_of_2(tiles),
        GROUPS=groups,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        CHUNK_GROUPS=CHUNK_GROUPS,
        num_warps=FINISH_WARPS,
        **shared,
    )  # fmt: skip
    if keeps_all:
        filtered_kernel[(tiles, rows)](
            args.state_index, tables.temperature, tables.min_p, processed, row_peaks, row_floors, filtered,
            query_len, VOCAB=vocab, TILES=tiles, TILE=tile, GREEDY=GREEDY_TEMPERATURE,
            num_warps=TILE_WARPS, **OPTIONS,
        )  # fmt: skip
    return token, outcome, filtered
