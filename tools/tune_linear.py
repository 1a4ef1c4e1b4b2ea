"""Measure configurations of `linear` on this GPU and write the fastest per (N, K, dtype) to its table.

    python tools/tune_linear.py                          # every projection of every shape in tools/op_cases
    python tools/tune_linear.py --shapes 27b --rows 8    # one model
    python tools/tune_linear.py --shapes 27b --dtypes bf16 --weights down,gdn_out    # no bit changes

A product's time depends on what runs around it: what the memory does while the small kernels between two
products run, and what the processors still hold. So the tiles and splits of each weight are first ranked
alone, behind the small kernel that makes its input and on weights rotated beyond L2; then the best of them
compete inside a stack of the model's own layers, where the whole stack's time decides. Where no norm follows
the parts of K decide the bits of a row, so a new table changes the numbers of a model, but never with the
number of rows; products before a norm have their shares of K whatever the table says.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import ROTATED_BYTES, time_us
from bench_step import fill_random, model_config
from deadlines import run_jobs
from op_cases import SHAPES
from op_cases.linear import BEFORE_NORM, projections
from record_launches import record

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.models.layers import Linear, rotary_table
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.rows import DecodeRows
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear import NARROW_ROWS, count_parts
from compiled_mtp.ops.linear.config import (
    NAMED_DTYPES,
    TABLE,
    LinearConfig,
    dtype_name,
    linear_config,
    read_table,
    with_shares,
)
from compiled_mtp.ops.linear.kernel import launch_config
from compiled_mtp.ops.rms_norm import add_rms_norm, rms_norm
from compiled_mtp.ops.shares import part_counts, share_count
from compiled_mtp.ops.silu_mul import silu_mul

PREFETCH_BYTES = (0, 256, 512, 1024, 2048, 8192)
FIRST_PREFETCH = 512
# Of one weight: how many of each kind compete in the stack, and what share of the stack's time a change must
# gain.
FINALISTS = 6
LEAST_GAIN = 0.001
LITTLE_SHARED_BYTES = 114 * 1024  # half of a processor's
# Enough to be more than L2 and the address translation hold.
STACK_LAYERS = {"0.8b": 24, "4b": 12, "9b": 8, "27b": 8, "35b-a3b": 12}
NOT_IN_A_STACK = ("lm_head", "mtp_fc")
MAX_SETS = 128
# The stack's kernels are compiled by one process.
COMPILE_SECONDS = 300


# (block_n, block_k of one chain, chains, warps, stages)
BF16_TILES = [
    *[(16, 64, 4, w, s) for w in (1, 2, 4) for s in (3, 4)],
    *[(16, 128, 4, w, s) for w in (2, 4) for s in (2, 3)],
    *[(16, 128, 2, w, 4) for w in (2, 4)],
    (16, 128, 1, 2, 8),
    *[(32, 64, 4, w, s) for w in (2, 4) for s in (3, 4)],
    *[(32, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    (32, 64, 2, 2, 6),
    (32, 128, 1, 2, 6),
    *[(64, 64, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 64, 4, 4, s) for s in (2, 3)],
    *[(64, 128, 1, 4, s) for s in (3, 4)],
    *[(64, 128, 2, 4, s) for s in (2, 3)],
    (128, 64, 1, 4, 4),
    (128, 64, 2, 4, 3),
    (128, 128, 1, 4, 3),
    *[(16, 128, 1, w, s) for w in (1, 2) for s in (3, 4)],
    *[(32, 64, 1, w, 4) for w in (1, 2)],
    *[(32, 128, 1, w, s) for w in (1, 2, 4) for s in (3, 4)],
    *[(64, 64, 1, w, 4) for w in (2, 4)],
]
FP8_TILES = [
    *[(16, 128, 4, w, 3) for w in (1, 2)],
    (16, 128, 2, 2, 4),
    *[(32, 128, 4, w, s) for w in (1, 2) for s in (2, 3)],
    *[(32, 128, 2, w, s) for w in (1, 2) for s in (3, 4)],
    (32, 128, 1, 2, 6),
    *[(64, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 128, 1, w, s) for w in (2, 4) for s in (4, 6)],
    (64, 128, 4, 2, 2),
    (64, 128, 4, 4, 3),
    *[(128, 128, 1, w, s) for w in (4, 8) for s in (3, 4)],
    *[(128, 128, 2, 4, s) for s in (2, 3)],
]


def tiles(dtype: torch.dtype) -> list[LinearConfig]:
    """Every tile that is tried, without a split."""
    chosen = FP8_TILES if dtype == torch.float8_e4m3fn else BF16_TILES
    return [LinearConfig(16, n, k, w, s, 1, c, FIRST_PREFETCH) for n, k, c, w, s in chosen]


def candidates(n: int, k: int, dtype: torch.dtype, is_before_norm: bool) -> list[LinearConfig]:
    """The configurations worth timing: enough programs to fill the GPU, parts of K long enough to stream.

    Of a product before a norm K is cut into its shares, whatever the tile.
    """
    result = []
    splits = part_counts(k, k) if is_before_norm else (1, 2, 4, 8)
    for tile in tiles(dtype):
        for split in splits:
            config = replace(tile, split=split)
            if is_before_norm:
                config = with_shares(config, share_count(k), split, dtype == torch.float8_e4m3fn)
            programs = -(-n // tile.block_n) * split
            length = config.part_length(k) * config.chains
            if not config.is_even(k):
                continue
            if (split == 1 or (length >= 512 and programs <= 700)) and programs >= min(60, n // 16):
                result.append(config)
    return list(dict.fromkeys([*result, *one_step_candidates(n, k, dtype, is_before_norm)]))


def one_step_candidates(n: int, k: int, dtype: torch.dtype, is_before_norm: bool) -> list[LinearConfig]:
    """Configurations whose programs hold all their weights in registers, few enough to run all at once."""
    result = []
    block_ks = (128,) if dtype == torch.float8_e4m3fn else (128, 256, 512)
    for split, block_n, block_k, warps in itertools.product(
        (1, 2, 4, 8), (16, 32, 64), block_ks, (1, 2, 4, 8)
    ):
        chains = k // (split * block_k)
        config = LinearConfig(16, block_n, block_k, warps, 2, split, chains, 0)
        programs = -(-n // block_n) * split
        if chains not in (2, 4, 8) or k != split * chains * block_k:
            continue
        if is_before_norm and split * chains != share_count(k):
            continue
        registers = block_n * chains * block_k * dtype.itemsize // (warps * 32 * 4)
        if 16 <= registers <= 128 and 100 <= programs <= 1056 and block_n >= 8 * warps // 2:
            result.append(config)
    return result


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def make_inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> list[Inputs]:
    """Sets of (x, weight, scale) that together exceed the L2 cache."""
    sets = max(2, min(MAX_SETS, int(ROTATED_BYTES // (n * k * dtype.itemsize)) + 1))
    result = []
    for _ in range(sets):
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda").to(dtype)
        scale = (
            torch.rand(-(-n // 128), -(-k // 128), device="cuda") if dtype == torch.float8_e4m3fn else None
        )
        result.append((x, weight, scale))
    return result


def measure(config: LinearConfig, inputs: list[Inputs], is_before_norm: bool) -> float:
    """Microseconds a call with the kernel before it, a norm where the weight widens, silu_mul elsewhere, and
    with the norm that adds up the parts where one follows."""
    (rows, k), n = inputs[0][0].shape, inputs[0][1].shape[0]
    is_wide = n > k
    factor, next_factor = (torch.zeros(width, dtype=torch.bfloat16, device="cuda") for width in (k, n))
    gate_up = torch.randn(rows, 2 * k, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")

    def call(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        made = rms_norm(x, factor, 1e-6) if is_wide else silu_mul(gate_up)
        is_part = is_before_norm and config.split > 1
        y = launch_config(config, made, weight, scale, is_part, keep_parts=is_before_norm)
        if is_before_norm:
            add_rms_norm(y, residual, next_factor, 1e-6)

    rounds = max(1, 16 // len(inputs))
    return time_us([functools.partial(call, *args) for args in inputs] * rounds)


@dataclass(frozen=True)
class Kernel:
    """What is compiled before anything is timed: a configuration for a weight [n, k], or a shape's stack."""

    shape: str = ""
    config: LinearConfig | None = None
    n: int = 0
    k: int = 0
    dtype: torch.dtype = torch.bfloat16
    keep_parts: bool = False
    rows: int = 4
    capability: int = 90


def kernels_of(
    n: int, k: int, dtype: torch.dtype, is_before_norm: bool, rows: int, capability: int
) -> dict[object, Kernel]:
    """One of the candidates that are one kernel, by what makes them one."""
    found: dict[object, Kernel] = {}
    for config in candidates(n, k, dtype, is_before_norm):
        same = (config, config.is_even(k), config.is_one_step(k), n % 16, dtype, is_before_norm)
        found.setdefault(same, Kernel("", config, n, k, dtype, is_before_norm, rows, capability))
    return found


def compile_kernel(kernel: Kernel) -> str:
    """Compile into Triton's cache: a candidate without a GPU, the stack by running it."""
    if kernel.config is None:
        Stack(kernel.shape, kernel.rows).time_us()
        return ""

    def launch(device: torch.device) -> None:
        assert kernel.config is not None
        x = torch.empty(kernel.rows, kernel.k, dtype=torch.bfloat16, device=device)
        weight = torch.empty(kernel.n, kernel.k, dtype=kernel.dtype, device=device)
        scale = None
        if kernel.dtype == torch.float8_e4m3fn:
            scale = torch.empty(-(-kernel.n // 128), -(-kernel.k // 128), device=device)
        is_float32 = kernel.config.split > 1 and kernel.keep_parts
        launch_config(kernel.config, x, weight, scale, is_float32, keep_parts=kernel.keep_parts)

    for found in record(launch, kernel.capability):
        found.compile()
    return ""


def rank(
    rows: int, n: int, k: int, dtype: torch.dtype, is_before_norm: bool
) -> list[tuple[float, LinearConfig]]:
    """Every candidate with its microseconds alone, the fastest first."""
    inputs = make_inputs(rows, n, k, dtype)
    configs = candidates(n, k, dtype, is_before_norm)
    timed = ((measure(c, inputs, is_before_norm), c) for c in configs)
    return sorted(timed, key=lambda pair: pair[0])


def finalists(ranked: list[tuple[float, LinearConfig]], n: int, k: int) -> list[LinearConfig]:
    """The fastest, the fastest of those beside which the next product's programs fit, and of one step."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def takes_little(config: LinearConfig) -> bool:
        programs = -(-n // config.block_n) * config.split
        return (
            -(-programs // processors) * config.num_stages * config.stage_bytes(2, 2) <= LITTLE_SHARED_BYTES
        )

    order = [config for _, config in ranked]
    little = [config for config in order if takes_little(config) and not config.is_one_step(k)]
    one_step = [config for config in order if config.is_one_step(k)]
    return list(dict.fromkeys([*order[:FINALISTS], *little[:FINALISTS], *one_step[:FINALISTS]]))


class Stack:
    """Layers of a released shape, every fourth of them attention, on the rows of one request in mid-text."""

    def __init__(self, shape: str, rows: int) -> None:
        device, dtype, context, block_size = torch.device("cuda"), torch.bfloat16, 512, 64
        layers = STACK_LAYERS[shape]
        config = replace(
            model_config(shape),
            num_layers=layers,
            is_full_attention=tuple((index + 1) % 4 == 0 for index in range(layers)),
        )
        self.target = TargetModel(config, dtype, device)
        with torch.no_grad():
            fill_random(dict(self.target.named_parameters()))
        blocks = (context + rows) // block_size + 2
        self.kv = KVCache(config, blocks, block_size, dtype, device, with_draft=False)
        self.state = StateCache(config, 2, rows - 1, dtype, device)
        self.cos_sin = rotary_table(config, 1024, device)
        self.tokens = torch.arange(rows, device=device)
        positions = context + torch.arange(rows, device=device)
        self.rows = DecodeRows(
            rotary_positions=positions,
            causal_positions=positions,
            # Block 0 belongs to nobody.
            slot_mapping=positions + block_size,
            block_table=torch.arange(1, blocks, dtype=torch.int32, device=device)[None],
            state_index=torch.ones(1, dtype=torch.int32, device=device),
            start=positions[:1].clone(),
            base=positions[:1] - 2,
        )

    @torch.no_grad()
    def time_us(self) -> float:
        """Microseconds of a forward without the head, with the table as it is now."""
        linear_config.cache_clear()
        for module in self.target.modules():
            if isinstance(module, Linear):
                module.num_parts = count_parts(module.weight, 1)
                module.num_tall_parts = count_parts(module.weight, NARROW_ROWS + 1)
        arguments = (self.tokens, self.rows, self.kv, self.state, self.cos_sin)
        return time_us([functools.partial(self.target, *arguments)])


def choose(stack: Stack, entries: dict[str, list[int]], name: str, rivals: list[LinearConfig]) -> str:
    """Give one weight the rival with which the stack is fastest; what was found, in words.

    Mutates `entries`, which `linear` reads.
    """

    def time_with(config: LinearConfig) -> float:
        entries[name] = [*astuple(config)[1:-1]]
        return stack.time_us()

    present = []
    if name in entries:
        block_n, block_k, num_warps, num_stages, split, chains, prefetch = entries[name]
        present.append(LinearConfig(16, block_n, block_k, num_warps, num_stages, split, chains, prefetch))
    timed = [(time_with(config), config) for config in (*present, *rivals)]
    now, was = timed[0]
    _, best = min(timed, key=lambda pair: pair[0])
    for prefetch in PREFETCH_BYTES:
        config = replace(best, prefetch_bytes=prefetch)
        timed.append((time_with(config), config))
    us, best = min(timed, key=lambda pair: pair[0])
    if us > (1 - LEAST_GAIN) * now:
        us, best = now, was
    time_with(best)
    return f"stack {now:.1f} -> {us:.1f} us of {len(timed)}: {entries[name]}"


def wanted_sizes(shape: str, dtype: torch.dtype, names: list[str] | None) -> dict[str, tuple[int, int]]:
    """Name and [N, K] of a shape's weights, of all or of those named."""
    weights = projections(SHAPES[shape], dtype == torch.float8_e4m3fn)
    return {name: size for name, size in weights.items() if names is None or name in names}


def main() -> None:
    """Parse the arguments, tune, print a line a weight and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated models")
    parser.add_argument("--rows", type=int, default=4, help="rows while timing (1 to 16 share a kernel)")
    parser.add_argument("--dtypes", default="bf16,fp8", help="comma-separated dtypes of weights")
    parser.add_argument("--weights", default="", help="comma-separated names, as down,gdn_out; all by rule")
    parser.add_argument("--output", "--out", dest="out", type=Path, default=TABLE)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long and write what is known"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device must be present: the table holds measured times' winners")
    started = time.monotonic()
    arch = device_of(torch.cuda.current_device()).arch
    dtypes = tuple(NAMED_DTYPES[name] for name in args.dtypes.split(","))
    shapes = args.shapes.split(",")
    names = args.weights.split(",") if args.weights else None
    kernels: dict[object, Kernel] = {shape: Kernel(shape, rows=args.rows) for shape in shapes}
    capability = int(arch.removeprefix("sm_"))
    for shape, dtype in itertools.product(shapes, dtypes):
        for weight, (n, k) in wanted_sizes(shape, dtype, names).items():
            kernels |= kernels_of(n, k, dtype, weight in BEFORE_NORM, args.rows, capability)
    jobs = list(kernels.values())
    for index, text in run_jobs(compile_kernel, jobs, 14, COMPILE_SECONDS):
        if text:
            print(f"{jobs[index]}: {text}", flush=True)
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    # The one that `linear` reads: what is chosen here takes effect at once.
    table = read_table()
    entries = table.setdefault(arch, {})
    ranked: dict[str, list[LinearConfig]] = {}

    def has_time() -> bool:
        return time.monotonic() - started < args.seconds

    for shape in shapes:
        for dtype in dtypes:
            weights = wanted_sizes(shape, dtype, names)
            # By name: two weights of one size share an entry.
            sizes = {f"{n}x{k} {dtype_name(dtype)}": (n, k) for n, k in weights.values()}
            in_stack = {size for weight, size in weights.items() if weight not in NOT_IN_A_STACK}
            before_norm = {size for weight, size in weights.items() if weight in BEFORE_NORM}
            alone = set(sizes.values()) - (in_stack if dtype == torch.bfloat16 else set())
            for name, (n, k) in sizes.items():
                if name not in ranked and has_time():
                    order = rank(args.rows, n, k, dtype, (n, k) in before_norm)
                    ranked[name] = finalists(order, n, k)
                    us, best = order[0]
                    speed = n * k * dtype.itemsize / us / 1e6
                    print(
                        f"{name:18} {us:6.1f} us alone, {speed:.2f} TB/s of {len(order)}: {best}", flush=True
                    )
                    if (n, k) in alone:
                        entries[name] = [*astuple(best)[1:-1]]
            if dtype != torch.bfloat16:
                continue
            stack = Stack(shape, args.rows)
            # The largest first; once more when all have changed.
            stacked = sorted(
                (name for name, size in sizes.items() if size not in alone),
                key=lambda name: -sizes[name][0] * sizes[name][1],
            )
            for name in stacked * 2:
                if name in ranked and has_time():
                    print(f"{shape} {name:18} {choose(stack, entries, name, ranked[name])}", flush=True)
            del stack
            torch.cuda.empty_cache()
    table[arch] = entries
    text = ",\n".join(
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(fields)}" for key, fields in sorted(rows.items()))
        + "\n }"
        for name, rows in sorted(table.items())
    )
    args.out.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
