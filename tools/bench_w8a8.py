"""Find the tiles of FP8 products on this GPU, with the rows or the weight as left operand, beside cuBLAS.

    python tools/bench_w8a8.py --shape 27b --rows 4,32,128 --weights "qkvz,gate|up"
    python tools/bench_w8a8.py --shape 27b --rows 128 --output FILE    # write what was faster

Each way is checked against the bits of the operator before it is timed, at the number of rows and at fewer.
Kernels are first compiled without a GPU, in many processes, then run in one that is killed when a kernel
hangs; at the end stands what the table of tiles (ops/linear_w8a8/tall.json) should hold. No tile changes a
bit. Of a product before a norm the time with that norm decides. Weights are rotated beyond L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, time_us
from bench_tall import CAPABILITY, SHARED_BYTES, bandwidth, describe_launches, run_phase, write_table
from op_cases import SHAPES
from op_cases.linear import BEFORE_NORM, projections
from record_launches import Launch, record

from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration
from compiled_mtp.ops.linear_w8a8.kernel import launch_config
from compiled_mtp.ops.linear_w8a8.tall_config import (
    TallTile,
    choose_tile,
    product_name,
    ranked_tiles,
    read_tall_table,
    row_class,
)
from compiled_mtp.ops.linear_w8a8.tall_kernel import launch_tall
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.ops.shares import add_tree, part_counts, share_count

DEVICE = "cuda"
# For each number of programs on a processor.
KEPT = 2
FEW_ROWS = (1, 4, 17)
# With the weight on the left: beside the rule's, by the most rows they are meant for.
LEFT_TILES = {
    16: [W8A8Config(16, 128, 4, 6), W8A8Config(16, 128, 4, 8), W8A8Config(16, 64, 4, 8)],
    32: [W8A8Config(32, 128, 4, 6), W8A8Config(32, 64, 4, 8)],
    256: [W8A8Config(128, 64, 4, 6), W8A8Config(64, 128, 8, 4)],
}


@dataclass(frozen=True)
class Job:
    """One way to run the weight [n, k] with so many rows: a tile with the weight on the left, one with the
    rows there, or cuBLAS with one factor a matrix."""

    name: str
    n: int
    k: int
    rows: int
    count: int = 1
    left: W8A8Config | None = None
    tall: TallTile | None = None

    @property
    def is_before_norm(self) -> bool:
        return self.name in BEFORE_NORM

    @property
    def shares(self) -> int:
        return share_count(self.k) if self.is_before_norm else 1

    @property
    def product(self) -> str:
        return product_name(self.n, self.k, self.count, self.k // self.shares)

    @property
    def is_in_use(self) -> bool:
        """Whether the operator has this tile."""
        length = self.k // self.shares
        chosen = choose_tile(self.n, self.k, self.count, length, row_class(self.rows), SHARED_BYTES)
        rule = configuration(self.rows, self.n, self.count, self.shares // self.count)
        return self.tall == chosen if chosen else self.left == rule

    @property
    def label(self) -> str:
        own = "cuBLAS"
        if self.left:
            own = f"left {astuple(self.left)} x{self.count}"
        elif self.tall:
            own = f"tall {astuple(self.tall)} x{self.count}"
        own += " in use" * bool((self.left or self.tall) and self.is_in_use)
        return f"{self.name:8} {self.n}x{self.k} {self.rows:4} rows {own:44}"


def jobs_of(name: str, n: int, k: int, rows: int) -> Iterator[Job]:
    yield Job(name, n, k, rows)
    shares = share_count(k) if name in BEFORE_NORM else 1
    for count in part_counts(k, k) if name in BEFORE_NORM else (1,):
        rule = configuration(rows, n, count, shares // count)
        more = next(tiles for most, tiles in LEFT_TILES.items() if rows <= most)
        for left in dict.fromkeys([rule, *more]):
            yield Job(name, n, k, rows, count, left)
        chosen = choose_tile(n, k, count, k // shares, row_class(rows), SHARED_BYTES)
        tall = [chosen] if chosen else []
        for places in (1, 2, 3):
            tall += ranked_tiles(n, shares // count, count, row_class(rows), SHARED_BYTES, places)[:KEPT]
        for tile in dict.fromkeys(tall):
            yield Job(name, n, k, rows, count, None, tile)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def call(
    job: Job, x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """[M, N], or parts [P, M, N]."""
    length, dtype = job.k // job.shares, torch.float32 if job.count > 1 else torch.bfloat16
    if job.left:
        return launch_config(job.left, x, x_scale, w, scale, job.count, length, dtype)
    if job.tall:
        return launch_tall(job.tall, x, x_scale, w, scale, job.count, length, dtype)
    one = scale.new_ones(())
    return torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16)


def launches_of(job: Job) -> list[Launch]:
    def launch(device: torch.device) -> None:
        empty = functools.partial(torch.empty, device=device)
        weight = empty(job.n, job.k, dtype=torch.float8_e4m3fn)
        scale = empty(-(-job.n // 128), job.k // 128)
        for rows in dict.fromkeys((*FEW_ROWS, job.rows)):
            call(job, empty(rows, job.k, dtype=torch.float8_e4m3fn), empty(rows, job.k // 128), weight, scale)

    return list({own.key: own for own in record(launch, CAPABILITY)}.values())


def compile_job(job: Job) -> str:
    for launch in launches_of(job):
        launch.compile()
    return ""


def describe_job(job: Job) -> str:
    return describe_launches(launches_of(job))


@functools.lru_cache(maxsize=1)
def weights_of(n: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets that together are larger than L2."""
    torch.cuda.empty_cache()
    made = []
    for _ in range(max(2, int(ROTATED_BYTES // (n * k)) + 1)):
        weight = (torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * 40).to(torch.float8_e4m3fn)
        made.append((weight, torch.rand(-(-n // 128), k // 128, device=DEVICE) * 0.01 + 0.001))
    return made


@functools.lru_cache(maxsize=4)
def rows_of(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    return quantize_rows(torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE, generator=generator))


def sums_of(job: Job, rows: int) -> torch.Tensor:
    """The rounded result of the first rows, parts added up as the norm does it."""
    x, x_scale = (tensor[:rows] for tensor in rows_of(job.rows, job.k))
    return add_tree(call(job, x, x_scale, *weights_of(job.n, job.k)[0])).bfloat16()


@functools.lru_cache(maxsize=8)
def wanted_of(name: str, n: int, k: int, rows: int) -> torch.Tensor:
    """What `linear_w8a8_kernel` makes of the rows."""
    shares = share_count(k) if name in BEFORE_NORM else 1
    return sums_of(Job(name, n, k, rows, 1, configuration(rows, n, 1, shares)), rows)


def time_job(job: Job) -> str:
    """Check and time one way; a JSON object."""
    sets = [(*rows_of(job.rows, job.k), *own) for own in weights_of(job.n, job.k)]
    found: dict[str, Any] = {"floor_us": job.n * job.k / bandwidth() * 1e6, "same_bits": None}
    if job.left or job.tall:
        wanted = wanted_of(job.name, job.n, job.k, job.rows)
        counts = [rows for rows in (*FEW_ROWS, job.rows) if rows <= job.rows]
        found["same_bits"] = all(torch.equal(sums_of(job, rows), wanted[:rows]) for rows in counts)
    rounds = max(1, 16 // len(sets))
    found["us"] = time_us([functools.partial(call, job, *own) for own in sets] * rounds)
    if job.is_before_norm and (job.left or job.tall):
        residual = torch.randn(job.rows, job.n, dtype=torch.bfloat16, device=DEVICE)
        factor = torch.zeros(job.n, dtype=torch.bfloat16, device=DEVICE)

        def with_norm(*own: torch.Tensor) -> Any:
            return add_rms_norm(call(job, *own), residual, factor, 1e-6)

        found["with_norm_us"] = time_us([functools.partial(with_norm, *own) for own in sets] * rounds)
    return json.dumps(found)


# Microseconds and tile of what was fastest, by name in the table and row class; no tile: the other kernel.
Best = dict[tuple[str, int], tuple[float, TallTile | None]]


def show(job: Job, text: str, best: Best) -> None:
    """Print what a job found; keep the fastest way of each product and row class."""
    if not text.startswith("{"):
        print(f"{job.label} {text}", flush=True)
        return
    found = json.loads(text)
    decisive = found.get("with_norm_us", found["us"])
    norm = f", with the norm {decisive:.1f}" if "with_norm_us" in found else ""
    ratio = found["us"] / found["floor_us"]
    bits = {None: "", True: ", same bits", False: ", OTHER BITS"}[found["same_bits"]]
    print(f"{job.label} {found['us']:8.1f} us, {ratio:.2f} of reading it{norm}{bits}", flush=True)
    if found["same_bits"]:
        case = (job.product, row_class(job.rows))
        best[case] = min(best.get(case, (1e9, None)), (decisive, job.tall), key=lambda pair: pair[0])


def merged(best: Best) -> dict[str, dict[str, list[Any] | None]]:
    """The table with what was found."""
    entries: dict[str, dict[str, list[Any] | None]] = {
        name: dict(rows) for name, rows in read_tall_table().items()
    }
    for (name, height), (_, tile) in best.items():
        entries.setdefault(name, {})[str(height)] = None if tile is None else [*astuple(tile)]
    return entries


def main() -> None:
    """Parse the arguments, compile, check and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="27b", choices=[name for name in SHAPES if name != "35b-a3b"])
    parser.add_argument("--rows", default="4,32,128", help="comma-separated row counts")
    parser.add_argument("--weights", default="", help="comma-separated names; all by rule")
    parser.add_argument(
        "--output", "--out", dest="out", type=Path, help="write the table with what was faster"
    )
    parser.add_argument("--compile-only", action="store_true", help="compile and describe; needs no GPU")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=110, help="start no further job after this long")
    args = parser.parse_args()
    if not (args.compile_only or torch.cuda.is_available()):
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    started = time.monotonic()
    sizes: dict[str, tuple[int, int]] = {}
    for name, size in projections(SHAPES[args.shape], True).items():
        if name in (args.weights.split(",") if args.weights else [name]) and size not in sizes.values():
            sizes[name] = size
    rows = [int(count) for count in args.rows.split(",")]
    jobs = [job for name, (n, k) in sizes.items() for count in rows for job in jobs_of(name, n, k, count)]
    own = [job for job in jobs if job.left or job.tall]
    if args.compile_only:
        for job, text in run_phase(describe_job, own, args.workers, 60.0, float("inf")):
            print(f"{job.label} {text}", flush=True)
        return
    for job, text in run_phase(compile_job, own, args.workers, 40.0, started + 0.5 * args.seconds):
        if text:
            print(f"{job.label} {text}", flush=True)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    best: Best = {}
    for job, text in run_phase(time_job, jobs, 1, 20.0, started + args.seconds):
        show(job, text, best)
    for (name, height), (us, tile) in best.items():
        fields = json.dumps(None if tile is None else [*astuple(tile)])
        print(f"fastest of {name}, up to {height} rows: {us:.1f} us, {fields}")
    if args.out is not None:
        write_table(merged(best), args.out)


if __name__ == "__main__":
    main()
