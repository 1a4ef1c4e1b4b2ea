"""Launches experts in codes, and chooses the tiles of their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from compiled_mtp.ops.left_config import LeftForm, form_of_int4, form_of_kind, is_int4
from compiled_mtp.ops.moe_experts.codes_kernel import down_codes_kernel, gate_up_codes_kernel
from compiled_mtp.ops.moe_experts.grouping_kernel import Table, launch_options, plan, sum_slots, table_of

UNIT = 128


class Stack(NamedTuple):
    """A matrix [N, K] of every expert in codes.

    words: [E, N, W] int16. scales: 32-bit words [E, S]. shared: the plain matrix of expert E in bfloat16;
    None if the stack holds it last.
    """

    words: torch.Tensor
    scales: torch.Tensor
    form: LeftForm
    shared: torch.Tensor | None

    @property
    def experts(self) -> int:
        return len(self.words) + (self.shared is not None)


@dataclass(frozen=True)
class ExpertTile:
    """One launch configuration of a product.

    A tile has `block_m` pairs and `block_n` weight rows, one or more blocks of 16 for each warp. chunk: units
    that a stage of shared memory holds. tiles: those that a program multiplies one after another, if N is a
    multiple of them; more than one have multiples of 32 weight rows.
    """

    block_m: int
    block_n: int
    num_warps: int
    chunk: int
    num_stages: int
    tiles: int = 1

    def shared_bytes(self, form: LeftForm) -> int:
        """Shared memory of a program: rows in bfloat16, words, scales."""
        row = 2 * form.words + 4 * form.scale_words
        return self.num_stages * self.chunk * (self.block_m * 256 + self.block_n * row)


class Tiles(NamedTuple):
    """The tiles of both products, with equal numbers of pairs."""

    gate_up: ExpertTile
    down: ExpertTile


def int4_stack(words: torch.Tensor, scales: torch.Tensor, shared: torch.Tensor | None) -> Stack:
    """A stack of ops.int4's words and groups."""
    per_unit = scales.shape[1] * UNIT // (words.shape[2] * 4)
    flat = scales.view(len(scales), -1).view(torch.int32)
    return Stack(words, flat, form_of_int4(scales.dtype, per_unit), shared)


def kind_stack(words: torch.Tensor, scales: torch.Tensor, kind: str, shared: torch.Tensor) -> Stack:
    """A stack of ops.blocks' words and scales."""
    return Stack(words, scales.view(len(scales), -1).view(torch.int32), form_of_kind(kind), shared)


def tile_for(num_pairs: int, stack: Stack, is_down: bool) -> ExpertTile:
    """The tile of `num_pairs` pairs of all experts. No tile gives a pair other bits.

    Measured for 35B-A3B on an H200. Experts rarely have more than one and a half times their mean number of
    pairs, so that few need two tiles, which decode the weight twice.
    """
    mean = num_pairs / stack.experts
    if mean <= 0.8:
        if is_down:
            return ExpertTile(8, 128, 4, 1, 4)
        # So few programs that all run at once: each has half of its weights on their way.
        return ExpertTile(8, 64, 4, 4, 2) if mean <= 0.2 else ExpertTile(8, 64, 4, 1, 4)
    # An expert's down has few units: most of a tile's time is its start. Tiles of 64 pairs have no registers
    # left for a second one.
    tiles = 2 if is_down and mean <= 48 else 1
    if mean <= 6:
        return ExpertTile(8, 128, 4, 1, 3, tiles)
    # Wide tiles read fewer rows; the values of other codes leave no registers for their sums.
    block_n = 128 if is_int4(stack.form) else 64
    return ExpertTile(16 if mean <= 14 else 32 if mean <= 48 else 64, block_n, 4, 1, 3, tiles)


def tiles_for(num_pairs: int, gate_up: Stack, down: Stack) -> Tiles:
    return Tiles(tile_for(num_pairs, gate_up, is_down=False), tile_for(num_pairs, down, is_down=True))


def plain_stages(tile: ExpertTile, form: LeftForm) -> int:
    """Stages of 64 columns of a plain weight: as many as the memory of a tile's codes holds."""
    return max(3, tile.shared_bytes(form) // ((tile.block_m + tile.block_n) * 64 * 2))


def launch_experts(
    tiles: Tiles, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: Stack, down: Stack
) -> torch.Tensor:
    """The weighted sums [M, H] of both products, in x's dtype."""
    if not ids.numel():
        return torch.empty_like(x)
    # Beside a plain shared expert a table is faster for any number of rows (docs/experiments.md).
    find = table_of if gate_up.shared is None else plan
    table = find(ids, gate_up.experts, tiles.gate_up.block_m)
    hidden = launch_hidden(tiles.gate_up, x, gate_up, table)
    return launch_sums(tiles.down, hidden, weights, down, table, early=True)


def launch_hidden(tile: ExpertTile, x: torch.Tensor, stack: Stack, table: Table) -> torch.Tensor:
    """silu(gate x) * up x [M * slots, I] in x's dtype, a row for each pair in the table's order."""
    hidden = torch.empty((table.ids.numel(), stack.words.shape[1] // 2), dtype=x.dtype, device=x.device)
    # One row may have any stride; another value would compile another kernel.
    stride = x.stride(0) if len(x) > 1 else x.shape[1]
    _launch(gate_up_codes_kernel, tile, x, stride, stack, table, hidden)
    return hidden


def launch_sums(
    tile: ExpertTile,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    table: Table,
    early: bool,
) -> torch.Tensor:
    """The weighted sums [M, N] in hidden's dtype of the products of `launch_hidden`'s rows.

    early: `launch_hidden` was the launch before.
    """
    n = stack.words.shape[1]
    results = torch.empty((table.ids.numel(), n), dtype=torch.float32, device=hidden.device)
    _launch(down_codes_kernel, tile, hidden, hidden.shape[1], stack, table, results, EARLY=early)
    out = torch.empty((len(table.ids), n), dtype=hidden.dtype, device=hidden.device)
    sum_slots(results, weights, out)
    return out


def _launch(
    kernel: Any,
    tile: ExpertTile,
    x: torch.Tensor,
    x_stride: int,
    stack: Stack,
    table: Table,
    out: torch.Tensor,
    **constants: bool,
) -> None:
    n, units = stack.words.shape[1], x.shape[1] // UNIT
    tiles = 1 if n % (tile.block_n * tile.tiles) else tile.tiles
    kernel[(triton.cdiv(n, tile.block_n * tiles), table.entries)](
        x,
        stack.words,
        stack.scales,
        stack.shared,
        *table,
        out,
        len(table.ids),
        n,
        x_stride,
        units,
        stack.scales.shape[1],
        table.entries,
        SLOTS=table.ids.shape[1],
        EXPERTS=len(stack.words),
        BM=tile.block_m,
        BN=tile.block_n,
        TILES=tiles,
        CHUNK=tile.chunk,
        STAGES=min(tile.num_stages, triton.cdiv(units, tile.chunk) + 1),
        PLAIN_STAGES=plain_stages(tile, stack.form),
        EVEN=units % tile.chunk == 0,
        **stack.form.constants(),
        **constants,
        num_warps=tile.num_warps,
        **launch_options(x),
    )


def launch_moe_experts_w4a16(args: Any) -> torch.Tensor:
    gate_up = int4_stack(args.gate_up, args.gate_up_scale, args.shared_gate_up)
    down = int4_stack(args.down, args.down_scale, args.shared_down)
    return launch_experts(
        tiles_for(args.ids.numel(), gate_up, down), args.x, args.weights, args.ids, gate_up, down
    )


def launch_moe_hidden_w4a16(args: Any) -> torch.Tensor:
    x, ids = args.x, args.ids
    stack = int4_stack(args.gate_up, args.gate_up_scale, args.shared_gate_up)
    tile = tile_for(ids.numel(), stack, is_down=False)
    if not ids.numel():
        return x.new_empty((0, stack.words.shape[1] // 2))
    return launch_hidden(tile, x, stack, plan(ids, stack.experts, tile.block_m))


def launch_moe_sums_w4a16(args: Any) -> torch.Tensor:
    ids, stack = args.ids, int4_stack(args.down, args.down_scale, args.shared_down)
    tile = tile_for(ids.numel(), stack, is_down=True)
    if not ids.numel():
        return args.hidden.new_empty((0, stack.words.shape[1]))
    table = plan(ids, stack.experts, tile.block_m)
    return launch_sums(tile, args.hidden, args.weights, stack, table, early=False)


def launch_moe_experts_blocks(args: Any) -> torch.Tensor:
    gate_up = kind_stack(args.gate_up, args.gate_up_scale, args.gate_up_kind, args.shared_gate_up)
    down = kind_stack(args.down, args.down_scale, args.down_kind, args.shared_down)
    return launch_experts(
        tiles_for(args.ids.numel(), gate_up, down), args.x, args.weights, args.ids, gate_up, down
    )
