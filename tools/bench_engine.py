"""Measure the engine as its users meet it: one named scenario, checked, then timed.

    python tools/bench_engine.py prefix --prompt-tokens 4000 --repeats 3
    python tools/bench_engine.py SCENARIO --help                            # what it measures, and its flags

Every scenario compares tokens before it says anything: where they are wrong it ends with an error, and prints
no figure. It ends in one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Each a module of engine_scenarios, with `add_flags(parser)` and `run(flags)`, which returns the object to
# print and raises AssertionError where tokens are wrong.
SCENARIOS = ("depth", "guided", "overhead", "prefix", "pressure")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the scenario that is named, and print its line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the scenario")
    chosen = parser.parse_args(argv)
    # What one scenario needs, as the server, another may lack.
    scenario = importlib.import_module(f"engine_scenarios.{chosen.scenario}")
    own = argparse.ArgumentParser(
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


if __name__ == "__main__":
    main()
