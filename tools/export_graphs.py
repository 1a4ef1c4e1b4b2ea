"""Compile every shape of an engine and write one file: `graph_cache=FILE` then starts without compiling.

    python tools/export_graphs.py --model PATH --out FILE --mtp-step 3 --max-batch 8

With --mtp-step auto every depth of --mtp-depths is in the file; an engine starts with one and loads the
others beside its first steps.
Takes the fields of EngineConfig as flags, but for compile and graph_cache; the engine that loads the file
must be given the same values.
--graph-mode is "replay" unless given: of "reduce-overhead" only the generated code can be saved, and every
start traces the model again.
Prints one JSON line: the file, its bytes, the number of shapes and the seconds it took. Exits with
2 for what cannot be done and with 130 for Ctrl-C, after a line that says so; --out is written whole or not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, save, use_directory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    for name, field in EngineConfig.model_fields.items():
        if name not in ("compile", "graph_cache"):
            flag = "--" + name.replace("_", "-")
            # A percent sign in a description would be a format of argparse's.
            parser.add_argument(
                flag, default=argparse.SUPPRESS, help=(field.description or "").replace("%", "%%")
            )
    given = vars(parser.parse_args())
    out: Path = given.pop("out")
    begin = time.perf_counter()
    try:
        check_writable(out)
        size, shapes = export(given, out)
    except (ValueError, OSError) as error:
        parser.exit(2, f"export_graphs: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "export_graphs: interrupted\n")
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"file": str(out), "bytes": size, "shapes": shapes, "seconds": seconds}))


def check_writable(out: Path) -> None:
    """Raise ValueError unless `out` can be written; its directory is created. Compiling takes minutes."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent).cleanup()
        if out.is_dir():
            raise IsADirectoryError("it is a directory")
    except OSError as error:
        raise ValueError(
            f"--out must be a file that can be written, got {out}: {error}; name another"
        ) from None


def export(given: dict[str, str], out: Path) -> tuple[int, int]:
    """Compile for the fields of EngineConfig in `given`; returns the bytes of `out` and how many shapes."""
    with ExitStack() as stack:
        # After Ctrl-C a compiler may still write to what is being removed; that must not become the error.
        enclosing = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        directory, scratch = enclosing / "made", enclosing / "scratch"
        directory.mkdir()
        scratch.mkdir()
        bars: dict[str, tqdm[None]] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = stack.enter_context(tqdm(total=total, desc=what, file=sys.stderr))
            bars[what].update(done - bars[what].n)

        use_directory(directory)
        # A compiler that is killed leaves its own temporary files.
        os.environ["TMPDIR"] = str(scratch)
        # Not the cache that the environment may name either: nothing would be compiled.
        config = EngineConfig(**given, compile="on", graph_cache=None)
        if config.graph_mode == "auto":
            config = config.model_copy(update={"graph_mode": "replay"})
        engine = Engine(config, progress=report)
        engine.runner.programs.save(directory / PROGRAMS_NAME)
        size = save(out, directory, engine.runner.cache_key)
        engine.close()
        return size, engine.runner.programs.count


if __name__ == "__main__":
    main()
