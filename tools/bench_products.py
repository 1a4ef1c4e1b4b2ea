"""Time the products of a decode step by recipe: shares in 1 to 8 programs, W8A16 beside W8A8 and its tiles.

    python tools/bench_products.py                        # 27B and 4B at 4, 32, 128 and 256 rows
    python tools/bench_products.py --shapes 27b --weights down,gate|up --dtypes fp8 --rows 4,128 --seconds 120

First the bits (every number of programs, row counts 1 to 256) and the errors are checked; a failure ends the
run with status 1. Then a line for each way to run a weight, in microseconds a call on weights rotated beyond
L2, as a ratio to the time of only reading the weight; of a product before a norm also with the norm that adds
its parts up. The last lines name the fastest for each weight and number of rows. Quantising the rows is timed
apart: where it is fused into what makes them it costs nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, read_bandwidth, time_us
from deadlines import run_jobs
from op_cases import SHAPES
from op_cases.linear import BEFORE_NORM, projections
from record_launches import Launch, record

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.linear import linear, linear_parts
from compiled_mtp.ops.linear.config import LinearConfig, shared_split
from compiled_mtp.ops.linear.kernel import launch_config as launch_linear
from compiled_mtp.ops.linear_w8a8 import linear_w8a8_parts
from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration
from compiled_mtp.ops.linear_w8a8.kernel import launch_config as launch_w8a8
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.ops.shares import part_counts, share_count

NOT_TIMED = ("router", "mtp_fc")
# Other GPUs have no entry in the table, nor products in FP8 of this kind.
ARCH, CAPABILITY = "sm_90", 90
COMPILE_SECONDS = 60
CHECKED_ROWS = (1, 2, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256)
# By the most rows they are meant for.
W8A8_TILES = {
    16: [
        W8A8Config(16, 128, 4, 3),
        W8A8Config(16, 128, 4, 4),
        W8A8Config(16, 128, 4, 6),
        W8A8Config(16, 64, 4, 6),
    ],
    32: [W8A8Config(32, 128, 4, 3), W8A8Config(32, 128, 4, 4), W8A8Config(32, 64, 4, 6)],
    256: [
        W8A8Config(64, 128, 8, 4),
        W8A8Config(64, 64, 4, 5),
        W8A8Config(128, 64, 8, 4),
        W8A8Config(128, 64, 4, 6),
        W8A8Config(128, 128, 8, 3),
        W8A8Config(128, 128, 8, 4),
    ],
}
# A thread of these tiles has no room for sums that wait.
ONE_SHARE = 64


@dataclass(frozen=True)
class Way:
    """One way to run a weight: `call(x, quantised x, weight, scale)` returns [M, N] or parts [P, M, N]."""

    label: str
    call: Callable[..., torch.Tensor]
    recipe: str


def w8a8_ways(n: int, k: int, rows: int, is_before_norm: bool) -> Iterator[Way]:
    """The tiles that are meant for so many rows, in every number of programs."""
    shares = share_count(k) if is_before_norm else 1
    tiles = next(tiles for most, tiles in W8A8_TILES.items() if rows <= most)
    for count in part_counts(k, k) if is_before_norm else (1,):
        own = configuration(rows, n, count, shares // count)
        for tile in dict.fromkeys([own, *tiles]):
            sums = tile.block_m * tile.block_n // (32 * tile.num_warps)
            if sums >= ONE_SHARE and shares > count:
                continue

            dtype = torch.float32 if count > 1 else torch.bfloat16

            def call(
                x: torch.Tensor,
                quantised: tuple[torch.Tensor, torch.Tensor],
                weight: torch.Tensor,
                scale: torch.Tensor,
                tile: W8A8Config = tile,
                count: int = count,
                dtype: torch.dtype = dtype,
            ) -> torch.Tensor:
                return launch_w8a8(tile, *quantised, weight, scale, count, k // shares, dtype)

            label = f"w8a8 {tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
            yield Way(f"{label} x{count}" + " rule" * (tile == own), call, "w8a8")


def linear_ways(n: int, k: int, fp8: bool, is_before_norm: bool) -> Iterator[Way]:
    """What `linear` does; before a norm each number of programs, the table's named."""
    recipe = "w8a16" if fp8 else "bf16"
    if not is_before_norm:
        yield Way(recipe, lambda x, _, w, s: linear(x, w, s, False, False, n, k), recipe)
        return
    chosen = shared_split(ARCH, n, k, torch.float8_e4m3fn if fp8 else torch.bfloat16)
    for count in part_counts(k, k):

        def call(x: torch.Tensor, _: Any, w: torch.Tensor, s: Any, count: int = count) -> torch.Tensor:
            return linear_parts(x, w, s, count, n, k)

        yield Way(f"{recipe} x{count}" + " table" * (count == chosen), call, recipe)


# [block_n, block_k, warps, stages, split, chains, prefetch] of products before a norm, as they were measured
# before K was cut into shares: what the rule costs.
WITHOUT_SHARES = {
    "1024x2048 bf16": (32, 128, 2, 4, 4, 1, 512),
    "2048x4096 bf16": (32, 128, 2, 4, 4, 1, 512),
    "2560x4096 bf16": (32, 128, 2, 6, 2, 1, 512),
    "2560x9216 bf16": (16, 128, 2, 4, 3, 2, 1024),
    "2560x9216 fp8": (64, 128, 4, 4, 6, 1, 256),
    "5120x17408 bf16": (32, 128, 2, 6, 4, 1, 0),
    "5120x6144 bf16": (32, 128, 2, 3, 3, 2, 0),
    "5120x6144 fp8": (128, 128, 4, 3, 6, 1, 0),
}


def way_without_shares(n: int, k: int, rows: int, fp8: bool) -> Iterator[Way]:
    """The parts of old, for few rows, where they were measured."""
    fields = WITHOUT_SHARES.get(f"{n}x{k} {'fp8' if fp8 else 'bf16'}")
    if fields is None or rows > 16:
        return
    config = LinearConfig(16, *fields)
    label = f"{'w8a16' if fp8 else 'bf16'} {config.split} x {config.chains} parts, before"
    yield Way(
        label,
        lambda x, _, w, s: launch_linear(config, x, w, s, config.split > 1, keep_parts=True),
        "before",
    )


def ways(n: int, k: int, rows: int, fp8: bool, is_before_norm: bool) -> list[Way]:
    """Everything that is timed for one weight and number of rows."""
    result = [*linear_ways(n, k, fp8, is_before_norm)]
    if is_before_norm:
        result += way_without_shares(n, k, rows, fp8)
    if fp8:
        result += w8a8_ways(n, k, rows, is_before_norm)
    return result


def make_weight(n: int, k: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    if not fp8:
        return weight * k**-0.5, None
    scale = torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 1e-3 + 1e-4
    return (weight * 50).to(torch.float8_e4m3fn), scale


def rel_l2(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def add_up(parts: torch.Tensor) -> torch.Tensor:
    """The rounded sums, as the norm adds them up: the residual is zero."""
    width = parts.shape[-1]
    zero = torch.zeros(parts.shape[1:], dtype=torch.bfloat16, device="cuda")
    return add_rms_norm(parts, zero, torch.zeros(width, dtype=torch.bfloat16, device="cuda"), 1e-6)[1]


def check(n: int, k: int, fp8: bool) -> None:
    """Equal bits for every number of programs and of rows; errors against float64, printed."""
    weight, scale = make_weight(n, k, fp8)
    x = torch.randn(256, k, dtype=torch.bfloat16, device="cuda")
    values, factors = quantize_rows(x)
    exact_weight = (weight if scale is None else dequantize(weight, scale)).double()
    exact = x.double() @ exact_weight.T
    quantised = values.double() * factors.double().repeat_interleave(128, 1) @ exact_weight.T
    recipes: dict[str, tuple[Callable[[int, int], torch.Tensor], torch.Tensor]] = {
        "w8a16" if fp8 else "bf16": (lambda m, count: linear_parts(x[:m], weight, scale, count), exact)
    }
    if scale is not None:
        recipes["w8a8"] = (
            lambda m, count: linear_w8a8_parts(values[:m], factors[:m], weight, scale, count),
            quantised,
        )
    for recipe, (call, wanted) in recipes.items():
        largest = add_up(call(256, 1))
        for count in part_counts(k, k):
            for rows in CHECKED_ROWS:
                same = torch.equal(add_up(call(rows, count)), largest[:rows])
                assert same, f"{recipe} {n}x{k}: {rows} rows in {count} programs have other bits"
        sums = call(256, part_counts(k, k)[-1])
        own = rel_l2(sums.double().sum(0), wanted)
        print(
            f"{n}x{k} {recipe}: one set of bits; float32 sums err {own:.2e} against float64 of what they "
            f"multiply, the rounded result {rel_l2(largest, exact):.2e} against the unquantised rows",
            flush=True,
        )
        # What FP8 products add up inside is imprecise: as much again as the rounding.
        most = (4 if recipe == "w8a8" else 2) * rel_l2(wanted.bfloat16(), wanted)
        assert rel_l2(largest, wanted) < most, f"{recipe} {n}x{k} is wrong"


@dataclass(frozen=True)
class Case:
    """A weight of a shape, [n, k], in bf16 or FP8."""

    shape: str
    name: str
    n: int
    k: int
    fp8: bool

    @property
    def is_before_norm(self) -> bool:
        return self.name in BEFORE_NORM

    def ways(self, rows: int) -> list[Way]:
        return ways(self.n, self.k, rows, self.fp8, self.is_before_norm)


def wanted_cases(shapes: list[str], names: list[str], dtypes: list[str]) -> list[Case]:
    """Each weight, or those named, of the dtypes; one of those that are of one size."""
    done: dict[object, Case] = {}
    for shape in shapes:
        for fp8 in (dtype == "fp8" for dtype in dtypes):
            for name, (n, k) in projections(SHAPES[shape], fp8).items():
                if name not in NOT_TIMED and (not names or name in names):
                    done.setdefault((n, k, fp8), Case(shape, name, n, k, fp8))
    return list(done.values())


def launches_of(job: tuple[Case, int, int]) -> list[Launch]:
    """What one way of a case launches with so many rows: (case, rows, which way)."""
    case, rows, index = job

    def launch(device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        x = empty(rows, case.k, dtype=torch.bfloat16)
        fp8, scales = torch.float8_e4m3fn, (-(-case.n // 128), -(-case.k // 128))
        quantised = empty(rows, case.k, dtype=fp8), empty(rows, scales[1], dtype=torch.float32)
        weight = empty(case.n, case.k, dtype=fp8 if case.fp8 else torch.bfloat16)
        scale = empty(*scales, dtype=torch.float32) if case.fp8 else None
        case.ways(rows)[index].call(x, quantised, weight, scale)

    return record(launch, CAPABILITY)


def compile_way(job: tuple[Case, int, int]) -> str:
    """Compile what one way launches into Triton's cache, without a GPU."""
    for launch in launches_of(job):
        launch.compile()
    return ""


def distinct_jobs(cases: list[Case], row_counts: list[int]) -> list[tuple[Case, int, int]]:
    """One of the ways that launch the same kernels, of all cases and numbers of rows."""
    found: dict[object, tuple[Case, int, int]] = {}
    # `check` needs the tiles of every number of rows.
    for case, rows in itertools.product(cases, sorted({4, 32, 64, 128, *row_counts})):
        for index in range(len(case.ways(rows))):
            job = (case, rows, index)
            found.setdefault(tuple(launch.key for launch in launches_of(job)), job)
    return list(found.values())


def time_case(case: Case, row_counts: list[int], bandwidth: float) -> list[str]:
    """Print a line a way; the fastest of each recipe and number of rows, in words."""
    shape, name, n, k, fp8 = astuple(case)
    is_before_norm, item = case.is_before_norm, 1 if fp8 else 2
    sets = max(2, int(ROTATED_BYTES // (n * k * item)) + 1)
    weights = [make_weight(n, k, fp8) for _ in range(sets)]
    floor = n * k * item / bandwidth * 1e6
    best = []
    for rows in row_counts:
        xs = [torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        quantised = [quantize_rows(x) for x in xs]
        residual = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
        factor = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        fastest: dict[str, tuple[float, str]] = {}
        for way in case.ways(rows):
            calls = [
                functools.partial(way.call, x, q, *w) for x, q, w in zip(xs, quantised, weights, strict=True)
            ] * max(1, 16 // sets)
            us = time_us(calls)
            text = f"{us:8.1f} us, {us / floor:5.2f} of reading it"
            decisive = us
            if is_before_norm and way.recipe != "before":

                def with_norm(call: Callable[[], torch.Tensor]) -> Any:
                    return add_rms_norm(call(), residual, factor, 1e-6)  # noqa: B023  called at once

                decisive = time_us([functools.partial(with_norm, call) for call in calls])
                text += f"; with the norm {decisive:8.1f}"
            print(f"{shape} {name} {n}x{k} {rows:4} rows {way.label:36} {text}", flush=True)
            fastest[way.recipe] = min(fastest.get(way.recipe, (1e9, "")), (decisive, way.label))
        best.append(
            f"{shape} {name} {n}x{k} {rows} rows: "
            + "; ".join(f"{label} {us:.1f} us" for us, label in fastest.values())
        )
    return best


def main() -> None:
    """Parse the arguments, compile, check, time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="27b,4b", help="comma-separated models")
    parser.add_argument("--weights", default="", help="comma-separated names, as down,gate|up; all by rule")
    parser.add_argument("--rows", default="4,32,128,256", help="comma-separated row counts")
    parser.add_argument("--dtypes", default="bf16,fp8", help="of the weights, comma-separated")
    parser.add_argument("--seconds", type=float, default=470, help="start no further weight after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    started = time.monotonic()
    row_counts = [int(rows) for rows in args.rows.split(",")]
    names = args.weights.split(",") if args.weights else []
    cases = wanted_cases(args.shapes.split(","), names, args.dtypes.split(","))
    jobs = distinct_jobs(cases, row_counts)
    for index, text in run_jobs(compile_way, jobs, 14, COMPILE_SECONDS):
        if text:
            print(f"{jobs[index]}: {text}", flush=True)
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    try:
        for case in cases:
            if case.is_before_norm:
                check(case.n, case.k, case.fp8)
    except AssertionError as error:
        print(f"WRONG: {error}")
        raise SystemExit(1) from error
    bandwidth = read_bandwidth()
    print(f"checked in {time.monotonic() - started:.0f} s; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for k in sorted({case.k for case in cases if case.fp8}):
        for rows in row_counts:
            xs = [torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
            us = time_us([functools.partial(quantize_rows, x) for x in xs])
            print(f"quantize_rows of {k} columns, {rows} rows: {us:.1f} us", flush=True)
    best = []
    for case in cases:
        if time.monotonic() - started < args.seconds:
            best += time_case(case, row_counts, bandwidth)
            torch.cuda.empty_cache()
    print("fastest of each recipe:", *best, sep="\n")


if __name__ == "__main__":
    main()
