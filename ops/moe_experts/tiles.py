"""Which pairs a program of the experts' products has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_pairs(ids, tiles, pairs, rows, num_tiles, SLOTS: tl.constexpr, BM: tl.constexpr):
    """This program's expert, -1 for none; and of each of BM lanes its pair, the pair's row of hidden values
    and whether there is one.

    A tile is an entry of `plan`'s table. Without one (`tiles` is None; at most BM rows) an entry is a pair, a
    lane is a row, and the first row that chose an expert multiplies it for all rows; hidden values lie in the
    pairs' own order. Lanes without a pair have one to read.
    """
    entry = tl.program_id(1)
    lane = tl.arange(0, BM)
    if tiles is None:
        expert = tl.load(ids + entry)
        pair = tl.zeros((BM,), tl.int32) + entry
        for index in tl.static_range(SLOTS):
            own = lane * SLOTS + index
            chosen = tl.load(ids + own, mask=lane < rows, other=-1)
            pair = tl.where(chosen == expert, own, pair)
        is_row = (pair != entry) | (lane == entry // SLOTS)
        place = pair
        expert = tl.where(tl.min(pair, 0) == entry, expert, -1)
    else:
        expert = tl.load(tiles + entry)
        begin = tl.load(tiles + num_tiles + entry)
        is_row = lane < tl.load(tiles + 2 * num_tiles + entry)
        place = begin + tl.where(is_row, lane, 0)
        pair = tl.load(pairs + place, mask=is_row, other=0)
    return expert.to(tl.int64), pair, place, is_row
