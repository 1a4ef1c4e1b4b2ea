"""Time the whole draft-and-verify step of a released shape, and compare it with the time for its bytes.

    compiled-mtp bench step --shape 4b --mtp-step 0,3 --batch 1,8,32
    compiled-mtp bench step --shape 27b --mtp-step 3 --batch 1 --context 131072 --graph-mode uncompiled
    compiled-mtp bench step --shape 27b --mtp-step 3 --batch 1,32 --tensor-parallel 2

Weights are random and acceptance is synthetic; the engine's loop is the real one. Prints a table and one
JSON line per row:
- milliseconds per step: median and 90th percentile of the wall clock between steps;
- the floor: the bytes that the step must read and write, over the read bandwidth measured in the same run;
- a second floor, for drafts in the weights' own dtype (not with `--draft-dtype weights`), and the ratio of
  the step to the first;
- the roof, and the ratio to it: the larger of the time of the weights' bytes and the tensor cores' time at
  the rates of torch's products, measured in the same run, plus the time of all other bytes;
- host microseconds per step: median, least and most; another process on the cores shows in them;
- the share of the step in which the GPU idles, kernels per step, tokens per second, and milliseconds per
  token of one request.
A shape whose decode rows are not bit-equal between the timed buckets gets no row.

--tensor-parallel N times one GPU and then N of them. A row's `of_one` is its step over that of one GPU.
`communicator_ms` is the time that a step on the first GPU spends in the communicator's kernels, waits for
peers included. A kernel that is launched early first waits for the one before it; only the time after that
counts. Rows of several GPUs have no floor, because the other ranks do not run the launches that measure it.

--beside FILE adds to each row the time of another engine, or of another commit, on the same kind of GPU. The
file holds one JSON object per line, as this tool prints them, with at least the fields of SAVED_FIELDS; lines
that do not begin with "{" are ignored. Several rows of one case are several measurements: the table shows the
least and the most.

The engine prefills a context from random ids. It prefills more than 4,096 tokens in chunks of 2,048: on 27B,
131,072 tokens are 64 launches, and their keys and values take 9.1 GB. A batch that does not fit into the
GPU's memory gets no row, and a line that says so. The quickest way to a figure is one depth, one batch and
--graph-mode uncompiled; kernels that Inductor would fuse are then launched singly.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_mtp import __version__
from compiled_mtp.benchmarks.gpu_rates import Rates, measure_rates
from compiled_mtp.benchmarks.kernel_times import TRACED_STEPS, communicator_ms, print_kernels, trace_kernels
from compiled_mtp.benchmarks.released_shapes import LAYERS, fill_random, model_config, rate_for
from compiled_mtp.benchmarks.row_bits import check_rows
from compiled_mtp.benchmarks.saved_rows import Row, describe_beside, read_rows, rows_beside
from compiled_mtp.benchmarks.step_floor import floor_bytes, product_flops, roof_ms
from compiled_mtp.benchmarks.step_loop import (
    TIMED_STEPS,
    WARM_UP_STEPS,
    Loop,
    check_blocks,
    count_launches,
    end_loop,
    launch,
    start_loop,
)
from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check
from compiled_mtp.ops.blocks import KINDS
from compiled_mtp.parallel.leader import LeadRunner
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser, count, counts, names_of

# Two rows that agree in these fields measure the same case.
CASE_FIELDS = ("device", "shape", "weights", "ranks", "mtp_step", "batch", "context")
SAVED_FIELDS = {*CASE_FIELDS, "engine", "step_ms"} - {"ranks"}

# Not `-m`: with this package's own path, the process imports the same package even if it is not installed.
_CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from compiled_mtp.benchmarks.step_time import main; sys.exit(main())"
)


class Timed(NamedTuple):
    """Times of steps: seconds and host microseconds of each step, new tokens and seconds of all."""

    step_s: list[float]
    host_us: list[float]
    tokens: int
    total_s: float


def time_steps(loop: Loop) -> Timed:
    """Time TIMED_STEPS steps of a loop that has just started."""
    runner = loop.runner
    for _ in range(WARM_UP_STEPS):
        loop.step()
    torch.cuda.synchronize()
    # The launch in flight has ended: take its result now, or it would count as a step without time.
    loop.step()
    runner.waited_s = 0.0
    times, host_times, tokens = [], [], 0
    begin = last = time.perf_counter()
    for _ in range(TIMED_STEPS):
        waited_s = runner.waited_s
        tokens += loop.step()
        now = time.perf_counter()
        times.append(now - last)
        host_times.append(1e6 * (now - last - (runner.waited_s - waited_s)))
        last = now
    return Timed(times, host_times, tokens, last - begin)


def measure(loop: Loop, batch: int, context: int, rates: Rates) -> dict[str, Any]:
    """Return one row of the table, without its kernels, from a loop that has just started."""
    runner = loop.runner
    times, host_times, tokens, total = time_steps(loop)
    assert len(loop.scheduler.running) == batch, "requests ended before the measurement did"
    step_ms = 1e3 * statistics.median(times)
    row = {
        "batch": batch,
        "step_ms": round(step_ms, 3),
        "p90_ms": round(1e3 * statistics.quantiles(times, n=10)[-1], 3),
        "host_us": round(statistics.median(host_times), 1),
        "host_min_us": round(min(host_times), 1),
        "host_max_us": round(max(host_times), 1),
        "tokens_per_s": round(tokens / total, 1),
        "tpot_ms": round(1e3 * total * batch / tokens, 3),
        "new_tokens_per_round": round(tokens / TIMED_STEPS / batch, 3),
    }
    if isinstance(runner, LeadRunner):
        return row
    gpu_ms = gpu_time_ms(loop)
    half = context + (WARM_UP_STEPS + TIMED_STEPS // 2) * tokens // TIMED_STEPS // batch
    items = floor_bytes(runner, batch, half)
    plain = floor_bytes(runner, batch, half, has_own_drafts=False)
    floor_ms, plain_ms = (1e3 * sum(each.values()) / rates.read_bytes for each in (items, plain))
    flops = product_flops(runner, batch)
    roof = roof_ms(items, flops, rates)
    return row | {
        "gpu_ms": round(gpu_ms, 3),
        "floor_ms": round(floor_ms, 3),
        "floor_weights_ms": round(plain_ms, 3),
        "ratio": round(step_ms / floor_ms, 3),
        "roof_ms": round(roof, 3),
        "roof_ratio": round(step_ms / roof, 3),
        "tflop": {name: round(count / 1e12, 3) for name, count in flops.items()},
        "gpu_idle_share": round(max(0.0, 1 - gpu_ms / step_ms), 4),
        "bytes": {name: round(value) for name, value in items.items()},
    }


@torch.no_grad()
def gpu_time_ms(loop: Loop) -> float:
    """Return the GPU's milliseconds per step: launches back to back, with the host ahead of the GPU."""
    spans, batch = [], len(loop.scheduler.running)
    launch(loop, batch)
    torch.cuda.synchronize()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            launch(loop, batch)
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 8)
    return statistics.median(spans)


def measure_all(
    runner: Runner, batches: list[int], context: int, rates: Rates
) -> Iterator[tuple[dict[str, Any], list[tuple[str, float]]]]:
    """Yield each row and the kernels of TRACED_STEPS steps; all batches are timed before any is traced.

    One GPU traces the requests of the largest batch: prefilling others would take longer than timing them.
    """
    rows = []
    for batch in batches:
        begin = time.perf_counter()
        loop = start_loop(runner, batch, context)
        prefill_s = time.perf_counter() - begin
        row = measure(loop, batch, context, rates)
        rows.append(row | {"context": context, "prefill_s": round(prefill_s, 1)})
        if batch != batches[-1]:
            end_loop(loop)
    for row in rows:
        if isinstance(runner, LeadRunner):
            end_loop(loop)
            loop = start_loop(runner, row["batch"], context)
        yield row, trace_kernels(loop, row["batch"])
    end_loop(loop)


def _depths(text: str) -> list[int]:
    """Parse a flag's numbers of drafts, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) <= 7 for part in parts):
        raise argparse.ArgumentTypeError(f"must be integers from 0 to 7, separated by commas, got {text!r}")
    return [int(part) for part in parts]


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp bench step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", required=True, choices=sorted(LAYERS))
    parser.add_argument("--mtp-step", type=_depths, default=[0, 3], help="depths, separated by commas")
    parser.add_argument(
        "--batch", type=counts, default=[1, 4, 8, 16, 32], help="requests, separated by commas"
    )
    parser.add_argument("--accept", type=float, default=2.6, help="mean new tokens per round at mtp_step 3")
    parser.add_argument("--context", type=count, default=512, help="prompt tokens, a multiple of 64")
    parser.add_argument(
        "--graph-mode",
        type=names_of(("replay", "reduce-overhead", "auto", "uncompiled")),
        default=["replay"],
        help="of replay, reduce-overhead, auto and uncompiled, separated by commas; uncompiled captures "
        "rounds as they are, which starts in seconds and takes more kernels",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--fp8",
        nargs="?",
        const="w8a8",
        choices=("w8a8", "w8a16"),
        help="block-128 FP8 weights, as an FP8 release has, and their recipe; alone: w8a8",
    )
    weights.add_argument(
        "--int4",
        type=int,
        default=0,
        nargs="?",
        const=128,
        choices=(32, 64, 128),
        metavar="GROUP",
        help="four-bit weights in groups of 32, 64 or 128 columns (alone: 128)",
    )
    weights.add_argument(
        "--codes",
        default="",
        choices=(*KINDS, "Q4_K_M"),
        help="weights in scaled codes of a kind, or in the mixture Q4_K_M; embedding and head too",
    )
    parser.add_argument("--draft-vocab", help="draft from that many lowest ids, or from those in a file")
    parser.add_argument(
        "--draft-dtype",
        default="auto",
        help="dtype of what only drafts read: auto, weights, float8_e4m3fn or int4",
    )
    parser.add_argument("--kernels", action="store_true", help="print a step's time by kernel")
    parser.add_argument("--tensor-parallel", type=count, default=1, metavar="N", help="time one GPU, then N")
    parser.add_argument("--communicator", default="auto", help="of several GPUs: auto, symmetric or nccl")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="saved rows to print next to ours")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows; return 0, 1 if a case failed, 2 for a wrong flag and too few GPUs."""
    return run_command(lambda interrupts: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(words)
    saved = read_rows(arguments.beside, SAVED_FIELDS, {"ranks": 1}) if arguments.beside else []
    needed, found = arguments.tensor_parallel, torch.cuda.device_count()
    rule, remedy = "have a CUDA device for each rank", "use another machine, or lower tensor_parallel"
    check(found >= needed, "machine", rule, f"{found} for {needed}", remedy)
    batches = sorted(arguments.batch)
    cases = [(depth, mode) for depth in arguments.mtp_step for mode in arguments.graph_mode]
    if len(cases) == 1:
        run(arguments, batches, *cases[0], saved)
        return 0
    for depth, mode in cases:
        # Each case has its own process: one that was traced would slow down the next.
        given = [*words, "--mtp-step", str(depth), "--graph-mode", mode]
        if subprocess.run([sys.executable, "-c", _CODE, *given]).returncode:
            return 1
    return 0


def config_of(
    arguments: argparse.Namespace, batches: list[int], mtp_step: int, mode: str, ranks: int
) -> EngineConfig:
    """Return the config for one depth, graph mode and number of GPUs."""
    # A short chunk starts fastest, but the first requests gain tokens while the others are prefilled, and
    # every chunk of a long context reads every weight.
    is_long = arguments.context > 4096 or max(batches) > 32
    prefill_chunk = 2048 if is_long else 512 if mode == "uncompiled" else 64
    # The tokens that the first request gains in the rounds between the others' launches.
    gained = count_launches(max(batches), arguments.context, prefill_chunk) * (mtp_step + 1)
    return EngineConfig(
        model=Path(__file__),
        device="cuda",
        dtype="bfloat16",
        weight_recipe=arguments.fp8 or "auto",
        mtp_step=mtp_step,
        max_batch=max(batches),
        batch_sizes=tuple(batches),
        max_model_len=arguments.context + 2048 + gained,
        prefill_chunk=prefill_chunk,
        compile="off" if mode == "uncompiled" else "on",
        graph_mode="auto" if mode == "uncompiled" else mode,
        # The rate of one draft is a property of the model: the same at every depth.
        synthetic_acceptance=rate_for(arguments.accept, 3),
        draft_vocab=arguments.draft_vocab,
        draft_dtype=arguments.draft_dtype,
        # No prompt comes twice: the cache's memory is better used for blocks.
        prefix_cache=False,
        tensor_parallel=ranks,
        communicator=arguments.communicator if ranks > 1 else "auto",
    )


def run(
    arguments: argparse.Namespace, batches: list[int], mtp_step: int, mode: str, saved: list[Row]
) -> None:
    """Time one depth and graph mode on one GPU, and on several."""
    rates = measure_rates()
    read, *products = (rate / 1e12 for rate in rates)
    how_fast = "reads {:.2f} TB/s, multiplies {:.0f} TFLOP/s in bfloat16 and {:.0f} in FP8"
    print(f"{arguments.shape}: {how_fast.format(read, *products)}", flush=True)
    of_one: dict[int, float] = {}
    for ranks in dict.fromkeys((1, arguments.tensor_parallel)):
        for row in time_ranks(arguments, batches, mtp_step, mode, ranks, rates):
            first = of_one.setdefault(row["batch"], row["step_ms"])
            if arguments.tensor_parallel > 1:
                row["of_one"] = round(row["step_ms"] / first, 3)
            print_row(row, saved)
        gc.collect()
        torch.cuda.empty_cache()


def time_ranks(
    arguments: argparse.Namespace, batches: list[int], mtp_step: int, mode: str, ranks: int, rates: Rates
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `ranks` GPUs."""
    begin, loaded = time.perf_counter(), list[float]()

    def fill(parameters: Mapping[str, torch.Tensor]) -> None:
        fill_random(parameters)
        torch.cuda.synchronize()
        loaded.append(time.perf_counter())

    model = model_config(arguments.shape, arguments.fp8 is not None, arguments.int4, arguments.codes)
    while True:
        config = config_of(arguments, batches, mtp_step, mode, ranks)
        spec = resolve(config, model, model.vocab_size, is_checkpoint=False)
        try:
            runner = Runner(spec, None, fill) if ranks == 1 else LeadRunner(spec, None, fill_random)
            check_blocks(runner, batches[-1], arguments.context)
            break
        except (ValueError, torch.OutOfMemoryError) as error:
            if len(batches) == 1:
                raise
            print(f"B={batches[-1]}: no row, it does not fit: {error}", flush=True)
            batches = batches[:-1]
        # The error's frames hold the weights until the clause ends.
        gc.collect()
        torch.cuda.empty_cache()
    startup_s = time.perf_counter() - (loaded or [begin])[0]
    check_rows(runner, batches)
    fixed = {
        "engine": f"compiled-mtp {__version__}",
        "device": torch.cuda.get_device_name(),
        "shape": arguments.shape,
        "weights": arguments.codes
        or (f"int4 g{arguments.int4}" if arguments.int4 else "fp8" if arguments.fp8 else "bf16"),
        "recipe": arguments.fp8 or "bf16",
        "draft_dtype": spec.drafts.dtype,
        "ranks": ranks,
        "mtp_step": mtp_step,
        "graph_mode": str(runner.programs.graph_mode) if mode == "auto" else mode,
        "startup_s": round(startup_s, 1),
        "buckets": len(runner.programs.buckets),
        "bandwidth_tb_s": round(rates.read_bytes / 1e12, 3),
        "products_tflop_s": [round(rate / 1e12, 1) for rate in (rates.bf16_flops, rates.fp8_flops)],
    }
    for row, kernels in measure_all(runner, batches, arguments.context, rates):
        if arguments.kernels:
            print_kernels(kernels)
        own = {"kernels": round(len(kernels) / TRACED_STEPS), "communicator_ms": communicator_ms(kernels)}
        yield fixed | row | own | {"total_s": round(time.perf_counter() - begin, 1)}
    runner.close()


def print_row(row: Row, saved: Sequence[Row]) -> None:
    """Print a row as text, the saved rows of its case, and both as JSON."""
    floor = "floor {floor_ms:.3f} ({floor_weights_ms:.3f} with drafts in the weights' dtype)  "
    floor += "ratio {ratio:.2f}  roof {roof_ms:.3f}, ratio {roof_ratio:.2f}  "
    floor += "gpu {gpu_ms:.3f}  idle {gpu_idle_share:.1%}"
    ranks = "GPUs {ranks}  communicator {communicator_ms:.3f}"
    print(
        "S={mtp_step} {graph_mode:15} B={batch:<3} step {step_ms:7.3f} ms  "
        "host {host_us:5.1f} us ({host_min_us:.0f} to {host_max_us:.0f})  kernels {kernels}  "
        "{tokens_per_s:.0f} tok/s  start {startup_s:.0f} s  ".format(**row)
        + (floor if "floor_ms" in row else ranks).format(**row)
    )
    beside = rows_beside(saved, row, CASE_FIELDS, "step_ms")
    if beside:
        print(f"  beside: {describe_beside(beside, row['step_ms'], 'ms', 3)}")
    print(json.dumps({**row, "beside": beside}), flush=True)
