"""How kernels find the prompt chunk that a row, or a tile of rows, of a launch belongs to.

first_row [P] int64 never decreases, and chunks without rows come last. The tiles of prompt chunk p begin at
tile first_row[p] // UNIT + p: chunk p then has as many tiles of its own as its rows need, whatever its first
row, and num_rows // UNIT + P tiles are enough for all chunks. MOST: compare this number of first rows, at
least P (`num_pieces`).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_first_rows(first_row, num_pieces, MOST: tl.constexpr):
    """Load first_row as [MOST] int32; entries without a prompt chunk lie beyond all rows."""
    piece = tl.arange(0, MOST)
    return tl.load(first_row + piece, mask=piece < num_pieces, other=2147483000).to(tl.int32)


@triton.jit
def piece_of_tile(tile, first_row, num_pieces, UNIT: tl.constexpr, MOST: tl.constexpr):
    """Return the prompt chunk of a tile of UNIT rows; a tile after a chunk's last row counts to it too."""
    begin = load_first_rows(first_row, num_pieces, MOST) // UNIT + tl.arange(0, MOST)
    return tl.sum((begin <= tile).to(tl.int32), 0) - 1


@triton.jit
def piece_of_row(row, first_row, num_pieces, MOST: tl.constexpr):
    """Return the last prompt chunk that begins at a row or before it."""
    return tl.sum((load_first_rows(first_row, num_pieces, MOST) <= row).to(tl.int32), 0) - 1


@triton.jit
def pieces_of_rows(rows, first_row, num_pieces, MOST: tl.constexpr):
    """Return `piece_of_row` of each of the rows [N]."""
    begin = load_first_rows(first_row, num_pieces, MOST)
    return tl.sum((begin[None, :] <= rows[:, None]).to(tl.int32), 1) - 1
