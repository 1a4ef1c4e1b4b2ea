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
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from op_cases import SHAPES, OpCase

from compiled_mtp.benchmarks.gpu_rates import read_bandwidth, time_us
from compiled_mtp.errors import check
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser, counts, names_of

ROTATED_BYTES = 200e6  # more than three times the L2 cache of an H200
MAX_SETS = 256


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


def _setting(text: str) -> tuple[str, int]:
    """Parse a flag's NAME=INTEGER."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be NAME=INTEGER, got {text!r}")
    return name, int(value)


def main() -> int:
    """Parse the arguments, measure, print; return 1 if a check failed."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    operators = sorted(path.stem for path in (Path(__file__).parent / "op_cases").glob("[!_]*.py"))
    some_of = "comma-separated of {}"
    parser.add_argument(
        "--op", type=names_of(operators), required=True, help=some_of.format("the modules of tools/op_cases")
    )
    parser.add_argument(
        "--shape", type=names_of(SHAPES), default=["27b"], help=some_of.format(", ".join(SHAPES))
    )
    parser.add_argument(
        "--rows", type=counts, default=[1, 4, 16, 32, 64, 128, 256], help="comma-separated row counts"
    )
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=INTEGER",
        help="setting of a module",
    )
    args = parser.parse_args()
    check(torch.cuda.is_available(), "device", "be a CUDA GPU, whose kernels are timed", "none", "use one")
    settings = dict(args.set)
    bandwidth = read_bandwidth()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s, {versions}")
    status = 0
    for op in args.op:
        make_cases = importlib.import_module(f"op_cases.{op}").cases
        for shape in args.shape:
            for rows in args.rows:
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
    sys.exit(run_command(lambda interrupts: main()))
