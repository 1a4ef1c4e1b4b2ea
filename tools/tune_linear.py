"""Measure configurations of `linear` on this GPU and write the fastest per (N, K, dtype) to its table.

    python tools/tune_linear.py                          # every projection of every shape in tools/op_cases
    python tools/tune_linear.py --shapes 27b --rows 8    # one model

Each configuration is timed as bench_op.py times, on weights rotated beyond L2; first all tiles and splits
with one prefetch length, then the best few with other lengths. The split decides the bits of a row, so a new
table changes the numbers of a model, but never with the number of rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, time_us
from op_cases import SHAPES
from op_cases.linear import projections

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear.config import TABLE, LinearConfig, dtype_name
from compiled_mtp.ops.linear.kernel import is_even, launch_config

PREFETCH_BYTES = (0, 256, 512, 1024, 2048, 4096)
FIRST_PREFETCH = 0
MAX_SETS = 128
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


# (block_n, block_k of one chain, chains, warps, stages)
BF16_TILES = [
    *[(16, 64, 4, w, s) for w in (1, 2, 4) for s in (3, 4)],
    *[(16, 128, 4, w, s) for w in (2, 4) for s in (2, 3)],
    *[(16, 128, 2, w, 4) for w in (2, 4)],
    (16, 128, 1, 2, 8),
    *[(32, 64, 4, w, s) for w in (2, 4) for s in (3, 4)],
    *[(32, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    (32, 64, 2, 2, 6),
    (32, 128, 1, 2, 6),
    *[(64, 64, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 64, 4, 4, s) for s in (2, 3)],
    *[(64, 128, 1, 4, s) for s in (3, 4)],
    *[(64, 128, 2, 4, s) for s in (2, 3)],
    (128, 64, 1, 4, 4),
    (128, 64, 2, 4, 3),
    (128, 128, 1, 4, 3),
]
FP8_TILES = [
    *[(16, 128, 4, w, 3) for w in (1, 2)],
    (16, 128, 2, 2, 4),
    *[(32, 128, 4, w, s) for w in (1, 2) for s in (2, 3)],
    *[(32, 128, 2, w, s) for w in (1, 2) for s in (3, 4)],
    (32, 128, 1, 2, 6),
    *[(64, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 128, 1, w, s) for w in (2, 4) for s in (4, 6)],
    (64, 128, 4, 2, 2),
    (64, 128, 4, 4, 3),
    *[(128, 128, 1, w, s) for w in (4, 8) for s in (3, 4)],
    *[(128, 128, 2, 4, s) for s in (2, 3)],
]


def tiles(dtype: torch.dtype) -> list[LinearConfig]:
    """Every tile that is tried, without a split."""
    chosen = FP8_TILES if dtype == torch.float8_e4m3fn else BF16_TILES
    return [LinearConfig(16, n, k, w, s, 1, c, FIRST_PREFETCH) for n, k, c, w, s in chosen]


def candidates(n: int, k: int, dtype: torch.dtype) -> list[LinearConfig]:
    """The configurations worth timing: enough programs to fill the GPU, parts of K long enough to stream."""
    result = []
    for tile in tiles(dtype):
        for split in (1, 2, 3, 4, 6):
            config = replace(tile, split=split)
            programs = -(-n // tile.block_n) * split
            length = config.part_length(k) * config.chains
            if config.programs_along_k(k) != split or not is_even(config, k):
                continue
            if (split == 1 or (length >= 512 and programs <= 700)) and programs >= min(60, n // 16):
                result.append(config)
    return result


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def make_inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> list[Inputs]:
    """Sets of (x, weight, scale) that together exceed the L2 cache."""
    sets = max(2, min(MAX_SETS, int(ROTATED_BYTES // (n * k * dtype.itemsize)) + 1))
    result = []
    for _ in range(sets):
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda").to(dtype)
        scale = (
            torch.rand(-(-n // 128), -(-k // 128), device="cuda") if dtype == torch.float8_e4m3fn else None
        )
        result.append((x, weight, scale))
    return result


def measure(config: LinearConfig, inputs: list[Inputs]) -> float:
    """Microseconds a call."""
    rounds = max(1, 16 // len(inputs))
    return time_us([functools.partial(launch_config, config, *args, False) for args in inputs] * rounds)


def compile_share(share: int, shares: int) -> None:
    """Compile one share of the kernels into Triton's cache, in a process of its own."""
    done = 0
    for dtype in DTYPES:
        for tile in tiles(dtype):
            for split in (1, 2):
                done += 1
                if done % shares == share:
                    inputs = make_inputs(8, 256, 2048, dtype)[0]
                    launch_config(replace(tile, split=split), *inputs, False)


def tune(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[LinearConfig, float, int]:
    """The fastest configuration, its microseconds, and how many were tried."""
    inputs = make_inputs(rows, n, k, dtype)
    first = sorted(((measure(c, inputs), c) for c in candidates(n, k, dtype)), key=lambda pair: pair[0])
    second = [
        (measure(config, inputs), config)
        for _, best in first[:4]
        for prefetch in PREFETCH_BYTES
        for config in [replace(best, prefetch_bytes=prefetch)]
    ]
    us, config = min(second, key=lambda pair: pair[0])
    return config, us, len(first) + len(second)


def main() -> None:
    """Parse the arguments, tune, print a line a weight and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated models")
    parser.add_argument("--rows", type=int, default=8, help="rows while timing (1 to 16 share a kernel)")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long and write what is known"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: the table holds measured times' winners")
    started = time.monotonic()
    arch = device_of(torch.cuda.current_device()).arch
    workers = 12
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(compile_share, [(share, workers) for share in range(workers)])
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    table = json.loads(TABLE.read_text())
    entries = table.setdefault(arch, {})
    wanted = {
        (n, k, dtype)
        for shape in args.shapes.split(",")
        for name, (n, k) in projections(SHAPES[shape]).items()
        for dtype in DTYPES
        if dtype == torch.bfloat16 or name not in ("lm_head", "mtp_fc")
    }
    for n, k, dtype in sorted(wanted, key=lambda w: (w[0] * w[1], w[0], dtype_name(w[2]))):
        if time.monotonic() - started > args.seconds:
            print(f"out of time, {n}x{k} {dtype_name(dtype)} and larger ones keep their rule")
            break
        config, us, tried = tune(args.rows, n, k, dtype)
        speed = n * k * dtype.itemsize / us / 1e6
        entries[f"{n}x{k} {dtype_name(dtype)}"] = [*astuple(config)[1:-1]]
        print(f"{n}x{k} {dtype_name(dtype)}: {us:.1f} us {speed:.2f} TB/s of {tried}: {config}", flush=True)
    table[arch] = entries
    text = ",\n".join(
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(fields)}" for key, fields in sorted(rows.items()))
        + "\n }"
        for name, rows in sorted(table.items())
    )
    args.out.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
