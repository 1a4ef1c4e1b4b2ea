"""Time the products of a decode step by recipe: shares in 1 to 8 programs, W8A16 beside W8A8 and its tiles.

    python tools/bench_products.py                        # 27B and 4B at 4, 32, 128 and 256 rows
    python tools/bench_products.py --shapes 27b --rows 4 --seconds 120

First the bits (every number of programs, row counts 1 to 256) and the errors are checked; a failure ends the
run with status 1. Then a line for each way to run a weight, in microseconds a call on weights rotated beyond
L2, as a ratio to the time of only reading the weight; of a product before a norm also with the norm that adds
its parts up. The last lines name the fastest for each weight and number of rows. Quantising the rows is timed
apart: where it is fused into what makes them it costs nothing.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, read_bandwidth, time_us
from op_cases import SHAPES
from op_cases.linear import BEFORE_NORM, projections

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.linear import count_parts, linear, linear_parts
from compiled_mtp.ops.linear.config import LinearConfig
from compiled_mtp.ops.linear.kernel import launch_config as launch_linear
from compiled_mtp.ops.linear_w8a8 import linear_w8a8_parts
from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration
from compiled_mtp.ops.linear_w8a8.kernel import launch_config as launch_w8a8
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.ops.shares import part_counts, share_count

NOT_TIMED = ("router", "mtp_fc")
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
    empty = torch.empty(n, k, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device="cuda")
    chosen = count_parts(empty)
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


def wanted_cases(shapes: list[str]) -> Iterator[tuple[str, str, int, int, bool]]:
    """Shape, name, N, K and FP8 of each weight; one of those that are of one size."""
    done = set(NOT_TIMED)
    for shape in shapes:
        for fp8 in (False, True):
            for name, (n, k) in projections(SHAPES[shape], fp8).items():
                size = f"{n}x{k} {fp8}"
                if name not in done and size not in done:
                    done.add(size)
                    yield shape, name, n, k, fp8


def check_all(shapes: list[str]) -> None:
    """`check` of every weight before a norm."""
    for _, name, n, k, fp8 in wanted_cases(shapes):
        if name in BEFORE_NORM:
            check(n, k, fp8)


def compile_part(part: int, parts: int, shapes: list[str], row_counts: list[int]) -> None:
    """Compile a part of all kernels into Triton's cache, in a process of its own: on few weight rows."""
    number = 0
    for _, name, n, k, fp8 in wanted_cases(shapes):
        # As many as divide N: of a weight that was cut only whole pieces are taken.
        weight, scale = make_weight(math.gcd(n, 256), k, fp8)
        # `check` needs the tiles of every number of rows.
        for rows in sorted({4, 32, 64, 128, *row_counts}):
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            for way in ways(n, k, rows, fp8, name in BEFORE_NORM):
                number += 1
                if number % parts == part:
                    way.call(x, quantize_rows(x), weight, scale)


def time_case(
    shape: str, name: str, n: int, k: int, fp8: bool, row_counts: list[int], bandwidth: float
) -> list[str]:
    """Print a line a way; the fastest of each recipe and number of rows, in words."""
    is_before_norm, item = name in BEFORE_NORM, 1 if fp8 else 2
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
        for way in ways(n, k, rows, fp8, is_before_norm):
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
    parser.add_argument("--rows", default="4,32,128,256", help="comma-separated row counts")
    parser.add_argument("--dtypes", default="bf16,fp8", help="of the weights that are timed, comma-separated")
    parser.add_argument("--seconds", type=float, default=470, help="start no further weight after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: times on another device say nothing about the kernels")
    started = time.monotonic()
    shapes, row_counts = args.shapes.split(","), [int(rows) for rows in args.rows.split(",")]
    workers = 12
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(compile_part, [(part, workers, shapes, row_counts) for part in range(workers)])
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    try:
        check_all(shapes)
    except AssertionError as error:
        print(f"WRONG: {error}")
        raise SystemExit(1) from error
    bandwidth = read_bandwidth()
    print(f"checked in {time.monotonic() - started:.0f} s; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for k in sorted({k for _, _, _, k, fp8 in wanted_cases(shapes) if fp8}):
        for rows in row_counts:
            xs = [torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
            us = time_us([functools.partial(quantize_rows, x) for x in xs])
            print(f"quantize_rows of {k} columns, {rows} rows: {us:.1f} us", flush=True)
    best = []
    for case in wanted_cases(shapes):
        if ("fp8" if case[-1] else "bf16") not in args.dtypes.split(","):
            continue
        if time.monotonic() - started < args.seconds:
            best += time_case(*case, row_counts, bandwidth)
            torch.cuda.empty_cache()
    print("fastest of each recipe:", *best, sep="\n")


if __name__ == "__main__":
    main()
