"""Launches experts in codes, and chooses the tiles of their products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from compiled_mtp.ops.left_config import LeftForm, LeftTile, form_of_int4, form_of_kind, is_int4
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


class Tiles(NamedTuple):
    """The tiles of both products, with equal numbers of pairs."""

    gate_up: LeftTile
    down: LeftTile


def int4_stack(words: torch.Tensor, scales: torch.Tensor, shared: torch.Tensor | None) -> Stack:
    """A stack of ops.int4's words and groups."""
    per_unit = scales.shape[1] * UNIT // (words.shape[2] * 4)
    flat = scales.view(len(scales), -1).view(torch.int32)
    return Stack(words, flat, form_of_int4(scales.dtype, per_unit), shared)


def kind_stack(words: torch.Tensor, scales: torch.Tensor, kind: str, shared: torch.Tensor) -> Stack:
    """A stack of ops.blocks' words and scales."""
    return Stack(words, scales.view(len(scales), -1).view(torch.int32), form_of_kind(kind), shared)


def tile_for(num_pairs: int, stack: Stack, is_down: bool) -> LeftTile:
    """The tile of `num_pairs` pairs of all experts. No tile gives a pair other bits.

    Measured for 35B-A3B on an H200. Experts rarely have more than one and a half times their mean number of
    pairs, so that few need two tiles, which decode the weight twice.
    """
    mean, has_integers = num_pairs / stack.experts, is_int4(stack.form)
    if mean <= 6:
        if has_integers and is_down:
            return LeftTile(8, 128, 4, 2, 2)
        return LeftTile(8, 64, 4, 4, 2) if has_integers and mean <= 0.5 else LeftTile(8, 64, 4, 2, 3)
    # Wide tiles read fewer rows; the values of other codes leave no registers for their sums.
    block_n = 128 if has_integers else 64
    if mean <= 14:
        return LeftTile(16, block_n, 4, 1, 4)
    return LeftTile(32 if mean <= 48 else 64, block_n, 4, 1, 3)


def tiles_for(num_pairs: int, gate_up: Stack, down: Stack) -> Tiles:
    return Tiles(tile_for(num_pairs, gate_up, is_down=False), tile_for(num_pairs, down, is_down=True))


def plain_stages(tile: LeftTile, form: LeftForm) -> int:
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


def launch_hidden(tile: LeftTile, x: torch.Tensor, stack: Stack, table: Table) -> torch.Tensor:
    """silu(gate x) * up x [M * slots, I] in x's dtype, a row for each pair in the table's order."""
    hidden = torch.empty((table.ids.numel(), stack.words.shape[1] // 2), dtype=x.dtype, device=x.device)
    # One row may have any stride; another value would compile another kernel.
    stride = x.stride(0) if len(x) > 1 else x.shape[1]
    _launch(gate_up_codes_kernel, tile, x, stride, stack, table, hidden)
    return hidden


def launch_sums(
    tile: LeftTile,
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
    tile: LeftTile,
    x: torch.Tensor,
    x_stride: int,
    stack: Stack,
    table: Table,
    out: torch.Tensor,
    **constants: bool,
) -> None:
    n, units = stack.words.shape[1], x.shape[1] // UNIT
    kernel[(triton.cdiv(n, tile.block_n), table.entries)](
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
        CHUNK=tile.chunk,
        STAGES=tile.num_stages,
        PLAIN_STAGES=plain_stages(tile, stack.form),
        AHEAD=tile.ahead,
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
