"""How kernels find the piece of a launch of several prompts that a row, or a tile of rows, belongs to.

Pieces lie one behind another: first_row [P] int64 never falls, and pieces without rows stand behind all
others. PromptChunk p has the tiles from first_row[p] // UNIT + p on: as many as its rows need are its own,
wherever it begins, and num_rows // UNIT + P tiles hold all. MOST: pieces that are looked at, P at least.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_first_rows(first_row, num_pieces, MOST: tl.constexpr):
    """[MOST] int32, far beyond all rows where there is no piece."""
    piece = tl.arange(0, MOST)
    return tl.load(first_row + piece, mask=piece < num_pieces, other=2147483000).to(tl.int32)


@triton.jit
def piece_of_tile(tile, first_row, num_pieces, UNIT: tl.constexpr, MOST: tl.constexpr):
    """The piece that a tile of UNIT rows is one of, or would be if the piece were longer."""
    begin = load_first_rows(first_row, num_pieces, MOST) // UNIT + tl.arange(0, MOST)
    return tl.sum((begin <= tile).to(tl.int32), 0) - 1


@triton.jit
def piece_of_row(row, first_row, num_pieces, MOST: tl.constexpr):
    """The last piece that begins at a row or before it."""
    return tl.sum((load_first_rows(first_row, num_pieces, MOST) <= row).to(tl.int32), 0) - 1


@triton.jit
def pieces_of_rows(rows, first_row, num_pieces, MOST: tl.constexpr):
    """`piece_of_row` of each of the rows [N]."""
    begin = load_first_rows(first_row, num_pieces, MOST)
    return tl.sum((begin[None, :] <= rows[:, None]).to(tl.int32), 1) - 1
