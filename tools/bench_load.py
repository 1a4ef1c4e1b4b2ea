"""Time the start of an engine on a checkpoint of a released shape, against reading the checkpoint's bytes.

    python tools/bench_load.py --shape 27b --format int4,q4_k_m --directory /tmp/load --graph-mode off --cold
    python tools/bench_load.py --shape 27b --directory /tmp/load --gib 24 --starts 1 --decode 1,8

Writes the checkpoint with random weights (tools/synthetic_checkpoint.py), so that its files lie in the page
cache, reads them with large reads, then starts an engine and generates. Prints a line of JSON for each
format: seconds of reading, of each part of the start and of the whole; the peaks of the host memory that a
start takes, without mapped files, and of the device memory; slots and tokens of the memory plan. --cold does
the same from the disk. --gib limits the process to a part of the GPU, and adds what `compiled-mtp inspect`
predicts for it. --decode adds the speed of so many requests at once, and of one that fills the caches.
--profile FOLDER also writes the figures of cProfile there.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import synthetic_checkpoint
import torch

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp import engine as engine_module
from compiled_mtp.benchmarks.released_shapes import LAYERS
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.ops.device import GPU, assume
from compiled_mtp.runner import assemble
from compiled_mtp.runner.forecast import forecast
from compiled_mtp.runner.host_memory import available_bytes
from compiled_mtp.runner.memory_plan import MemoryPlan
from compiled_mtp.runner.spec import resolve
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser, counts, names_of

_READ_BYTES = 64 << 20
# Tokens of the prompts of --decode, and of each output.
_PROMPT, _OUTPUT = 200, 128


def forget(path: Path) -> None:
    """Ask the system to drop the files of a checkpoint from its page cache."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(path: Path) -> tuple[int, float]:
    """Read all files of a checkpoint; return their bytes and the seconds that it took."""
    buffer, count, begun = memoryview(bytearray(_READ_BYTES)), 0, time.perf_counter()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb", buffering=0) as stream:
            while done := stream.readinto(buffer):
                count += done
    return count, time.perf_counter() - begun


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Record the seconds that each part of a start takes."""
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            result = call(*args, **keywords)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
            return result

        return run

    places = (
        (engine_module, "open_frontend", "frontend"),
        (engine_module, "resolve", "spec"),
        (assemble, "check_weights", "check"),
        (assemble, "load_weights", "load"),
        (assemble, "_make_step", "caches"),
        (assemble, "_make_moves", "moves"),
        (assemble, "_make_programs", "programs"),
    )
    before = [getattr(module, name) for module, name, _ in places]
    for (module, name, title), call in zip(places, before, strict=True):
        setattr(module, name, timed(title, call))
    try:
        yield seconds
    finally:
        for (module, name, _), call in zip(places, before, strict=True):
            setattr(module, name, call)


class HostPeak:
    """The peak of the process's own memory, without mapped files, while it is entered; in bytes."""

    def __enter__(self) -> HostPeak:
        self.before, self.most, self._ends = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.02):
            self.most = max(self.most, self._now() - self.before)

    def _now(self) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(status[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def foretell(config: EngineConfig, gib: float) -> dict[str, int]:
    """The caches that `compiled-mtp inspect --memory-gib` predicts for a checkpoint on this GPU."""
    model = read_model_config(config.model, max_pixels=config.vision_pixels)
    with assume(GPU(torch.cuda.get_device_capability(), int(gib * 2**30))):
        spec = resolve(config.settle(model, config.model), model, model.vocab_size)
        memory = forecast(spec, free_bytes=int(gib * 2**30), host_bytes=available_bytes())
    return sizes_of(memory, config.block_size)


def sizes_of(memory: MemoryPlan, block_size: int) -> dict[str, int]:
    """Slots, tokens of all requests together, and tokens of one."""
    tokens = (memory.num_blocks - 1) * block_size
    return {"slots": memory.max_batch, "tokens": tokens, "longest": memory.max_model_len}


def decode(engine: Engine, batch: int, prompt_tokens: int, max_tokens: int) -> dict[str, float]:
    """Decode requests of random prompts at once; return the speed from the last first token on.

    "tokens_per_s" is that of all requests, "round_ms" the time of a step, "first_token_s" the last request's.
    """
    draw = random.Random(prompt_tokens)
    size = engine.model_config.vocab_size
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=1, ignore_eos=True)
    for _ in range(batch):
        prompt = [draw.randrange(size) for _ in range(prompt_tokens)]
        engine.add_request(prompt_token_ids=prompt, params=params)
    begun, begins, counts = time.perf_counter(), dict[str, float](), list[tuple[float, int]]()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            begins.setdefault(output.request_id, now)
        counts.append((now, sum(len(output.new_token_ids) for output in outputs)))
    first, end = max(begins.values()), counts[-1][0]
    steps = [count for at, count in counts if at > first]
    return {
        "first_token_s": round(first - begun, 3),
        "tokens_per_s": round(sum(steps) / (end - first), 1),
        "round_ms": round(1e3 * (end - first) / len(steps), 2),
    }


def decode_all(engine: Engine, batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Decode every number of requests, then one that fills the caches."""
    memory = engine.runner.memory
    rows = {}
    for batch in batches:
        # The first time only warms up.
        decode(engine, batch, _PROMPT, 16)
        rows[str(batch)] = decode(engine, batch, _PROMPT, _OUTPUT)
    most = min(memory.max_model_len, (memory.num_blocks - 1) * engine.config.block_size)
    # A round reserves the blocks of its drafts too.
    prompt = most - 64 - 2 * engine.config.block_size
    rows["longest"] = {"prompt_tokens": prompt, **decode(engine, 1, prompt, 64)}
    return rows


def measure(form: str, flags: argparse.Namespace) -> dict[str, Any]:
    path, written = synthetic_checkpoint.path_of(flags.directory, flags.shape, form), 0.0
    if not path.exists():
        begun = time.perf_counter()
        synthetic_checkpoint.write(flags.directory, flags.shape, form, flags.layers)
        written = time.perf_counter() - begun
    size, reading = read_all(path)
    config = EngineConfig(
        model=path,
        device=flags.device,
        compile="off",
        graph_mode=flags.graph_mode,
        draft_dtype=flags.draft_dtype,
        mtp_step=flags.mtp_step,
    )
    row: dict[str, Any] = {"format": form, "gb": round(size / 1e9, 2), "written_s": round(written, 1)}
    row["reading_s"] = round(reading, 2)
    has_gpu = flags.device != "cpu" and torch.cuda.is_available()
    if flags.gib:
        row["foretold"] = foretell(config, flags.gib)
    profile = cProfile.Profile()
    turns = [*(str(number) for number in range(1, flags.starts + 1)), *(["cold"] if flags.cold else [])]
    for turn in turns:
        if turn == "cold":
            forget(path)
            row["reading_cold_s"] = round(read_all(path)[1], 2)
            forget(path)
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        with HostPeak() as peak, phases() as seconds:
            begun = time.perf_counter()
            if flags.profile is not None:
                profile.enable()
            engine = Engine(config)
            profile.disable()
            seconds["start"] = time.perf_counter() - begun
        row[f"start_{turn}"] = {name: round(value, 2) for name, value in seconds.items()}
        row["host_peak_mib"] = max(row.get("host_peak_mib", 0), peak.most >> 20)
        row["found"] = sizes_of(engine.runner.memory, config.block_size)
        # What follows may be cut by a time limit.
        print(json.dumps(row), file=sys.stderr, flush=True)
        output = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        row["tokens_made"] = len(output[0].new_token_ids)
        if flags.decode and turn == turns[0]:
            row["decode"] = decode_all(engine, flags.decode)
        if has_gpu:
            row["device_peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        engine.close()
        del engine
        gc.collect()
        if has_gpu:
            torch.cuda.empty_cache()
    if flags.profile is not None:
        flags.profile.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(flags.profile / f"{flags.shape}-{form}.pstats")
    if not flags.keep:
        (path.unlink if path.is_file() else functools.partial(shutil.rmtree, path))()
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    forms = synthetic_checkpoint.FORMATS
    parser.add_argument("--shape", default="27b", choices=sorted(LAYERS))
    parser.add_argument("--format", type=names_of(forms), default=["int4"], help=f"some of {','.join(forms)}")
    parser.add_argument("--layers", type=int, default=0, help="0 for the shape's own")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graph-mode", default="auto", help="off for a start without CUDA graphs")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--gib", type=float, default=0.0, help="limit the process to this much of the GPU")
    parser.add_argument("--starts", type=int, default=2, help="starts while the files are in the page cache")
    parser.add_argument("--cold", action="store_true", help="then read and start once more from the disk")
    parser.add_argument("--decode", type=counts, default=[], help="requests, separated by commas")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the files for the next call")
    flags = parser.parse_args(argv)
    if flags.gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(flags.gib * 2**30 / total)
    for form in flags.format:
        print(json.dumps(measure(form, flags)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
