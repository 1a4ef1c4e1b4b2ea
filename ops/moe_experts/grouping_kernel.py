"""Which pairs are multiplied together, and the weighted sums of their results: the experts' first launch and
their last."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of

OPTIONS = {"enable_fp_fusion": True}
_PLAN_BLOCK = 1024
_TABLE_BLOCK = 64
# Rows that need no table: their products find the pairs in ids.
FEW_ROWS = 16


@triton.jit
def plan_kernel(
    ids,
    tiles,
    pairs,
    num_pairs,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the pairs of one expert in ascending order and fill its part of the tile table.

    An expert's first entry is known from the number of pairs of lower experts alone, which is why entries
    without a tile (-1) are left between: at most one a pair (dense), or one an expert.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    mine = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=2**30)
        below += (chosen < expert).to(tl.int32)
        mine += (chosen == expert).to(tl.int32)
    offset = tl.sum(below, 0)
    count = tl.sum(mine, 0)
    if count > 0:
        filled = offset
        for start in range(0, num_pairs, BLOCK):
            chosen = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=2**30)
            is_mine = (chosen == expert).to(tl.int32)
            tl.store(pairs + filled + tl.cumsum(is_mine, 0) - 1, start + lane, mask=is_mine > 0)
            filled += tl.sum(is_mine, 0)
    if IS_DENSE:
        first = offset
        owned = count
    else:
        first = offset // TILE_ROWS + expert
        owned = (offset + count) // TILE_ROWS + expert + 1 - first
    for start in range(0, owned, TABLE_BLOCK):
        entry = start + tl.arange(0, TABLE_BLOCK)
        if IS_DENSE:
            begin = entry
            is_tile = entry % TILE_ROWS == 0
        else:
            begin = entry * TILE_ROWS
            is_tile = begin < count
        to = tiles + first + entry
        tl.store(to, tl.where(is_tile, expert, -1), mask=entry < owned)
        tl.store(to + num_tiles, offset + begin, mask=entry < owned)
        tl.store(to + 2 * num_tiles, tl.minimum(count - begin, TILE_ROWS), mask=entry < owned)


@triton.jit
def sum_slots_kernel(
    results,
    weights,
    out,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, BLOCK columns] = the weighted sum of the row's results, over its slots in order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = row * SLOTS + slot
        value = tl.load(results + pair * WIDTH + column, mask=inside, other=0.0)
        total += tl.load(weights + pair) * value
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """How all kernels of experts on x's device are compiled and launched."""
    has_pdl = device_of(x.device.index).has_dependent_launch
    return {"PDL": has_pdl, "launch_pdl": has_pdl, **OPTIONS}


def tile_count(num_pairs: int, experts: int, tile_rows: int) -> tuple[int, bool]:
    """Entries of the tile table, and whether it is the dense one (one entry a pair)."""
    sparse = experts + num_pairs // tile_rows
    return min(num_pairs, sparse), num_pairs <= sparse


class Table(NamedTuple):
    """Which pairs are multiplied together.

    ids: [M, slots] int32. tiles: [3, entries] int32, of an entry its expert or -1, its first pair among the
    sorted ones and their number. pairs: the (row, slot) pairs by expert [M * slots] int32. Without tiles and
    pairs, products find them in ids (`find_pairs`).
    """

    ids: torch.Tensor
    tiles: torch.Tensor | None = None
    pairs: torch.Tensor | None = None

    @property
    def entries(self) -> int:
        return self.ids.numel() if self.tiles is None else self.tiles.shape[1]


def table_of(ids: torch.Tensor, experts: int, tile_rows: int) -> Table:
    """The table for both products of a call: none for few rows, which find their pairs faster than `plan`."""
    return Table(ids) if len(ids) <= min(FEW_ROWS, tile_rows) else plan(ids, experts, tile_rows)


def plan(ids: torch.Tensor, experts: int, tile_rows: int) -> Table:
    """The table of tiles of at most `tile_rows` pairs, by a kernel."""
    num_pairs = ids.numel()
    num_tiles, is_dense = tile_count(num_pairs, experts, tile_rows)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=ids.device)
    pairs = torch.empty((num_pairs,), dtype=torch.int32, device=ids.device)
    plan_kernel[(experts,)](
        ids,
        tiles,
        pairs,
        num_pairs,
        num_tiles,
        TILE_ROWS=tile_rows,
        IS_DENSE=is_dense,
        BLOCK=_PLAN_BLOCK,
        TABLE_BLOCK=_TABLE_BLOCK,
        num_warps=8,
        **launch_options(ids),
    )
    return Table(ids, tiles, pairs)


def sum_slots(results: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` [M, H] the weighted sums of the pairs' results [M * slots, H], in slot order."""
    (rows, width), slots = out.shape, weights.shape[1]
    block = min(512, triton.next_power_of_2(width))
    sum_slots_kernel[(triton.cdiv(width, block), rows)](
        results,
        weights,
        out,
        SLOTS=slots,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
        **launch_options(results),
    )
