"""Which pairs a program of the experts' products has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_tile(tiles, num_tiles, BM: tl.constexpr):
    """Of this program's tile: its first pair among those sorted by expert, a lane for each of BM pairs, and
    which lanes have one."""
    tile = tl.program_id(1)
    begin = tl.load(tiles + num_tiles + tile)
    count = tl.load(tiles + 2 * num_tiles + tile)
    lane = tl.arange(0, BM)
    return begin, lane, lane < count
