"""Time the whole step of several GPUs beside that of one, in the same run, and what their exchange takes.

    python tools/bench_ranks.py --shape 27b --ranks 2 --batch 1,32

As bench_step.py: dummy weights, synthetic acceptance, the real engine loop, steps captured whole. One JSON
line a batch and number of ranks: milliseconds a step (median and 90th percentile), its ratio to one GPU's,
host microseconds a step, tokens a second, and on the first GPU the milliseconds of a step in the exchange's
kernels, waiting for peers included, and how many they are. A kernel that is launched early begins while the
one before runs, and then waits for it: what counts here is the time behind the end of the last kernel before.
With --kernels a table says so of every kernel. Ends with an AssertionError, and without rows, where rows of
rank 0's products depend on the batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_step import (
    LAYERS,
    Loop,
    check_rows,
    end_loop,
    fill_random,
    model_of,
    own_spans,
    print_kernels,
    rate_for,
    start_loop,
    time_steps,
)

from compiled_mtp.config import EngineConfig
from compiled_mtp.parallel.leader import LeadRunner
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve

TRACED_STEPS = 4
EXCHANGES = ("gather_kernel", "sum_kernel")


def engine_config(arguments: argparse.Namespace, world: int) -> EngineConfig:
    batches = arguments.batch
    return EngineConfig(
        model=Path(__file__),
        device="cuda",
        dtype="bfloat16",
        weight_recipe=arguments.fp8 or "auto",
        mtp_step=arguments.mtp_step,
        max_batch=max(batches),
        batch_sizes=tuple(batches),
        max_model_len=arguments.context + 2048 + 64 * max(batches),
        # As bench_step.py up to 4,096 tokens of context.
        prefill_chunk=512 if arguments.uncompiled else 64,
        compile="off" if arguments.uncompiled else "on",
        graph_mode="replay",
        synthetic_acceptance=rate_for(arguments.accept, 3) if arguments.mtp_step else None,
        prefix_cache=False,
        tensor_parallel=world,
        exchange=arguments.exchange if world > 1 else "auto",
    )


def make_runner(arguments: argparse.Namespace, world: int) -> Runner:
    config, model = engine_config(arguments, world), model_of(arguments)
    make = Runner if world == 1 else LeadRunner
    return make(resolve(config, model, model.vocab_size, is_checkpoint=False), None, fill_random)


def measure(loop: Loop, batch: int) -> dict[str, Any]:
    """One row, but for the exchange. The other ranks do what the loop does, and no plan may come between."""
    times, host_times, tokens, total = time_steps(loop)
    return {
        "batch": batch,
        "step_ms": round(1e3 * statistics.median(times), 3),
        "p90_ms": round(1e3 * statistics.quantiles(times, n=10)[-1], 3),
        "host_us": round(statistics.median(host_times), 1),
        "tokens_per_s": round(tokens / total, 1),
    }


def measure_all(
    runner: Runner, batches: list[int], context: int, has_table: bool
) -> Iterator[dict[str, Any]]:
    """The rows. A profiler that was once attached makes every later launch cost the host more: all are timed
    before one is. Raises AssertionError where the bits of this rank's rows depend on how many they are."""
    check_rows(runner, batches)
    rows = []
    for batch in batches:
        loop = start_loop(runner, batch, context)
        rows.append(measure(loop, batch))
        if batch != batches[-1]:
            end_loop(loop)
    for row in reversed(rows):
        if row is not rows[-1]:
            loop = start_loop(runner, row["batch"], context)
        yield row | exchange_share(loop, has_table)
        end_loop(loop)


def exchange_share(loop: Loop, has_table: bool = False) -> dict[str, Any]:
    """Of a step on this GPU: milliseconds in the exchange's kernels, and their number. has_table: print where
    all of its time goes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED_STEPS):
            loop.step()
        torch.cuda.synchronize()
    kernels = own_spans(trace.events())
    if has_table:
        print_kernels(kernels, TRACED_STEPS)
    # torch has a kernel whose name ends as one of ours.
    spans = [span for name, span in kernels if name in EXCHANGES or name.startswith("nccl")]
    return {
        "exchange_ms": round(sum(spans) / TRACED_STEPS / 1e3, 3),
        "exchanges": round(len(spans) / TRACED_STEPS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, choices=sorted(LAYERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--batch", default="1,32", help="requests, separated by commas")
    parser.add_argument("--accept", type=float, default=2.6, help="mean new tokens a round at mtp_step 3")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens, a multiple of 64")
    parser.add_argument("--exchange", default="auto", help="auto, symmetric or nccl")
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="w8a8",
        choices=("w8a8", "w8a16"),
        help="block-128 FP8 weights, as an FP8 release has, and their recipe; alone: w8a8",
    )
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--kernels", action="store_true", help="print where a step's time goes, by kernel")
    parser.add_argument(
        "--uncompiled", action="store_true", help="capture steps as they are, which starts in seconds"
    )
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        parser.exit(2, f"bench_ranks needs {arguments.ranks} GPUs; torch finds {torch.cuda.device_count()}\n")
    arguments.batch = sorted(int(batch) for batch in arguments.batch.split(","))
    # Where ranks find what fills their weights.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    alone: dict[int, float] = {}
    for world in (1, arguments.ranks):
        runner = make_runner(arguments, world)
        for row in measure_all(runner, arguments.batch, arguments.context, arguments.kernels):
            of_one = alone.setdefault(row["batch"], row["step_ms"])
            row = {"shape": arguments.shape, "ranks": world, "mtp_step": arguments.mtp_step} | row
            print(json.dumps(row | {"of_one": round(row["step_ms"] / of_one, 3)}), flush=True)
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
