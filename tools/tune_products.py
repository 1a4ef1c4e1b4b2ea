"""Measure ways to run the products of a decode step on this GPU, and write the fastest to the tables.

    python tools/tune_products.py narrow                              # 1 to 16 rows: tiles, K splits
    python tools/tune_products.py narrow --shapes 27b --recipes bf16 --weights down,gdn_out  # no bit changes
    python tools/tune_products.py resident --shapes 0.8b              # 1 to 16 rows: weights in shared memory
    python tools/tune_products.py large-m --rows 128,32 --weights gdn_out --output FILE  # 17 to 256 rows
    python tools/tune_products.py w8a8 --rows 4,32,128 --output FILE  # FP8 rows, either operand on the left

Kernels are first compiled without a GPU, in many processes, then run in one process that is killed when a
kernel hangs. Before a way is timed, its bits are compared with the operator's, at the number of rows and at
fewer. A way with other bits never enters a table, except where the table itself decides the bits: up to 16
rows, where no norm follows. Weights rotate through more memory than L2. For a product before a norm, the time
with that norm decides. A line is printed as soon as it is known, in microseconds and as a ratio to only
reading the weight; the last lines name the fastest ways, and --output writes them.

`narrow` and `resident` let the best tiles of a weight compete inside a stack of the model's own layers. A new
table of `narrow` changes the numbers of a model, but never with the number of rows; no other kind changes a
bit. `resident` ends in one JSON line: the stack's microseconds without resident weights, before, and after.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from deadlines import run_jobs
from op_cases import SHAPES
from product_tuning import candidates
from product_tuning.stack import STACK_LAYERS, ResidentTuner, Stack, choose_config
from product_tuning.ways import FEW_ROWS, Product, Way, call, empty_inputs, time_way
from record_launches import Launch, record

from compiled_mtp.errors import check
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear import large_m_config
from compiled_mtp.ops.linear.config import TABLE, LinearConfig, dtype_name, read_table
from compiled_mtp.ops.linear.resident_config import RESIDENT_TABLE
from compiled_mtp.ops.linear_w8a8 import large_m_config as w8a8_config
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser, counts, names_of

COMPILE_SECONDS, STACK_SECONDS, TIME_SECONDS = 60.0, 300.0, 20.0
# For `narrow`: how many tiles of each kind compete in the stack, and half of a processor's shared memory.
FINALISTS, LITTLE_SHARED_BYTES = 6, 114 * 1024
NOT_IN_A_STACK = ("lm_head", "mtp_fc")
T = TypeVar("T")
# By a product's name in its table and the most rows that share the entry: microseconds and the way.
Best = dict[tuple[str, int], tuple[float, Way]]
Table = dict[str, Any]


def launches_of(way: Way) -> list[Launch]:
    """Return the kernels of a way, as Triton would compile them on a GPU."""

    def launch(device: torch.device) -> None:
        for rows in dict.fromkeys((*FEW_ROWS, way.rows)):
            call(way, *empty_inputs(way, rows, device))

    return list({own.key: own for own in record(launch, way.capability)}.values())


def compile_way(way: Way) -> str:
    """Compile a way's kernels into Triton's cache, without a GPU."""
    for launch in launches_of(way):
        launch.compile()
    return ""


def compile_stack(shape_and_rows: tuple[str, int]) -> str:
    """Compile a stack by running it."""
    Stack(*shape_and_rows).time_us()
    return ""


def describe_way(way: Way) -> str:
    """Return the resources of a way's kernels and their tensor-core instructions, as text."""
    # Imported only in a worker: kernel_table hides the GPU from its process.
    from kernel_table import products_of, resources_of

    return "; ".join(f"{resources_of(one)} {products_of(one)}" for one in launches_of(way))


def distinct(ways: Iterable[Way]) -> list[Way]:
    """Return one way for each set of equal kernels."""
    found: dict[object, Way] = {}
    for way in ways:
        if way.kernel != "cuBLAS":
            found.setdefault(tuple(launch.key for launch in launches_of(way)), way)
    return list(found.values())


def run_phase(
    work: Callable[[Any], str], jobs: list[T], workers: int, seconds: float, until: float = float("inf")
) -> Iterator[tuple[T, str]]:
    """Yield jobs and their texts until the time `until` (time.monotonic)."""
    for index, text in run_jobs(work, jobs, workers, seconds):
        yield jobs[index], text
        if time.monotonic() > until:
            print("out of time", flush=True)
            return


def compile_all(ways: list[Way], flags: argparse.Namespace) -> None:
    """Compile the kernels of all ways, with --compile-only also describe them; print failures."""
    work = describe_way if flags.compile_only else compile_way
    begin, until = time.monotonic(), float("inf") if flags.compile_only else flags.until
    for way, text in run_phase(work, distinct(ways), flags.workers, COMPILE_SECONDS, until):
        if text:
            print(f"{way.label} {text}", flush=True)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)


def entry_of(way: Way) -> tuple[str, int]:
    """Return the key under which a way competes: an entry of a table of tiles, or just its number of rows."""
    own = way.product
    if way.kernel == "operator" or way.is_narrow:
        return own.label, way.rows
    if own.recipe == "w8a8":
        name = w8a8_config.product_name(own.n, own.k, way.count, own.k // own.k_splits)
        return name, w8a8_config.row_class(way.rows)
    return own.large_m(way.count).name, large_m_config.row_class(way.rows)


def fields_of(tile: object) -> list[Any] | None:
    """Return a table's entry for a tile: its fields, without trailing flags that are not set.

    None, for no tile or one with the weight on the left, says that no large-M tile is faster.
    """
    if not isinstance(tile, large_m_config.LargeMTile | w8a8_config.LargeMTile):
        return None
    fields = [*astuple(tile)]
    while fields[-1] is False:
        fields.pop()
    return fields


def show(way: Way, text: str, best: Best) -> None:
    """Print the result of a way; store it in `best` if it is the fastest of its rivals with the same bits."""
    if not text.startswith("{"):
        print(f"{way.label} {text}", flush=True)
        return
    found = json.loads(text)
    decisive = found.get("decisive_us", found["us"])
    norm = f", with its neighbours {decisive:.1f}" if "decisive_us" in found else ""
    bits = {None: "", True: ", same bits", False: ", OTHER BITS"}[found["same_bits"]]
    ratio = found["us"] / found["floor_us"]
    print(f"{way.label} {found['us']:8.1f} us, {ratio:.2f} of reading it{norm}{bits}", flush=True)
    if way.kernel != "cuBLAS" and found["same_bits"] is not False:
        entry = entry_of(way)
        best[entry] = min(best.get(entry, (1e9, way)), (decisive, way), key=lambda pair: pair[0])


def merged(best: Best, table: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of tiles with the best ways entered."""
    entries = {name: dict(rows) for name, rows in table.items()}
    for (name, rows), (_, way) in best.items():
        if way.kernel != "operator":
            entries.setdefault(name, {})[str(rows)] = fields_of(way.tile)
    return entries


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write a table in the order of the names' numbers, one line per list of fields."""

    def order(pair: tuple[str, Any]) -> list[Any]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", pair[0])]

    def lines(entries: Mapping[str, Any], indent: str) -> str:
        texts = []
        for name, value in sorted(entries.items(), key=order):
            is_nested = isinstance(value, dict)
            text = f"{{\n{lines(value, indent + ' ')}\n{indent}}}" if is_nested else json.dumps(value)
            texts.append(f"{indent}{json.dumps(name)}: {text}")
        return ",\n".join(texts)

    path.write_text(f"{{\n{lines(table, ' ')}\n}}\n")


def finalists(ranked: list[tuple[float, LinearConfig]], product: Product) -> list[LinearConfig]:
    """Return the fastest configurations, the fastest with little shared memory, and those of one step.

    Little: the next product's programs fit on a processor next to theirs.
    """
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def takes_little(config: LinearConfig) -> bool:
        programs = -(-(-(-product.n // config.block_n) * config.split) // processors)
        return programs * config.num_stages * config.stage_bytes(2, 2) <= LITTLE_SHARED_BYTES

    order = [config for _, config in sorted(ranked, key=lambda pair: pair[0])]
    one_step = [config for config in order if config.is_one_step(product.k)]
    little = [config for config in order if takes_little(config) and config not in one_step]
    return list(dict.fromkeys([*order[:FINALISTS], *little[:FINALISTS], *one_step[:FINALISTS]]))


def tune_narrow(flags: argparse.Namespace) -> None:
    """Rank each weight's configurations among the kernels around it, then let the best compete in a stack.

    A weight that is in no stack gets its fastest configuration.
    """
    arch, (rows, *_) = device_of(torch.cuda.current_device()).arch, flags.rows
    capability = int(arch.removeprefix("sm_"))
    products = candidates.products_of(flags.shapes, flags.recipes, flags.weights)
    ways = [
        replace(way, capability=capability)
        for product in products
        for way in candidates.ways_of("narrow", product, rows)
    ]
    compile_all(ways, flags)
    if flags.compile_only:
        return
    stacks = [(shape, rows) for shape in flags.shapes if "bf16" in flags.recipes]
    for job, text in run_phase(compile_stack, stacks, len(stacks), STACK_SECONDS):
        if text:
            print(f"{job}: {text}", flush=True)
    # The dict that `linear` reads: a choice takes effect at once.
    table = read_table()
    entries = table.setdefault(arch, {})
    ranked: dict[Product, list[tuple[float, LinearConfig]]] = {}
    best: Best = {}
    for way, text in run_phase(time_way, ways, 1, TIME_SECONDS, flags.until):
        show(way, text, best)
        found = json.loads(text) if text.startswith("{") else {"same_bits": False}
        if isinstance(way.tile, LinearConfig) and found["same_bits"] is not False:
            ranked.setdefault(way.product, []).append((found["decisive_us"], way.tile))
    rivals = {name_of(product): finalists(found, product) for product, found in ranked.items()}
    for product in ranked:
        if product.recipe != "bf16" or product.name in NOT_IN_A_STACK:
            entries[name_of(product)] = [*astuple(rivals[name_of(product)][0])[1:-1]]
    for shape, _ in stacks:
        # By name: two weights of one size share an entry. The largest first, in two passes: after the first
        # pass all neighbours may have changed.
        own = candidates.products_of([shape], ["bf16"], flags.weights, NOT_IN_A_STACK)
        names = dict.fromkeys(map(name_of, sorted(own, key=lambda one: -one.n * one.k)))
        stack = Stack(shape, rows)
        for name in [*names] * 2:
            if name in rivals and time.monotonic() < flags.until:
                print(f"{shape} {name:18} {choose_config(stack, entries, name, rivals[name])}", flush=True)
        del stack
        torch.cuda.empty_cache()
    write_table(table, flags.out)


def name_of(product: Product) -> str:
    """Return a product's name in the table for few rows."""
    return f"{product.n}x{product.k} {dtype_name(product.weight_dtype)}"


def tune_resident(flags: argparse.Namespace) -> None:
    """Choose tiles for resident weights of products of few rows, inside a stack of one shape's layers."""
    (shape, *_), (rows, *_) = flags.shapes, flags.rows
    tuner = ResidentTuner(shape, rows)
    before = dict(tuner.table)
    tuner.table.clear()
    plain = tuner.stack_us()
    tuner.table.update(before)
    was = tuner.stack_us()
    # The largest first, in two passes: after the first pass all neighbours may have changed.
    for name in sorted(tuner.names, key=lambda name: -tuner.names[name][0] * tuner.names[name][1]) * 2:
        print(tuner.tune(name, flags.until), flush=True)
    found = tuner.stack_us()
    write_table(tuner.table, flags.out)
    device = torch.cuda.get_device_name()
    row = {"shape": shape, "rows": rows, "device": device, "plain_us": plain, "before_us": was}
    print(json.dumps(row | {"us": found, "table": tuner.table}))


def tune_tiles(flags: argparse.Namespace) -> None:
    """Compile, check and time the ways of `large-m` or `w8a8`, and name the fastest."""
    products = candidates.products_of(flags.shapes, flags.recipes, flags.weights, candidates.NOT_TIMED)
    if flags.kind == "large-m":
        products = [product for product in products if candidates.fits_large_m(product)]
    ways = [
        way
        for product in products
        for rows in flags.rows
        for way in candidates.ways_of(flags.kind, product, rows)
    ]
    compile_all(ways, flags)
    if flags.compile_only:
        return
    best: Best = {}
    for way, text in run_phase(time_way, ways, 1, TIME_SECONDS, flags.until):
        show(way, text, best)
    for (name, rows), (us, way) in best.items():
        print(f"fastest of {name}, up to {rows} rows: {us:.1f} us, {fields_of(way.tile)} x{way.count}")
    if flags.out is not None:
        table = w8a8_config if flags.kind == "w8a8" else large_m_config
        write_table(merged(best, table.read_large_m_table()), flags.out)


KINDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "narrow": tune_narrow,
    "resident": tune_resident,
    "large-m": tune_tiles,
    "w8a8": tune_tiles,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "narrow": {"shapes": list(SHAPES), "rows": [4], "recipes": ["bf16", "w8a16"], "out": TABLE},
    "resident": {"shapes": ["0.8b"], "rows": [4], "out": RESIDENT_TABLE, "seconds": 300.0},
    "large-m": {"rows": [128, 32], "recipes": ["bf16"]},
    "w8a8": {"rows": [4, 32, 128], "recipes": ["w8a8"]},
}


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags, with the kind's own defaults."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--shapes", type=names_of(STACK_LAYERS), help=f"comma-separated of {', '.join(STACK_LAYERS)}"
    )
    parser.add_argument("--rows", type=counts, help="comma-separated row counts; one for narrow and resident")
    parser.add_argument(
        "--weights", default="", help="comma-separated names, such as down,gate|up; default: all"
    )
    parser.add_argument(
        "--recipes", type=names_of(("bf16", "w8a16")), help="for narrow: comma-separated of bf16, w8a16"
    )
    parser.add_argument(
        "--output", dest="out", type=Path, help="table to write; narrow and resident have a default"
    )
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, help="start no further job after this long")
    parser.add_argument("--compile-only", action="store_true", help="compile and describe; needs no GPU")
    flags = parser.parse_args(argv)
    defaults = {"shapes": ["27b"], "recipes": ["bf16"], "seconds": 1e9 if flags.kind == "narrow" else 110.0}
    for name, value in (defaults | DEFAULTS[flags.kind]).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    flags.weights = [one for one in flags.weights.split(",") if one]
    flags.until = time.monotonic() + flags.seconds
    can_time = flags.compile_only or torch.cuda.is_available()
    check(can_time, "device", "be a CUDA GPU, whose kernels are timed", "none", "use one, or --compile-only")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run the kind of tuning that the flags name; return 0."""
    flags = parse_flags(argv)
    KINDS[flags.kind](flags)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
