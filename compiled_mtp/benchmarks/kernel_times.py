"""The kernels of a step, and the time of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from compiled_mtp.benchmarks.step_loop import Loop, launch
from compiled_mtp.parallel.leader import LeadRunner

TRACED_STEPS = 4

COMMUNICATOR_KERNELS = ("gather_kernel", "sum_kernel")


@torch.no_grad()
def trace_kernels(loop: Loop, batch: int) -> list[tuple[str, float]]:
    """Return `own_spans` of TRACED_STEPS steps of `batch` of the loop's requests.

    One GPU runs rounds of the first `batch` requests, which may have gained some tokens while the others were
    prefilled. Several GPUs run the engine's steps, which reach every rank. Time nothing after this: once a
    profiler was attached, every launch costs the host more.
    """
    from torch.profiler import ProfilerActivity, profile

    step = loop.step if isinstance(loop.runner, LeadRunner) else partial(launch, loop, batch)
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED_STEPS):
            step()
        torch.cuda.synchronize()
    return own_spans(trace.events())


def own_spans(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Return (name, microseconds since the kernel before ended), in the order in which kernels end.

    Dependent launches overlap, so a kernel's own span would count the time in which it only waits.
    """
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.end, event.time_range.start, event.name) for event in on_device)
    last = spans[0][1]
    result = []
    for end, _, name in spans:
        result.append((name, end - last))
        last = end
    return result


def communicator_ms(kernels: Sequence[tuple[str, float]]) -> float:
    """Return the milliseconds per step in the communicator's kernels."""
    # Whole names: torch has a kernel whose name ends like one of ours.
    spans = [us for name, us in kernels if name in COMMUNICATOR_KERNELS or name.startswith("nccl")]
    return round(sum(spans) / TRACED_STEPS / 1e3, 3)


def print_kernels(kernels: Sequence[tuple[str, float]]) -> None:
    """Print a step's time by kernel, as the mean of TRACED_STEPS steps."""
    by_name: dict[str, list[float]] = {}
    for name, span in kernels:
        by_name.setdefault(name, []).append(span)
    print("  kernels    us per step   us each  name")
    for name, spans in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        count, total = len(spans) / TRACED_STEPS, sum(spans) / TRACED_STEPS
        print(f"  {count:7.0f} {total:12.1f} {statistics.median(spans):9.2f}  {name[:90]}")
