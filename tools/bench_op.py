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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import op_cases
import torch
import triton
from op_cases import SHAPES, OpCase

from compiled_mtp.benchmarks.gpu_rates import read_bandwidth, time_us

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


class Settings(dict[str, int]):
    """The integers of --set; remembers which of them a module has asked for."""

    def __init__(self, given: Sequence[tuple[str, int]]) -> None:
        super().__init__(given)
        self.known = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return super().get(name, default)


def names(text: str, known: Sequence[str]) -> list[str]:
    """Parse a flag's names, separated by commas."""
    parts = text.split(",")
    if not set(parts) <= set(known):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, separated by commas, got {text!r}")
    return parts


def numbers(text: str) -> list[int]:
    """Parse a flag's numbers of rows, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be integers from 1 on, separated by commas, got {text!r}")
    return [int(part) for part in parts]


def setting(text: str) -> tuple[str, int]:
    """Parse NAME=INTEGER."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be NAME=INTEGER, such as prefill=1, got {text!r}")
    return name, int(value)


def make_parser() -> argparse.ArgumentParser:
    """Return the flags."""
    modules = sorted(path.stem for path in Path(op_cases.__file__).parent.glob("[!_]*.py"))
    own = [module for module in modules if hasattr(importlib.import_module(f"op_cases.{module}"), "cases")]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op",
        type=functools.partial(names, known=own),
        required=True,
        help=f"of {', '.join(own)}, separated by commas",
    )
    parser.add_argument(
        "--shape",
        type=functools.partial(names, known=tuple(SHAPES)),
        default="27b",
        help=f"of {', '.join(SHAPES)}, separated by commas",
    )
    parser.add_argument(
        "--rows", type=numbers, default="1,4,16,32,64,128,256", help="row counts, separated by commas"
    )
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=INTEGER",
        help="setting of a module, whose docstring names it",
    )
    return parser


def cases_of(flags: argparse.Namespace, settings: Settings) -> list[tuple[str, str, int, OpCase]]:
    """Return module, shape and rows of every case, in the order in which they are measured.

    Raises ValueError for rows, a shape or a setting that a module does not take.
    """
    found = [
        (op, shape, rows, case)
        for op in flags.op
        for shape in flags.shape
        for rows in flags.rows
        for case in importlib.import_module(f"op_cases.{op}").cases(SHAPES[shape], rows, settings)
    ]
    if unknown := sorted(set(settings) - settings.known):
        rule = f"have names that {', '.join(flags.op)} reads: {', '.join(sorted(settings.known)) or 'none'}"
        raise ValueError(f"set must {rule}, got {', '.join(unknown)}; leave it out")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, print; return 1 if a check failed."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    settings = Settings(flags.set)
    try:
        cases = cases_of(flags, settings)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    bandwidth = read_bandwidth()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s, {versions}")
    status = 0
    for op, shape, rows, case in cases:
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
