"""`compiled-mtp bench serving|step`: load on an OpenAI endpoint, or the time of a decode step on a GPU.

    compiled-mtp bench serving --url http://127.0.0.1:8000 --concurrency 8 --num-requests 64
    compiled-mtp bench step --shape 4b --mtp-step 0,3 --batch 1,8,32

`compiled-mtp bench serving --help` and `compiled-mtp bench step --help` list the flags. serving needs httpx
(extra `bench`); step needs a CUDA device and no checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from compiled_mtp.terminal.console import EXIT_USAGE, say
from compiled_mtp.terminal.flags import Parser
from compiled_mtp.terminal.signals import leaving

# The benchmarks, each with its module.
BENCHMARKS = {"serving": "service_load", "step": "step_time"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; return its exit code: 0, 1 if something failed, 2 for a wrong flag."""
    flags = make_parser().parse_args(argv)
    try:
        with leaving():
            benchmark = import_module(f"compiled_mtp.benchmarks.{BENCHMARKS[flags.benchmark]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("compiled_mtp"):
            raise
        install = "pip install 'compiled-mtp[bench]'" if error.name == "httpx" else f"install {error.name}"
        say(f"error: bench {flags.benchmark} needs the package {error.name}, got none; {install}")
        return EXIT_USAGE
    return benchmark.main(flags.flags)


def make_parser() -> Parser:
    """Return the parser; the flags of the benchmark are read by its own."""
    parser = Parser(
        prog="compiled-mtp bench",
        usage="%(prog)s serving|step [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the benchmark")
    return parser
