"""The two products of grouped experts, each by itself, with the kernels and tiles of `moe_experts`."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.moe_experts.kernel import (
    combine,
    configuration,
    multiply_down,
    multiply_down_w8a8,
    multiply_gate_up,
    multiply_gate_up_w8a8,
    plan,
    w8a8_tile_rows,
)


def launch_moe_hidden(args: Any) -> torch.Tensor:
    x, ids, (experts, both, _) = args.x, args.ids, args.gate_up.shape
    hidden = torch.empty((ids.numel(), both // 2), dtype=x.dtype, device=x.device)
    if ids.numel():
        config = configuration(x.dtype, args.gate_up_scale is not None, True)
        table = plan(ids, experts, config.tile_rows)
        multiply_gate_up(config, x, args.gate_up, args.gate_up_scale, *table, hidden, ids.shape[1])
    return hidden


def launch_moe_sums(args: Any) -> torch.Tensor:
    hidden, ids, (experts, width, _) = args.hidden, args.ids, args.down.shape
    out = torch.empty((ids.shape[0], width), dtype=hidden.dtype, device=hidden.device)
    if ids.numel():
        config = configuration(hidden.dtype, args.down_scale is not None, True)
        table = plan(ids, experts, config.tile_rows)
        partial = torch.empty((1, ids.numel(), width), dtype=torch.float32, device=hidden.device)
        multiply_down(config, hidden, args.down, args.down_scale, *table, partial)
        combine(partial, args.weights, out)
    return out


def launch_moe_hidden_w8a8(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, (experts, both, _) = args.x, args.ids, args.gate_up.shape
    pairs, inner = ids.numel(), both // 2
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    factors = torch.empty((pairs, inner // 128), dtype=torch.float32, device=x.device)
    if pairs:
        tile_rows = w8a8_tile_rows(pairs, experts)
        table = (tile_rows, *plan(ids, experts, tile_rows))
        stack = (args.gate_up, args.gate_up_scale)
        multiply_gate_up_w8a8(
            x, args.x_scale, *stack, *table, hidden, factors, ids.shape[1], args.out_float32
        )
    return hidden, factors


def launch_moe_sums_w8a8(args: Any) -> torch.Tensor:
    hidden, ids, (experts, width, _) = args.hidden, args.ids, args.down.shape
    dtype = torch.float32 if args.out_float32 else torch.bfloat16
    out = torch.empty((ids.shape[0], width), dtype=dtype, device=hidden.device)
    if ids.numel():
        tile_rows = w8a8_tile_rows(ids.numel(), experts)
        table = (tile_rows, *plan(ids, experts, tile_rows))
        partial = torch.empty((1, ids.numel(), width), dtype=torch.float32, device=hidden.device)
        multiply_down_w8a8(hidden, args.hidden_scale, args.down, args.down_scale, *table, partial)
        combine(partial, args.weights, out)
    return out
