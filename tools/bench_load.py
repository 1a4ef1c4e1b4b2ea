"""Time the start of an engine on a checkpoint of a released shape, against reading the checkpoint's bytes.

    python tools/bench_load.py --shape 27b --format int4,q4_k_m --directory /tmp/load

Writes the checkpoint with random weights (tools/synthetic_checkpoint.py), so that its files lie in the page
cache, reads them once with large reads, then starts an engine and generates. Prints a line of JSON for each
format: seconds of reading, of each part of the start and of the whole; the peak of the host memory that the
start takes, without mapped files; slots and tokens of the memory plan. --profile FOLDER also writes the
figures of cProfile there.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
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
from compiled_mtp.runner import assemble

_READ_BYTES = 64 << 20


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


def measure(form: str, flags: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    path = synthetic_checkpoint.write(flags.directory, flags.shape, form, flags.layers)
    written = time.perf_counter() - begun
    size, reading = read_all(path)
    settings: dict[str, Any] = {"device": flags.device, "compile": "off", "graph_mode": flags.graph_mode}
    settings["draft_dtype"] = flags.draft_dtype
    row: dict[str, Any] = {"format": form, "gb": round(size / 1e9, 2), "written_s": round(written, 1)}
    row["reading_s"] = round(min(reading, read_all(path)[1]), 2)
    if flags.cold:
        forget(path)
        row["reading_cold_s"] = round(read_all(path)[1], 2)
    profile = cProfile.Profile()
    for turn in ("first", "second", "third")[: flags.starts]:
        if flags.cold and turn == "third":
            forget(path)
        with HostPeak() as peak, phases() as seconds:
            begun = time.perf_counter()
            if flags.profile is not None:
                profile.enable()
            engine = Engine(EngineConfig(model=path, **settings))
            profile.disable()
            seconds["start"] = time.perf_counter() - begun
        row[turn] = {name: round(value, 2) for name, value in seconds.items()}
        row["host_peak_mib"] = max(row.get("host_peak_mib", 0), peak.most >> 20)
        memory = engine.runner.memory
        row |= {"slots": memory.max_batch, "tokens": (memory.num_blocks - 1) * engine.config.block_size}
        output = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        row["tokens_made"] = len(output[0].new_token_ids)
        engine.close()
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if flags.profile is not None:
        flags.profile.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(flags.profile / f"{flags.shape}-{form}.pstats")
    if not flags.keep:
        (path.unlink if path.is_file() else functools.partial(shutil.rmtree, path))()
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="27b")
    parser.add_argument("--format", default="int4", help=f"some of {','.join(synthetic_checkpoint.FORMATS)}")
    parser.add_argument("--layers", type=int, default=0, help="0 for the shape's own")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graph-mode", default="auto", help="off for a start without CUDA graphs")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--gib", type=float, default=0.0, help="limit the process to this much of the GPU")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="read, and start a third time, from a cold cache")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the files")
    flags = parser.parse_args(argv)
    if flags.gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(flags.gib * 2**30 / total)
    for form in flags.format.split(","):
        print(json.dumps(measure(form, flags)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
