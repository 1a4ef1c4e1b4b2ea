"""What a GPU reads and multiplies per second, and the time of calls on it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

REPLAYS = 21
READ_BYTES = 4 << 30
# Rows, columns and sums of the largest products: no released weight is larger in two of them.
PRODUCT_SIZE = 8192


class Rates(NamedTuple):
    """What a GPU does per second: bytes that it reads, operations of products in bfloat16 and in FP8.

    An operation is a product or a sum of two numbers. A GPU without FP8 products has the rate of bfloat16.
    """

    read_bytes: float
    bf16_flops: float
    fp8_flops: float


@triton.jit
def read_kernel(source, sums, BLOCK: tl.constexpr, REPEAT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * (BLOCK * REPEAT) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(REPEAT):
        total += tl.load(source + at + step * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def time_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return microseconds per call: the median over replays of one graph that holds all of `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Return the bytes per second of a kernel that only reads."""
    source = torch.ones(READ_BYTES // 4, dtype=torch.int32, device="cuda")
    block, repeat = 2048, 8
    programs = source.numel() // (block * repeat)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    read = read_kernel[(programs,)]
    best = min(
        time_us([functools.partial(read, source, sums, BLOCK=block, REPEAT=repeat, num_warps=warps)])
        for warps in (4, 8)
    )
    return READ_BYTES / (best * 1e-6)


def product_rates() -> tuple[float, float]:
    """Return the operations per second of torch's products of random numbers, in bfloat16 and in FP8."""
    size = PRODUCT_SIZE
    x, y = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    bf16 = time_us([functools.partial(torch.mm, x, y.t())] * 8)
    fp8 = bf16
    if torch.cuda.get_device_capability() >= (8, 9):
        x, y = (each.to(torch.float8_e4m3fn) for each in (x, y))
        one = torch.ones((), device="cuda")
        multiply = functools.partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16)
        fp8 = time_us([multiply] * 8)
    return 2e6 * size**3 / bf16, 2e6 * size**3 / fp8


def measure_rates() -> Rates:
    """Measure this GPU; takes some seconds and gives its memory back."""
    rates = Rates(read_bandwidth(), *product_rates())
    torch.cuda.empty_cache()
    return rates
