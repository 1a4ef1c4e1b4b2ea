"""How long an engine takes to start, and how much of it compiles kernels and captures graphs.

    python tools/bench_engine.py start --shape 27b --fp8 --max-batch 256 --graph-mode uncompiled
    python tools/bench_engine.py start --shape 4b --max-batch 64 --empty-cache    # every kernel is compiled
    python tools/bench_engine.py start --device cpu --compile off --max-batch 4   # the checkpoint that ships

Kernels stay in the process that loaded them, so a run starts one engine. compiled: how many kernels Triton
compiled, and their seconds summed over threads; found: how many its cache held. captures_s: the seconds in
which CUDA graphs were captured. slowest: the seconds of the kernels that took longest. first_request_s shows
whether the start left anything to compile.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from typing import Any

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

_SLOWEST = 8


class Kernels:
    """Counts what Triton compiles, by the kernel's name, and what its cache held."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.stages: collections.Counter[str] = collections.Counter()
        self.compiled = self.found = 0

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count one kernel; Triton calls this."""
        if cache_hit:
            self.found += 1
            return
        self.compiled += 1
        self.seconds[src.name] += times.total / 1e6
        for name, microseconds in times.lowering_stages:
            self.stages[name] += microseconds / 1e6

    def row(self) -> dict[str, Any]:
        """Return the counts, and the seconds of all kernels, of each stage and of the slowest kernels."""
        return {
            "compiled": [self.compiled, round(sum(self.seconds.values()), 2)],
            "found": self.found,
            "stages_s": {name: round(seconds, 2) for name, seconds in self.stages.items()},
            "slowest": {name: round(seconds, 2) for name, seconds in self.seconds.most_common(_SLOWEST)},
        }


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser, may_be_auto=True)
    parser.set_defaults(mtp_step="auto")
    parser.add_argument("--max-batch", type=count, default=64)
    parser.add_argument("--max-model-len", type=count, default=1024)
    parser.add_argument("--empty-cache", action="store_true", help="begin with an empty Triton cache")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Start one engine; compare the tokens of two requests that run together with those of each alone."""
    kernels = Kernels()
    has_gpu = flags.device != "cpu" and torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        if has_gpu:
            import triton

            triton.knobs.compilation.listener = kernels
            if flags.empty_cache:
                triton.knobs.cache.dir = folder
            # torch's own start is not the engine's.
            torch.cuda.synchronize()
        marks = [time.perf_counter()]
        shapes_s = list[float]()

        def progress(what: str, done: int, total: int) -> None:
            if what == "compiled shapes":
                shapes_s.append(time.perf_counter())

        block_size = EngineConfig().block_size
        engine = common.open_engine(
            flags,
            kind=Engine,
            progress=progress,
            max_batch=flags.max_batch,
            max_model_len=flags.max_model_len,
            # As many as all requests need: engines may start side by side on one GPU.
            num_blocks=flags.max_batch * (flags.max_model_len // block_size + 2) + 1,
            prefix_cache=False,
        )
        marks.append(time.perf_counter())
        row = kernels.row() if has_gpu else {}
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
        prompts = [[5, 6, 7] * 20, [9, 8] * 3]
        alone = [engine.generate([prompts[0]], params)[0].new_token_ids]
        marks.append(time.perf_counter())
        alone.append(engine.generate([prompts[1]], params)[0].new_token_ids)
        together = [output.new_token_ids for output in engine.generate(prompts, params)]
        assert together == alone, "tokens depend on the batch"
        programs = engine.runner.programs
        found = {
            "device": common.device_name(engine),
            "shape": flags.shape or flags.model.name,
            "weights": "fp8" if flags.fp8 else "bf16",
            "mtp_step": flags.mtp_step,
            "max_batch": flags.max_batch,
            "start_s": round(marks[1] - marks[0], 2),
            # Weights, caches, and the first run of every shape that is captured uncompiled.
            "before_captures_s": round(shapes_s[0] - marks[0], 2) if shapes_s else None,
            "programs": len(shapes_s),
            "captures_s": round(programs.maker.capture_s, 2),
            "first_request_s": round(marks[2] - marks[1], 2),
        }
        engine.close()
    return found | row
