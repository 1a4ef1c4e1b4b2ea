"""Time operators at a model's shapes, next to the obvious alternative, relative to the memory's speed.

    python tools/bench_op.py --op linear,linear_w8a8,rms_norm --shape 27b
    python tools/bench_op.py --op linear --rows 512,2048 --set prefill=1 --set fp8=0

Prints one JSON line per case. Each case is first checked for correctness; a case that fails is not timed, and
the exit status is 1. A time is the median over replays of a CUDA graph with one call for each of several sets
of random inputs. The sets together are larger than the L2 cache, but at most 256.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
import triton.language as tl
from op_cases import SHAPES, OpCase

ROTATED_BYTES = 200e6  # more than three times the L2 cache of an H200
MAX_SETS = 256
REPLAYS = 21
READ_BYTES = 4 << 30


@triton.jit
def read_kernel(source, sums, BLOCK: tl.constexpr, REPEAT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * (BLOCK * REPEAT) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(REPEAT):
        total += tl.load(source + at + step * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def time_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return microseconds per call: the median over replays of one graph that holds all of `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Return the bytes per second of a kernel that only reads."""
    source = torch.ones(READ_BYTES // 4, dtype=torch.int32, device="cuda")
    block, repeat = 2048, 8
    programs = source.numel() // (block * repeat)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    read = read_kernel[(programs,)]
    best = min(
        time_us([functools.partial(read, source, sums, BLOCK=block, REPEAT=repeat, num_warps=warps)])
        for warps in (4, 8)
    )
    return READ_BYTES / (best * 1e-6)


def measure(case: OpCase) -> tuple[float, float | None]:
    """Check a case, then return microseconds per call of the operator and of its alternative, if any."""
    first = case.make_inputs("cuda", 0)
    case.check(first)
    sets = max(2, min(MAX_SETS, int(ROTATED_BYTES // case.bytes_moved) + 1))
    inputs = [first, *(case.make_inputs("cuda", seed) for seed in range(1, sets))]
    # Long enough for an event to time, short enough to capture quickly.
    rounds = max(1, 20 // sets)
    operator_us = time_us([functools.partial(case.call, *a) for a in inputs] * rounds)
    other = case.alternative
    if other is None:
        return operator_us, None
    return operator_us, time_us([functools.partial(other, *a) for a in inputs] * rounds)


def main() -> int:
    """Parse the arguments, measure, print; return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", required=True, help="comma-separated modules of tools/op_cases")
    parser.add_argument("--shape", default="27b", help=f"comma-separated of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,4,16,32,64,128,256", help="comma-separated row counts")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=INTEGER", help="setting of a module"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    settings = {name: int(value) for name, value in (item.split("=") for item in args.set)}
    bandwidth = read_bandwidth()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s, {versions}")
    status = 0
    for op in args.op.split(","):
        make_cases = importlib.import_module(f"op_cases.{op}").cases
        for shape in args.shape.split(","):
            for rows in map(int, args.rows.split(",")):
                for case in make_cases(SHAPES[shape], rows, settings):
                    name = f"{op} {shape} {case.label}"
                    try:
                        us, other_us = measure(case)
                    except AssertionError as error:
                        print(f"{name:44} {rows:5}  WRONG, not timed: {error}")
                        status = 1
                        continue
                    speed = case.bytes_moved / (us * 1e-6)
                    record = {
                        "op": op,
                        "shape": shape,
                        "case": case.label,
                        "rows": rows,
                        "us": round(us, 2),
                        "bytes": case.bytes_moved,
                        "tb_per_s": round(speed / 1e12, 3),
                        "read_ratio": round(speed / bandwidth, 3),
                        "alternative": case.alternative_name,
                        "alternative_us": None if other_us is None else round(other_us, 2),
                        "settings": settings,
                        "device": torch.cuda.get_device_name(),
                        **versions,
                    }
                    print(json.dumps(record), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
