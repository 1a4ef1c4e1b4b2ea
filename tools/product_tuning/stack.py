"""A stack of a model's own layers, whose whole time decides between the best tiles of one weight.

A product's time depends on what runs around it: what the memory does while the small kernels between two
products run, and what the processors still hold.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, replace

import torch
from op_cases.linear import multiply

from compiled_mtp.benchmarks.gpu_rates import time_us
from compiled_mtp.benchmarks.released_shapes import fill_random, model_config
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.resident import choose_resident
from compiled_mtp.models.rotary import rotary_table
from compiled_mtp.models.rows import DecodeRows
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import NARROW_ROWS, WIDE_ROWS
from compiled_mtp.ops.linear import count_partials
from compiled_mtp.ops.linear.config import LinearConfig, linear_config
from compiled_mtp.ops.linear.resident_config import LEAST_PIECE, ResidentTile, read_resident_table

# Enough layers that their weights exceed L2 and what the address translation caches.
STACK_LAYERS = {"0.8b": 24, "4b": 12, "9b": 8, "27b": 8, "35b-a3b": 12}
PREFETCH_BYTES = (0, 256, 512, 1024, 2048, 8192)
# What a change must gain: a share of the stack's time, or microseconds.
LEAST_GAIN, LEAST_GAIN_US = 0.001, 1.0
BLOCKS, PIECES, IN_FLIGHT = (16, 32, 64), (LEAST_PIECE, 128, 256), (1, 2, 3)
# Shared memory holds a tile of this many rows of x next to the resident weights.
ROWS = 16
TIMES = 3


class Stack:
    """Layers of a released shape, every fourth of them attention, on the rows of one request in mid-text."""

    def __init__(self, shape: str, rows: int) -> None:
        device, dtype, context, block_size = torch.device("cuda"), torch.bfloat16, 512, 64
        layers = STACK_LAYERS[shape]
        config = replace(
            model_config(shape),
            num_layers=layers,
            is_full_attention=tuple((index + 1) % 4 == 0 for index in range(layers)),
        )
        self.target = TargetModel(config, dtype, device)
        with torch.no_grad():
            fill_random(dict(self.target.named_parameters()))
        blocks = (context + rows) // block_size + 2
        self.kv = KVCache(config, blocks, block_size, dtype, device, with_draft=False)
        self.state = StateCache(config, 2, rows - 1, dtype, device)
        self.cos_sin = rotary_table(config, 1024, device)
        self.tokens = torch.arange(rows, device=device)
        positions = context + torch.arange(rows, device=device)
        self.rows = DecodeRows(
            rotary_positions=positions,
            causal_positions=positions,
            # Block 0 is padding.
            slot_mapping=positions + block_size,
            block_table=torch.arange(1, blocks, dtype=torch.int32, device=device)[None],
            state_index=torch.ones(1, dtype=torch.int32, device=device),
            start=positions[:1].clone(),
            base=positions[:1] - 2,
        )

    @torch.no_grad()
    def time_us(self) -> float:
        """Return the microseconds of a forward without the head, with the table as it is now."""
        linear_config.cache_clear()
        for module in self.target.modules():
            if isinstance(module, Linear):
                sizes = (1, NARROW_ROWS + 1, WIDE_ROWS + 1)
                few, many, most = (count_partials(module.weight, rows) for rows in sizes)
                module.partial_counts = few, many, most
        arguments = (self.tokens, self.rows, self.kv, self.state, self.cos_sin)
        return time_us([functools.partial(self.target, *arguments)])


def choose_config(stack: Stack, entries: dict[str, list[int]], name: str, rivals: list[LinearConfig]) -> str:
    """Give one weight the rival with which the stack is fastest; return the finding as text.

    Mutates `entries`, which `linear` reads.
    """

    def time_with(config: LinearConfig) -> float:
        entries[name] = [*astuple(config)[1:-1]]
        return stack.time_us()

    present = []
    if name in entries:
        block_n, block_k, num_warps, num_stages, split, chains, prefetch = entries[name]
        present.append(LinearConfig(16, block_n, block_k, num_warps, num_stages, split, chains, prefetch))
    timed = [(time_with(config), config) for config in (*present, *rivals)]
    now, was = timed[0]
    _, best = min(timed, key=lambda pair: pair[0])
    for prefetch in PREFETCH_BYTES:
        config = replace(best, prefetch_bytes=prefetch)
        timed.append((time_with(config), config))
    us, best = min(timed, key=lambda pair: pair[0])
    if us > (1 - LEAST_GAIN) * now:
        us, best = now, was
    time_with(best)
    return f"stack {now:.1f} -> {us:.1f} us of {len(timed)}: {entries[name]}"


def resident_tiles(n: int, k: int, split: int, shared_bytes: int, processors: int) -> Iterator[ResidentTile]:
    """Yield tiles whose programs all run at once, and are enough to keep the processors busy."""
    for block_n, piece, in_flight in itertools.product(BLOCKS, PIECES, IN_FLIGHT):
        size = 2 * (k // split) * (block_n + ROWS)
        most_programs = shared_bytes // size * processors
        programs = -(-n // block_n) * split
        if processors * 3 // 4 <= programs <= most_programs:
            yield ResidentTile(block_n, piece, in_flight)


class ResidentTuner:
    """The stack of a shape, and the table of tiles for resident weights, which the tuner changes."""

    def __init__(self, shape: str, rows: int) -> None:
        self.stack = Stack(shape, rows)
        # The dict that `linear` reads.
        self.table = read_resident_table()
        self.names = {}
        for module in self.stack.target.modules():
            if isinstance(module, Linear) and module.may_be_resident:
                n, k = module.weight.shape
                parts = module.partial_counts[0] if module.is_before_norm else 1
                kind = "gated" if module.is_gated else "product"
                if module.is_before_norm:
                    kind = f"parts{parts}"
                self.names[f"{n}x{k} {kind}"] = (n, k, parts)

    def stack_us(self) -> float:
        """Return the microseconds of the stack with the table as it is now."""
        choose_resident(self.stack.target)
        return statistics.median(self.stack.time_us() for _ in range(TIMES))

    def check(self, name: str) -> None:
        """Raise RuntimeError if the product of a name has other bits with its weight resident."""
        n, k, _ = self.names[name]
        kind = name.split()[1]
        weight = (torch.randn(n, k, device="cuda") / 32).bfloat16()
        for rows in (1, 4, 8, 9, 16):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            got, wanted = (multiply(x, weight, kind, resident=resident) for resident in (True, False))
            if not torch.equal(got, wanted):
                raise RuntimeError(f"{name}: tile {self.table[name]} has other bits at {rows} rows")

    def tune(self, name: str, seconds_end: float) -> str:
        """Give one product the tile, or none, with which the stack is fastest; return the finding as text."""
        device = device_of(torch.cuda.current_device())
        n, k, split = self.names[name]
        first, chosen = self.stack_us(), self.table.pop(name, None)
        best, tried = first, 0
        if chosen is not None:
            # The neighbours may have changed after the tile was chosen: try the product without it.
            us = self.stack_us()
            if us < best - LEAST_GAIN_US:
                best, chosen = us, None
        for tile in resident_tiles(n, k, split, device.shared_bytes, device.num_processors):
            if time.monotonic() > seconds_end:
                break
            self.table[name] = list(astuple(tile))
            self.check(name)
            us, tried = self.stack_us(), tried + 1
            if us < best - LEAST_GAIN_US:
                best, chosen = us, self.table[name]
        if chosen is None:
            self.table.pop(name, None)
        else:
            self.table[name] = chosen
        return f"{name:20} stack {first:.1f} -> {best:.1f} us of {tried} tiles: {chosen}"
