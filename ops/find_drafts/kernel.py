"""Drafts from the text in two launches: programs search parts of a request's text, then one chooses.

A program is one warp, so that no branch needs a barrier. It compares a part with the last id, with the ids
before it only if some place matches, and goes beyond LEAST_MATCH ids only where a place matches that many.
Lengths and places are integers, so no result depends on the parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.find_drafts.reference import (
    DECAY,
    LEAST_KEPT,
    LEAST_MATCH,
    LEAST_THRESHOLD,
    MOST_MATCH,
    MOST_THRESHOLD,
    RISE,
    UNIT,
)

BLOCK = 512
# Programs of one request at most, and of all requests together: about as many as a GPU holds at a time.
MOST_PARTS, MOST_PROGRAMS = 512, 4096
PLACE_BITS = 26


@triton.jit
def match_before(ids, place, last, is_open, length, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Compare the ids FIRST to LAST - 1 places back, where those between matched; return what still matches
    and the lengths."""
    for back in tl.static_range(FIRST, LAST):
        wanted = tl.load(ids + last - back, mask=last >= back, other=-1)
        one = tl.load(ids + place - back, mask=is_open & (place >= back), other=-1)
        is_open = is_open & (one == wanted) & (one >= 0)
        length += is_open.to(tl.int32)
    return is_open, length


@triton.jit
def search_kernel(
    token_ids,
    state_index,
    pos,
    best,
    text_stride,
    BLOCK: tl.constexpr,
    LEAST_MATCH: tl.constexpr,
    MOST_MATCH: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the longest match in the blocks of one part, and its latest place: length * 2^26 + place."""
    if PDL:
        gdc_launch_dependents()
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    request = tl.program_id(1)
    slot = tl.load(state_index + request).to(tl.int64)
    ids = token_ids + slot * text_stride
    if PDL and not EARLY:
        gdc_wait()
    last = tl.load(pos + slot).to(tl.int32)
    # A request that has reached max_model_len has its last token behind its row.
    wanted = tl.load(ids + last, mask=last < text_stride, other=-1)
    # Matches no id.
    wanted = tl.where(wanted < 0, -2, wanted)
    lane = tl.arange(0, BLOCK)
    found = 0
    for block in range(part, tl.cdiv(last, BLOCK), num_parts):
        place = block * BLOCK + lane
        # The whole row is loaded, not up to `last`, so that the mask allows loads of four ids.
        one = tl.load(ids + place, mask=place < text_stride, other=-1)
        is_open = (one == wanted) & (place < last)
        if tl.max(is_open.to(tl.int32), 0) > 0:
            length = is_open.to(tl.int32)
            is_open, length = match_before(ids, place, last, is_open, length, 1, LEAST_MATCH)
            if tl.max(length, 0) >= LEAST_MATCH:
                is_open, length = match_before(ids, place, last, is_open, length, LEAST_MATCH, MOST_MATCH)
                is_match = length >= LEAST_MATCH
                longest = tl.max(tl.where(is_match, (length << PLACE_BITS) + place, 0), 0)
                found = tl.maximum(found, longest)
    if PDL:
        # The text is older than the last fence; the last reader of `best` may not be.
        gdc_wait()
    tl.store(best + request * num_parts + part, found)


@triton.jit(do_not_specialize=["text_stride", "num_parts", "chain_len", "verify", "accepted_stride"])
def choose_kernel(
    token_ids,
    state_index,
    pos,
    best,
    chain,
    matched,
    threshold,
    chain_kept,
    drafts,
    accepted,
    left,
    matches,
    text_stride,
    num_parts,
    chain_len,
    verify,
    accepted_stride,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_MATCH: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    LEAST_THRESHOLD: tl.constexpr,
    MOST_THRESHOLD: tl.constexpr,
    RISE: tl.constexpr,
    LEAST_KEPT: tl.constexpr,
    UNIT: tl.constexpr,
    DECAY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: learn from the round, choose, and store the slot's drafts."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(0)
    slot = tl.load(state_index + request).to(tl.int64)
    lane = tl.arange(0, LANES)
    is_draft = lane < DRAFTS
    part = tl.arange(0, PARTS)
    if PDL:
        gdc_wait()
    is_live = slot > 0
    found = tl.max(tl.load(best + request * num_parts + part, mask=part < num_parts, other=0), 0)
    length = found >> PLACE_BITS
    place = found & ((1 << PLACE_BITS) - 1)
    # A round of one row verified no drafts.
    verified = tl.where(verify > 0, tl.load(matched + slot), 0)
    least = tl.load(threshold + slot)
    mean = tl.load(chain_kept + slot)
    if accepted is not None:
        kept = (tl.load(accepted + request * accepted_stride).to(tl.int32) - 1) * UNIT
        gained = kept - tl.maximum(tl.minimum(mean, verify * UNIT), LEAST_KEPT)
        moved = least - tl.maximum(gained, -RISE)
        moved = tl.minimum(tl.maximum(moved, LEAST_THRESHOLD), MOST_THRESHOLD)
        rested = tl.where(least > MOST_MATCH * UNIT, least - UNIT, least)
        least = tl.where(is_live, tl.where(verified > 0, moved, rested), least)
        mean = tl.where(is_live & (verified == 0) & (verify > 0), mean + ((kept - mean) >> DECAY), mean)
    is_taken = is_live & (length * UNIT >= least)
    last = tl.load(pos + slot).to(tl.int32)
    period = tl.maximum(last - place, 1)
    at = token_ids + slot * text_stride + place + 1 + lane % period
    own = tl.load(at, mask=is_draft, other=-1)
    # Drafts from the first id of -1 on are id 0.
    own = tl.where(tl.cumsum((own < 0).to(tl.int32), 0) > 0, 0, own).to(tl.int64)
    chained = tl.load(chain + request * chain_len + lane, mask=lane < chain_len, other=0)
    row = tl.where(is_taken, own, tl.where(is_live, chained, 0))
    taken = tl.where(is_taken, length, 0)
    tl.store(drafts + slot * DRAFTS + lane, row, mask=is_draft)
    tl.store(left + request * DRAFTS + lane, row, mask=is_draft)
    tl.store(matches + 2 * request, verified.to(tl.int64))
    tl.store(matches + 2 * request + 1, taken.to(tl.int64))
    tl.store(matched + slot, taken)
    tl.store(threshold + slot, least)
    tl.store(chain_kept + slot, mean)


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, state_index, pos, drafts = args.token_ids, args.state_index, args.pos, args.drafts
    batch, num_drafts = state_index.shape[0], drafts.shape[1]
    chain = args.chain.contiguous()
    num_parts = min(MOST_PARTS, max(MOST_PROGRAMS // batch, 1), triton.cdiv(token_ids.shape[1], BLOCK))
    best = drafts.new_empty((batch, num_parts), dtype=torch.int32)
    left, matches = pos.new_empty((batch, num_drafts)), pos.new_empty((batch, 2))
    verify, accepted_stride = 0, 0
    if args.accepted is not None:
        verify, accepted_stride = args.accepted.shape[1] - 3, args.accepted.stride(0)
    has_pdl = device_of(pos.device.index).has_dependent_launch
    search_kernel[(num_parts, batch)](
        token_ids, state_index, pos, best, token_ids.stride(0),
        BLOCK=BLOCK, LEAST_MATCH=LEAST_MATCH, MOST_MATCH=MOST_MATCH, PLACE_BITS=PLACE_BITS,
        EARLY=args.early, PDL=has_pdl, num_warps=1, launch_pdl=has_pdl,
    )  # fmt: skip
    choose_kernel[(batch,)](
        token_ids, state_index, pos, best, chain, *args.lookup, drafts, args.accepted, left, matches,
        token_ids.stride(0), num_parts, chain.shape[1], verify, accepted_stride,
        DRAFTS=num_drafts, LANES=triton.next_power_of_2(num_drafts), PARTS=triton.next_power_of_2(num_parts),
        MOST_MATCH=MOST_MATCH, PLACE_BITS=PLACE_BITS, LEAST_THRESHOLD=LEAST_THRESHOLD,
        MOST_THRESHOLD=MOST_THRESHOLD, RISE=RISE, LEAST_KEPT=LEAST_KEPT, UNIT=UNIT, DECAY=DECAY,
        PDL=has_pdl, num_warps=1, launch_pdl=has_pdl,
    )  # fmt: skip
    return left, matches
