"""Measure the whole engine in one named scenario: check its tokens, then time it.

    python tools/bench_engine.py prefix --prompt-tokens 4000 --repeats 3
    python tools/bench_engine.py SCENARIO --help                            # what it measures and its flags

Every scenario first compares tokens: wrong tokens end it with an error and without a figure. The last line is
a JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser

# Each is a module of engine_scenarios with `add_flags(parser)` and `run(flags)`. `run` returns the object to
# print and raises AssertionError for wrong tokens.
SCENARIOS = (
    "conversation",
    "depth",
    "experts",
    "guided",
    "images",
    "lookup",
    "overhead",
    "prefix",
    "pressure",
    "score",
    "serving",
    "start",
    "weights",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named scenario and print its line; return 0."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the scenario")
    chosen = parser.parse_args(argv)
    # Import this scenario alone: others may need packages that are not installed, such as the server's.
    scenario = importlib.import_module(f"engine_scenarios.{chosen.scenario}")
    own = Parser(
        prog=f"bench_engine.py {chosen.scenario}",
        description=scenario.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scenario.add_flags(own)
    try:
        line = scenario.run(own.parse_args(chosen.flags))
    except AssertionError as error:
        raise SystemExit(f"error: {error}") from error
    print(json.dumps({"scenario": chosen.scenario} | line))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
