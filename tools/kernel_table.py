"""Compile the operators' kernels without a GPU, and print the resources that each configuration takes.

    python tools/kernel_table.py --capabilities 90                 # every configuration, as JSON
    python tools/kernel_table.py --capabilities 80 90 --first      # one configuration per kernel
    python tools/kernel_table.py --products --capabilities 90      # count tensor-core instructions
    python tools/kernel_table.py --record                          # rewrite the table of this Triton version
    python tools/kernel_table.py --capabilities 90 --jobs 24       # before measurements on a new machine

Kernels stay in Triton's cache: measurements after the last of these commands find most of them compiled.

op_cases/ lists the calls, record_launches.py records what they launch.
The recorded table (tests/ops/kernel_table.json) is what `make kernels` compares with, per Triton version.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Interpreted functions cannot be compiled, and a GPU that is present is not the one to compile for.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import triton  # noqa: E402  it reads the environment
from op_cases import launch_cases  # noqa: E402
from record_launches import Launch, record  # noqa: E402

from compiled_mtp.errors import check  # noqa: E402
from compiled_mtp.terminal.console import run_command  # noqa: E402
from compiled_mtp.terminal.flags import Parser, count  # noqa: E402

TABLE = ROOT / "tests" / "ops" / "kernel_table.json"
CAPABILITIES = (80, 90, 100)


def operators_with_kernels() -> list[str]:
    """Names of the operators that have a kernel.py."""
    return sorted(path.parent.name for path in (ROOT / "ops").glob("*/kernel.py"))


def launches_of(operator: str, capability: int, first: bool) -> Iterator[tuple[str, Launch]]:
    """Yield the distinct launches of an operator's cases, by name; `first`: one per kernel."""
    seen: set[str] = set()
    for case in launch_cases(operator, capability):
        for launch in record(case.call, capability):
            identity = launch.name if first else launch.key
            if identity not in seen:
                seen.add(identity)
                yield f"{launch.name.removesuffix('_kernel')}-{case.label}", launch


def inspect(compiled: Any, tool: str, flag: str) -> str:
    """Return what one of the tools in Triton's package prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([path, flag, cubin.name], check=True, capture_output=True, text=True).stdout


def products_of(launch: Launch) -> dict[str, int]:
    """Count a kernel's tensor-core instructions by class (HMMA, HGMMA, QGMMA)."""
    code = inspect(launch.compile(), "nvdisasm", "-c")
    return dict(collections.Counter(re.findall(r"\b([A-Z]*MMA)\.", code)))


def resources_of(launch: Launch) -> dict[str, int]:
    """Return registers per thread, and bytes of stack (spills) and of shared memory, of one configuration."""
    compiled = launch.compile()
    usage = inspect(compiled, "cuobjdump", "-res-usage")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }


def compile_table(
    operators: list[str],
    capabilities: list[int],
    first: bool,
    describe: Callable[[Launch], dict[str, int]],
    job: int = 0,
    jobs: int = 1,
) -> dict[str, Any]:
    """Return what `describe` finds for each kernel, or {"error": text}, by "operator/kernel-case@sm_NN".

    Compiles the part number `job` of `jobs` equal parts of the kernels.
    """
    table: dict[str, Any] = {}
    keys: set[str] = set()
    for operator in operators:
        for capability in capabilities:
            for name, launch in launches_of(operator, capability, first):
                key = f"{operator}/{name}@sm_{capability}"
                if key in keys:
                    raise ValueError(
                        f"a case must launch a kernel in one way, got {key} twice; split the case"
                    )
                keys.add(key)
                if len(keys) % jobs != job:
                    continue
                try:
                    table[key] = describe(launch)
                except Exception as error:  # one bad kernel must not hide the others
                    table[key] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
    return table


def compile_in_parts(
    operators: list[str],
    capabilities: list[int],
    first: bool,
    describe: Callable[[Launch], dict[str, int]],
    jobs: int,
) -> dict[str, Any]:
    """Run `compile_table` for all kernels in `jobs` processes."""
    if jobs == 1:
        return compile_table(operators, capabilities, first, describe)
    compile_part = partial(compile_table, operators, capabilities, first, describe, jobs=jobs)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        parts = [pool.submit(compile_part, job=job) for job in range(jobs)]
        return {key: row for part in parts for key, row in part.result().items()}


def main() -> int:
    """Parse the arguments, compile, print or record; return 0."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    operators = operators_with_kernels()
    parser.add_argument("--operators", nargs="*", choices=operators, metavar="NAME", default=operators)
    parser.add_argument("--capabilities", nargs="*", type=int, default=list(CAPABILITIES))
    parser.add_argument("--first", action="store_true", help="one configuration per kernel")
    parser.add_argument("--products", action="store_true", help="count tensor-core products, not resources")
    parser.add_argument("--record", action="store_true", help=f"rewrite {TABLE.relative_to(ROOT)}")
    parser.add_argument("--jobs", type=count, default=1, help="processes that compile")
    args = parser.parse_args()
    is_alone = not (args.products and args.record)
    check(is_alone, "--record", "stand alone: the table holds resources", "--products too", "drop one")
    describe = products_of if args.products else resources_of
    table = compile_in_parts(args.operators, args.capabilities, args.first, describe, args.jobs)
    if not args.record:
        print(json.dumps(table))
        return 0
    errors = [f"{key}: {value['error']}" for key, value in table.items() if "error" in value]
    if errors:
        raise SystemExit("\n".join(errors))
    recorded = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    kept = {
        key: value
        for key, value in recorded.get(triton.__version__, {}).items()
        if key.split("/")[0] not in args.operators and key.split("/")[0] in operators_with_kernels()
    }
    recorded[triton.__version__] = dict(sorted({**kept, **table}.items()))
    lines = {
        version: ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
        for version, rows in sorted(recorded.items())
    }
    text = ",\n".join(f" {json.dumps(version)}: {{\n{rows}\n }}" for version, rows in lines.items())
    TABLE.write_text(f"{{\n{text}\n}}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
