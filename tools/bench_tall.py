"""Find the tiles of products of 17 to 256 rows on this GPU, beside the kernel without descriptors and cuBLAS.

    python tools/bench_tall.py --shape 27b --rows 128,32                   # some two minutes
    python tools/bench_tall.py --shape 27b --weights gdn_out --output FILE    # write what was faster
    python tools/bench_tall.py --shape 27b --specialized                   # warps of their own fetch, too

Each tile is checked at the number of rows and at 4, against the bits of the operator, before it is timed.
Kernels are first compiled without a GPU, in many processes, then run in one process that is killed when a
kernel hangs; a line is printed as soon as it is known, and at the end what the table of tiles
(ops/linear/tall.json) should hold. No tile changes a bit. Of a product before a norm the time with that norm,
which adds the parts up, decides; how many parts it has is the other table's to say. Weights are rotated
beyond L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, read_bandwidth, time_us
from deadlines import run_jobs
from op_cases import SHAPES
from op_cases.linear import BEFORE_NORM, GATE_UP, projections
from record_launches import Launch, record

from compiled_mtp.ops.linear import linear, linear_parts, linear_silu_mul
from compiled_mtp.ops.linear.config import choose, narrow_config, shared_split
from compiled_mtp.ops.linear.kernel import launch_config
from compiled_mtp.ops.linear.tall_config import (
    TallProduct,
    TallTile,
    ranked_tiles,
    read_tall_table,
    row_class,
)
from compiled_mtp.ops.linear.tall_kernel import launch_tall
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.ops.shares import add_tree, part_counts, share_count

ARCH, CAPABILITY, SHARED_BYTES = "sm_90", 90, 227 * 1024
DEVICE = "cuda"
NOT_TIMED = ("router", "mtp_fc")
# Tiles tried for each number of parts.
KEPT = 3
FEW_ROWS = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Weight:
    """A merged weight of a shape: its name, [N, K], and in how many chains its K is summed."""

    name: str
    n: int
    k: int
    chains: int

    @property
    def gated(self) -> bool:
        return self.name == GATE_UP

    @property
    def is_before_norm(self) -> bool:
        return self.name in BEFORE_NORM

    @property
    def counts(self) -> tuple[int, ...]:
        """In how many parts it may be summed, the table's number first."""
        if not self.is_before_norm:
            return (1,)
        chosen = shared_split(ARCH, self.n, self.k, torch.bfloat16)
        return tuple(dict.fromkeys([chosen, *part_counts(self.k, self.k)]))

    def product(self, count: int) -> TallProduct:
        return TallProduct(self.n, self.k, count, self.chains // count, self.gated, self.is_before_norm)


@dataclass(frozen=True)
class Job:
    """One way to run a weight with so many rows: cuBLAS, the operator in `count` parts, `linear_kernel`
    (`is_plain`), or a tile."""

    weight: Weight
    rows: int
    count: int = 1
    tile: TallTile | None = None
    is_cublas: bool = False
    is_plain: bool = False

    @property
    def label(self) -> str:
        if self.is_cublas:
            own = "cuBLAS"
        elif self.tile:
            own = f"{tile_label(self.tile)} x{self.count}"
        else:
            own = f"{'no descriptors' if self.is_plain else 'in use'} x{self.count}"
        return f"{self.weight.name:8} {self.weight.n}x{self.weight.k} {self.rows:4} rows {own:44}"


def tile_label(tile: TallTile) -> str:
    size = f"{tile.block_m}x({tile.block_n}+{tile.rest_n}) k{tile.block_k} w{tile.num_warps}"
    return (
        f"{size} s{tile.num_stages} L2 {tile.prefetch_bytes}"
        + " specialized" * tile.specialized
        + " apart" * tile.apart
    )


def weights_of(shape: str) -> Iterator[Weight]:
    """Those whose K is cut evenly, one of each size, the largest share of a step first."""
    done = set(NOT_TIMED)
    sizes = projections(SHAPES[shape])
    for name in sorted(sizes, key=lambda name: (name == "lm_head", -sizes[name][0] * sizes[name][1])):
        n, k = sizes[name]
        config = narrow_config(ARCH, n, k, torch.bfloat16)
        chains = share_count(k) if name in BEFORE_NORM else config.chains
        is_even = k % (chains * 128) == 0 and (name in BEFORE_NORM or config.split == 1)
        if is_even and name not in done and f"{n}x{k}" not in done:
            done.add(f"{n}x{k}")
            yield Weight(name, n, k, chains)


def tiles_of(weight: Weight, rows: int, count: int) -> list[TallTile]:
    """The tiles that should waste least in so many parts; in the chosen number more of the best."""
    tiles = [tile for _, tile in ranked_tiles(weight.product(count), rows, SHARED_BYTES)[:KEPT]]
    if tiles and count == weight.counts[0]:
        best = tiles[0]
        tiles += [replace(best, prefetch_bytes=0), replace(best, num_stages=best.num_stages - 1)]
        if best.num_stages >= 4:
            tiles.append(replace(best, block_k=128, num_stages=best.num_stages // 2))
    return tiles


def specialized_tiles(weight: Weight, rows: int) -> list[TallTile]:
    """Tiles of four warps beside which others fetch; nothing may stand between their loop and the launch."""
    tiles = tiles_of(weight, rows, weight.counts[0])
    narrow = [tile for tile in tiles if tile.num_warps == 4 and tile.rest_n == 0]
    half = TallTile(64 if rows <= 64 else 128, 64, 0, 64, 4, 3)
    return [replace(tile, specialized=True, prefetch_bytes=0) for tile in [half, *narrow][:2]]


def parse_tile(text: str) -> tuple[str, int, TallTile]:
    """Weight, number of parts and tile of "NAME:PARTS=FIELDS", fields separated by commas."""
    place, fields = text.split("=")
    name, count = place.split(":")
    return name, int(count), TallTile(*json.loads(f"[{fields}]"))


def jobs_of_tiles(weight: Weight, rows: int, named: list[tuple[str, int, TallTile]]) -> Iterator[Job]:
    """cuBLAS, the operator and the named tiles."""
    own = [(count, tile) for name, count, tile in named if name == weight.name]
    if own:
        yield Job(weight, rows, is_cublas=True)
    for count in dict.fromkeys(count for count, _ in own):
        yield Job(weight, rows, count)
    for count, tile in own:
        yield Job(weight, rows, count, tile)


def jobs_of(weight: Weight, rows: int, is_specialized: bool) -> Iterator[Job]:
    yield Job(weight, rows, is_cublas=True)
    for count in weight.counts:
        yield Job(weight, rows, count)
        yield Job(weight, rows, count, is_plain=True)
        if is_specialized and count == weight.counts[0]:
            for tile in specialized_tiles(weight, rows):
                yield Job(weight, rows, count, tile)
        else:
            for tile in tiles_of(weight, rows, count):
                yield Job(weight, rows, count, tile)


def call(job: Job, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[M, N], gated [M, N / 2], or parts [P, M, N]; of the head in float32, as everywhere."""
    own = job.weight
    if job.is_cublas:
        return torch.mm(x, weight.T)
    out_float32 = own.name == "lm_head" or (own.is_before_norm and job.count > 1)
    if job.tile is not None:
        dtype = torch.float32 if out_float32 else x.dtype
        return launch_tall(job.tile, own.product(job.count), x, weight, dtype)
    if job.is_plain:
        config = choose(x, weight, (0, 0), False, job.count if own.is_before_norm else 0)
        return launch_config(config, x, weight, None, out_float32, own.gated, own.is_before_norm)
    if own.gated:
        return linear_silu_mul(x, weight, None)
    if own.is_before_norm:
        return linear_parts(x, weight, None, job.count)
    return linear(x, weight, None, out_float32)


def launches_of(job: Job) -> list[Launch]:
    """The kernels of a job, as Triton would compile them on a GPU."""

    def launch(device: torch.device) -> None:
        weight = torch.empty(job.weight.n, job.weight.k, dtype=torch.bfloat16, device=device)
        for rows in {FEW_ROWS, job.rows}:
            call(job, torch.empty(rows, job.weight.k, dtype=torch.bfloat16, device=device), weight)

    return list({own.key: own for own in record(launch, CAPABILITY)}.values())


def compile_job(job: Job) -> str:
    """Compile what a job launches into Triton's cache, without a GPU."""
    for launch in launches_of(job):
        launch.compile()
    return ""


def describe_job(job: Job) -> str:
    return describe_launches(launches_of(job))


def describe_launches(launches: Iterable[Launch]) -> str:
    """What kernels take, and which tensor-core products they hold, in words."""
    # It hides the GPU from a process that imports it, as this one may.
    from kernel_table import inspect

    texts = []
    for launch in launches:
        compiled = launch.compile()
        usage = dict(re.findall(r"(REG|STACK):(\d+)", inspect(compiled, "cuobjdump", "-res-usage")))
        found = Counter(re.findall(r"\b([A-Z]*MMA)\.", inspect(compiled, "nvdisasm", "-c")))
        fetches = ", other warps fetch" * ("ttg.warp_specialize" in compiled.asm["ttgir"])
        shared = compiled.metadata.shared
        texts.append(
            f"{usage['REG']} registers, {usage['STACK']} spilled, {shared} shared, {dict(found)}{fetches}"
        )
    return "; ".join(texts)


def distinct(jobs: list[Job]) -> list[Job]:
    """One of the jobs that launch the same kernels."""
    found: dict[object, Job] = {}
    for job in jobs:
        own = job.weight
        same = (job.tile, own.product(job.count), own.name == "lm_head") if job.tile else job
        if not job.is_cublas:
            found.setdefault(same, job)
    return list(found.values())


def make_weight(weight: Weight) -> list[torch.Tensor]:
    """Sets that together are larger than L2."""
    count = max(2, int(ROTATED_BYTES // (weight.n * weight.k * 2)) + 1)
    made = (torch.randn(weight.n, weight.k, dtype=torch.bfloat16, device=DEVICE) for _ in range(count))
    return [w.mul_(weight.k**-0.5) for w in made]


@functools.lru_cache(maxsize=1)
def sets_of(weight: Weight) -> list[torch.Tensor]:
    torch.cuda.empty_cache()
    return make_weight(weight)


def sums_of(job: Job, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rounded result, parts added up as the norm does it."""
    result = call(job, x, weight)
    return add_tree(result).bfloat16() if job.weight.is_before_norm else result


@functools.lru_cache(maxsize=4)
def wanted_of(weight: Weight, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and what the product in use makes of the first FEW_ROWS of them and of all."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, weight.k, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    job = Job(weight, rows)
    wanted = sums_of(job, x, sets_of(weight)[0])
    assert torch.equal(sums_of(job, x[:FEW_ROWS], sets_of(weight)[0]), wanted[:FEW_ROWS]), "rows depend on M"
    return x, wanted


@functools.cache
def bandwidth() -> float:
    return read_bandwidth()


def time_job(job: Job) -> str:
    """Check and time one way; a JSON object."""
    weight, sets = job.weight, sets_of(job.weight)
    x, wanted = wanted_of(weight, job.rows)
    same = None
    if not job.is_cublas:
        few = sums_of(job, x[:FEW_ROWS], sets[0])
        same = torch.equal(sums_of(job, x, sets[0]), wanted) and torch.equal(few, wanted[:FEW_ROWS])
    rounds = max(1, (6 if weight.n > 1 << 16 else 16) // len(sets))
    us = time_us([functools.partial(call, job, x, w) for w in sets] * rounds)
    found = {"us": us, "floor_us": weight.n * weight.k * 2 / bandwidth() * 1e6, "same_bits": same}
    if weight.is_before_norm and not job.is_cublas:
        residual = torch.randn(job.rows, weight.n, dtype=torch.bfloat16, device=DEVICE)
        factor = torch.zeros(weight.n, dtype=torch.bfloat16, device=DEVICE)

        def with_norm(w: torch.Tensor) -> Any:
            return add_rms_norm(call(job, x, w), residual, factor, 1e-6)

        found["with_norm_us"] = time_us([functools.partial(with_norm, w) for w in sets] * rounds)
    return json.dumps(found)


# Microseconds and tile of what was fastest, by name in the table and row class; no tile: `linear_kernel`.
Best = dict[tuple[str, int], tuple[float, TallTile | None]]


def show(job: Job, text: str, best: Best) -> None:
    """Print what a job found; keep the fastest way of each product and row class."""
    if not text.startswith("{"):
        print(f"{job.label} {text}", flush=True)
        return
    found = json.loads(text)
    decisive = found.get("with_norm_us", found["us"])
    norm = f", with the norm {decisive:.1f}" if "with_norm_us" in found else ""
    bits = {None: "", True: ", same bits", False: ", OTHER BITS"}[found["same_bits"]]
    ratio = found["us"] / found["floor_us"]
    print(f"{job.label} {found['us']:8.1f} us, {ratio:.2f} of reading it{norm}{bits}", flush=True)
    if (job.tile or job.is_plain) and found["same_bits"]:
        case = (job.weight.product(job.count).name, row_class(job.rows))
        best[case] = min(best.get(case, (1e9, None)), (decisive, job.tile), key=lambda pair: pair[0])


def write_table(entries: dict[str, dict[str, list[Any] | None]], path: Path) -> None:
    """Write the table of tiles, a line for each row class."""

    def order(name: str) -> tuple[list[int], str]:
        size, kind = name.split()
        return [int(number) for number in size.split("x")], kind

    texts = []
    for name in sorted(entries, key=order):
        rows = sorted(entries[name].items(), key=lambda pair: int(pair[0]))
        lines = ",\n".join(f'  "{height}": {json.dumps(fields)}' for height, fields in rows)
        texts.append(f' "{name}": {{\n{lines}\n }}')
    path.write_text("{\n" + ",\n".join(texts) + "\n}\n")


def fields_of(tile: TallTile | None) -> list[Any] | None:
    """What the table holds of a tile."""
    if tile is None:
        return None
    fields = [*astuple(tile)]
    while fields[-1] is False:
        fields.pop()
    return fields


def merged(best: Best) -> dict[str, dict[str, list[Any] | None]]:
    """The table with what was found."""
    entries: dict[str, dict[str, list[Any] | None]] = {
        name: dict(rows) for name, rows in read_tall_table().items()
    }
    for (name, height), (_, tile) in best.items():
        entries.setdefault(name, {})[str(height)] = fields_of(tile)
    return entries


def run_phase(
    work: Callable[[Any], str], jobs: list[T], workers: int, seconds: float, until: float
) -> Iterator[tuple[T, str]]:
    """Jobs and their texts until that time."""
    for index, text in run_jobs(work, jobs, workers, seconds):
        yield jobs[index], text
        if time.monotonic() > until:
            print("out of time", flush=True)
            return


def main() -> None:
    """Parse the arguments, compile, check and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="27b", choices=[name for name in SHAPES if name != "35b-a3b"])
    parser.add_argument("--rows", default="128,32", help="comma-separated row counts, 17 to 256")
    parser.add_argument("--weights", default="", help="comma-separated names; all by rule")
    parser.add_argument("--specialized", action="store_true", help="time tiles of which other warps fetch")
    parser.add_argument(
        "--tile",
        action="append",
        default=[],
        type=parse_tile,
        metavar="NAME:PARTS=FIELDS",
        help="time these tiles of one number of rows alone, e.g. down:4=128,128,32,64,8,6,512",
    )
    parser.add_argument("--compile-only", action="store_true", help="compile and describe; needs no GPU")
    parser.add_argument(
        "--output", "--out", dest="out", type=Path, help="write the table with what was faster"
    )
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=110, help="start no further job after this long")
    args = parser.parse_args()
    if not (args.compile_only or torch.cuda.is_available()):
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    started = time.monotonic()
    names = args.weights.split(",") if args.weights else None
    weights = [w for w in weights_of(args.shape) if names is None or w.name in names]
    jobs = [
        job
        for weight in weights
        for rows in map(int, args.rows.split(","))
        for job in (
            jobs_of_tiles(weight, rows, args.tile) if args.tile else jobs_of(weight, rows, args.specialized)
        )
    ]
    if args.compile_only:
        for job, text in run_phase(describe_job, distinct(jobs), args.workers, 60.0, float("inf")):
            print(f"{job.label} {text}", flush=True)
        return
    for job, text in run_phase(compile_job, distinct(jobs), args.workers, 40.0, started + 0.5 * args.seconds):
        if text:
            print(f"{job.label} {text}", flush=True)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    best: Best = {}
    for job, text in run_phase(time_job, jobs, 1, 20.0, started + args.seconds):
        show(job, text, best)
    for (name, height), (us, tile) in best.items():
        print(f"fastest of {name}, up to {height} rows: {us:.1f} us, {json.dumps(fields_of(tile))}")
    if args.out is not None:
        write_table(merged(best), args.out)


if __name__ == "__main__":
    main()
