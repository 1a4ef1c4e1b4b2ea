"""Choose how products of few rows hold their weights, inside a stack of a model's layers; write the table.

    python tools/tune_held.py --shape 0.8b                # some minute
    python tools/tune_held.py --shape 0.8b --output FILE

What one product gains by taking its weight early its neighbours may lose, so that the time of the whole
stack decides. Every tile's bits are compared with those of the operator as it is before it is timed; no tile
changes one. A line for each weight, and at the end one of JSON: the stack's microseconds with no weight held,
with the table as it was, and with what was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from launch_cases import multiply
from tune_linear import STACK_LAYERS, Stack

from compiled_mtp.models.layers import Linear, settle_held
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear.held_config import HELD_TABLE, LEAST_PIECE, HeldTile, read_held_table

BLOCKS, PIECES, IN_FLIGHT = (16, 32, 64), (LEAST_PIECE, 128, 256), (1, 2, 3)
# Beside the weights: the rows' tiles, of 16 rows each.
ROWS = 16
LEAST_GAIN_US = 1.0
TIMES = 3


def tiles(n: int, k: int, split: int, shared_bytes: int, processors: int) -> Iterator[HeldTile]:
    """Those whose programs all have their place at once, and are enough to keep the processors busy."""
    for block_n, piece, in_flight in itertools.product(BLOCKS, PIECES, IN_FLIGHT):
        size = 2 * (k // split) * (block_n + ROWS)
        places = shared_bytes // size * processors
        programs = -(-n // block_n) * split
        if processors * 3 // 4 <= programs <= places:
            yield HeldTile(block_n, piece, in_flight)


class Tuner:
    """The stack of a shape with a table of tiles that it may change."""

    def __init__(self, shape: str, rows: int) -> None:
        self.stack = Stack(shape, rows)
        # The one that `linear` reads.
        self.table = read_held_table()
        linears = [module for module in self.stack.target.modules() if isinstance(module, Linear)]
        self.names = {}
        for module in linears:
            n, k = module.weight.shape
            kind = "gated" if module.is_gated else "product"
            if module.is_before_norm:
                kind = f"parts{module.num_parts}"
            if module.may_hold:
                self.names[f"{n}x{k} {kind}"] = (n, k, module.num_parts if module.is_before_norm else 1)
        self.linears = linears

    def stack_us(self) -> float:
        """Microseconds of the stack with the table as it is now."""
        for module in self.linears:
            module.find_held()
        settle_held(self.stack.target)
        return statistics.median(self.stack.time_us() for _ in range(TIMES))

    def check(self, name: str) -> None:
        """Raise RuntimeError if the held product of a name has other bits than the operator without it."""
        n, k, _ = self.names[name]
        kind = name.split()[1]
        weight = (torch.randn(n, k, device="cuda") / 32).bfloat16()
        for rows in (1, 4, 8, 9, 16):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            got, wanted = (multiply(x, weight, kind, held=held) for held in (True, False))
            if not torch.equal(got, wanted):
                raise RuntimeError(f"{name}: tile {self.table[name]} has other bits at {rows} rows")

    def tune(self, name: str, seconds_end: float) -> str:
        """Give one product the tile, or none, with which the stack is fastest; what was found, in words."""
        device = device_of(torch.cuda.current_device())
        n, k, split = self.names[name]
        first, chosen = self.stack_us(), self.table.pop(name, None)
        best, tried = first, 0
        if chosen is not None:
            # What it was good for its neighbours may do without since they have changed.
            us = self.stack_us()
            if us < best - LEAST_GAIN_US:
                best, chosen = us, None
        for tile in tiles(n, k, split, device.shared_bytes, device.num_processors):
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


def write_table(table: dict[str, list[int]], path: Path) -> None:
    """A line a product, by name."""
    lines = [f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in sorted(table.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Parse the arguments, tune, print a line a weight and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.8b", choices=sorted(STACK_LAYERS))
    parser.add_argument("--rows", type=int, default=4, help="rows while timing (1 to 16 share a tile)")
    parser.add_argument("--output", "--out", dest="out", type=Path, default=HELD_TABLE)
    parser.add_argument("--seconds", type=float, default=300, help="start no further tile after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: the table holds measured times' winners")
    end = time.monotonic() + args.seconds
    tuner = Tuner(args.shape, args.rows)
    before = dict(tuner.table)
    tuner.table.clear()
    plain = tuner.stack_us()
    tuner.table.update(before)
    was = tuner.stack_us()
    # The largest first; once more when all have changed.
    for name in sorted(tuner.names, key=lambda name: -tuner.names[name][0] * tuner.names[name][1]) * 2:
        print(tuner.tune(name, end), flush=True)
    found = tuner.stack_us()
    write_table(tuner.table, args.out)
    device = torch.cuda.get_device_name()
    row = {"shape": args.shape, "rows": args.rows, "device": device, "plain_us": plain, "before_us": was}
    print(json.dumps(row | {"us": found, "table": tuner.table}))


if __name__ == "__main__":
    main()
