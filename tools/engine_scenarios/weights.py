"""How long new weights, sleep and wake-up take, and the device memory that they take and give back.

    python tools/bench_engine.py weights --model Qwen/Qwen3.5-27B
    python tools/bench_engine.py weights --device cpu --compile off --repeats 1  # the checkpoint that ships

The weights come from the checkpoint's own files, read once before, so that figures are those of a warm page
cache. After every update and every wake-up the engine must give the tokens that it gave before; otherwise
nothing is printed. "update_peak_mib" is what an update takes beyond what the engine holds. Memory of sleep is
the driver's: "held_gib" of an engine that works, "asleep_gib" of one that sleeps, both beyond what the device
had in use before the engine. Memory is null on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

PROMPTS = [[index, 5, 6] * length for index, length in ((3, 1), (4, 40))]


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument("--repeats", type=count, default=3, help="updates, and sleeps, that are timed")
    parser.add_argument("--max-batch", type=count, default=8)
    parser.add_argument("--max-model-len", type=count, default=4096)


def used_bytes(device: torch.device) -> int:
    """Bytes of the device that the driver has given out; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Time updates, then sleeps and wake-ups."""
    assert flags.shape is None, "weights need --model: a shape has no files to read"
    has_gpu = flags.device != "cpu" and torch.cuda.is_available()
    before = used_bytes(torch.device("cuda")) if has_gpu else 0
    begin = time.perf_counter()
    engine = common.open_engine(
        flags, kind=Engine, max_batch=flags.max_batch, max_model_len=flags.max_model_len
    )
    start_s = time.perf_counter() - begin
    device = engine.runner.spec.device
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)

    def tokens() -> list[list[int]]:
        return [output.new_token_ids for output in engine.generate(PROMPTS, params)]

    expected = tokens()
    updates, peaks = [], []
    for _ in range(flags.repeats):
        if has_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        engine.update_weights(engine.config.model)
        if has_gpu:
            torch.cuda.synchronize(device)
            peaks.append(torch.cuda.max_memory_allocated(device) - held)
        updates.append(time.perf_counter() - begin)
        assert tokens() == expected, "tokens differ after an update by the same weights"
    sleeps, wakes, awake, asleep = [], [], [], []
    for _ in range(flags.repeats):
        awake.append(used_bytes(device) - before)
        begin = time.perf_counter()
        engine.sleep()
        sleeps.append(time.perf_counter() - begin)
        asleep.append(used_bytes(device) - before)
        begin = time.perf_counter()
        engine.wake_up()
        wakes.append(time.perf_counter() - begin)
        assert tokens() == expected, "tokens differ after a wake-up"
    weights = sum(parameter.nbytes for parameter in engine.runner.step.parameters())
    line = {
        "model": engine.config.model.name,
        "device": common.device_name(engine),
        "graph_mode": engine.runner.programs.graph_mode,
        "is_compiled": engine.is_compiled,
        "weights_gib": _gib(weights),
        "start_s": round(start_s, 2),
        "update_s": _seconds(updates),
        "update_peak_mib": max(peaks) >> 20 if peaks else None,
        "sleep_s": _seconds(sleeps),
        "wake_up_s": _seconds(wakes),
        "held_gib": _gib(max(awake)) if has_gpu else None,
        "asleep_gib": _gib(max(asleep)) if has_gpu else None,
        "repeats": flags.repeats,
    }
    engine.close()
    return line


def _gib(count: int) -> float:
    return round(count / 2**30, 2)


def _seconds(times: list[float]) -> float:
    return round(statistics.median(times), 2)
