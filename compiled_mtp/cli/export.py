"""`compiled-mtp export`: compile every shape of an engine into one file; an engine with `graph_cache=FILE`
starts without compiling.

    compiled-mtp export --model PATH --output FILE --mtp-step 3 --max-batch 8

Takes the fields of EngineConfig as flags, except compile and graph_cache; the engine that loads the file
needs the same values. --graph-mode is "replay" unless given: with "reduce-overhead" the file holds only
generated code, and every start traces the model again. Prints one JSON line: the file, its bytes, the number
of shapes and the seconds. --output is written completely or not at all. With --mtp-step auto the file holds
every depth of --mtp-depths; an engine starts with one and loads the others during its first steps. With
--tensor-parallel N the file holds the programs of each of N ranks, for engines with N ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from compiled_mtp.config import EngineConfig, Torchrun
from compiled_mtp.errors import check
from compiled_mtp.terminal.console import (
    EXIT_OK,
    Interrupts,
    check_stdout,
    run_command,
    start_engine,
    write_text,
)
from compiled_mtp.terminal.flags import COMMON_ENGINE, Parser, add_fields, given
from compiled_mtp.terminal.signals import leaving

_SKIPPED = ("compile", "graph_cache")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for an error, 130 for Ctrl-C or 143 for SIGTERM."""
    return run_command(lambda interrupts: _export(make_parser().read(argv), interrupts))


def make_parser() -> Parser:
    """Return the parser: --output, and a flag for each field of EngineConfig that is not in _SKIPPED."""
    parser = Parser(
        prog="compiled-mtp export",
        usage="%(prog)s --output FILE [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    add_fields(parser, "engine", EngineConfig, skip=_SKIPPED, common=COMMON_ENGINE)
    return parser


def _export(flags: dict[str, Any], interrupts: Interrupts) -> int:
    begin_s, out = time.perf_counter(), flags["output"]
    stdout, fields = check_stdout(), given(flags, EngineConfig, skip=_SKIPPED)
    # None overrides a cache that the environment names: with one, nothing would be compiled.
    config = EngineConfig(**fields, compile="on", graph_cache=None)
    # The file holds the compilers' caches too; only this process and its children write to them.
    world, remedy = Torchrun().world_size, "start one process: it starts the ranks"
    check(world == 1, "WORLD_SIZE", "be 1 for an export", world, remedy)
    if config.graph_mode == "auto":
        config = config.model_copy(update={"graph_mode": "replay"})
    check_writable(out)
    size, shapes = export(config, out)
    seconds = round(time.perf_counter() - begin_s, 1)
    result = {"file": str(out), "bytes": size, "shapes": shapes, "seconds": seconds}
    write_text(stdout, json.dumps(result) + "\n")
    return EXIT_OK


def check_writable(out: Path) -> None:
    """Raise ValueError unless `out` can be written, before minutes of compiling; creates its directory."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent).cleanup()
        if out.exists() and not out.is_file():
            # The export would replace it, even /dev/null.
            raise OSError("it is not a regular file")
    except OSError as error:
        raise ValueError(
            f"output must be a file that can be written, got {out}: {error}; name another"
        ) from None


def export(config: EngineConfig, out: Path) -> tuple[int, int]:
    """Compile for `config` and write `out`; return its bytes and the number of shapes."""
    with leaving():
        from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, save, use_directory

        # `leaving` may end the process only while there is no directory to remove.
        import_module("compiled_mtp.engine")

    # After Ctrl-C a compiler may still write to the directory; a failed removal must not hide the Ctrl-C.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as enclosing:
        directory, scratch = Path(enclosing) / "made", Path(enclosing) / "scratch"
        directory.mkdir()
        scratch.mkdir()
        use_directory(directory)
        # Compilers that are killed leave their temporary files; they are removed with this directory.
        os.environ["TMPDIR"] = str(scratch)
        engine = start_engine(config, save_to=directory / PROGRAMS_NAME)
        size = save(out, directory, engine.runner.cache_key())
        shapes = engine.runner.programs.count
        engine.close()
        return size, shapes
