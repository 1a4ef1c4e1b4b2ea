"""Compile the operators' Triton kernels without a GPU and print the resources each configuration takes.

    python tools/kernel_table.py --capabilities 90                 # every configuration, as JSON
    python tools/kernel_table.py --capabilities 80 90 --first      # one configuration a kernel
    python tools/kernel_table.py --products --capabilities 90      # which tensor-core instructions they hold
    python tools/kernel_table.py --record                          # rewrite the table of this Triton version

The recorded table (tests/ops/kernel_table.json) is what `make kernels` compares with, per Triton version.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TABLE = ROOT / "tests" / "ops" / "kernel_table.json"
CAPABILITIES = (80, 90, 100)


def operators_with_kernels() -> list[str]:
    """Names of the operators that have a kernel.py."""
    return sorted(path.parent.name for path in (ROOT / "ops").glob("*/kernel.py"))


def variants_of(operator: str, capability: int, first: bool) -> Iterator[Any]:
    """The KernelVariants of an operator meant for a capability; with `first`, one of each kernel function."""
    seen: set[Any] = set()
    for variant in importlib.import_module(f"compiled_mtp.ops.{operator}.kernel").variants():
        if capability >= variant.min_capability and not (first and variant.function in seen):
            seen.add(variant.function)
            yield variant


def compile_variant(variant: Any, capability: int) -> Any:
    """What Triton makes of one configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    given = set(variant.signature) | set(variant.constexprs)
    if given != set(names):
        raise ValueError(f"variant must describe every argument, got a difference of {given ^ set(names)}")
    source = ASTSource(
        fn=variant.function,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=dict(variant.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def inspect(compiled: Any, tool: str, flag: str) -> str:
    """What one of the tools of Triton's own package says of a compiled kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([path, flag, cubin.name], check=True, capture_output=True, text=True).stdout


def products_of(variant: Any, capability: int) -> dict[str, int]:
    """How many instructions of each class of tensor-core product (HMMA, HGMMA, QGMMA) one kernel holds."""
    code = inspect(compile_variant(variant, capability), "nvdisasm", "-c")
    return dict(collections.Counter(re.findall(r"\b([A-Z]*MMA)\.", code)))


def resources_of(variant: Any, capability: int) -> dict[str, int]:
    """Registers a thread, bytes of stack (spills) and bytes of shared memory of one configuration."""
    compiled = compile_variant(variant, capability)
    usage = inspect(compiled, "cuobjdump", "-res-usage")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }


def compile_table(
    operators: list[str], capabilities: list[int], first: bool, describe: Callable[[Any, int], dict[str, int]]
) -> dict[str, Any]:
    """What `describe` finds, or {"error": text}, keyed by "operator/variant@sm_NN"."""
    table: dict[str, Any] = {}
    for operator in operators:
        for capability in capabilities:
            for variant in variants_of(operator, capability, first):
                key = f"{operator}/{variant.name}@sm_{capability}"
                if key in table:
                    raise ValueError(f"variant names must differ, got {key} twice; rename one")
                try:
                    table[key] = describe(variant, capability)
                except Exception as error:  # one bad kernel must not hide the others
                    table[key] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
    return table


def main() -> None:
    """Parse the arguments, compile, print or record."""
    # Interpreted functions cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", nargs="*", default=operators_with_kernels())
    parser.add_argument("--capabilities", nargs="*", type=int, default=list(CAPABILITIES))
    parser.add_argument("--first", action="store_true", help="one configuration a kernel")
    parser.add_argument("--products", action="store_true", help="count tensor-core products, not resources")
    parser.add_argument("--record", action="store_true", help=f"rewrite {TABLE.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.products and args.record:
        parser.error("--record must stand alone: the table holds resources; drop --products")
    describe = products_of if args.products else resources_of
    table = compile_table(args.operators, args.capabilities, args.first, describe)
    if not args.record:
        print(json.dumps(table))
        return
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


if __name__ == "__main__":
    main()
