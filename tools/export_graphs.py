"""Compile every shape of an engine and write one file: `graph_cache=FILE` then starts without compiling.

    python tools/export_graphs.py --model PATH --out FILE --mtp-step 3 --max-batch 8

Takes every field of EngineConfig as a flag; the engine that loads the file must be given the same values.
--graph-mode is "replay" unless given: of "reduce-overhead" only the generated code can be saved, and every
start traces the model again.
Prints one JSON line: the file, its bytes, the number of shapes and the seconds it took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
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
    bars: dict[str, tqdm[None]] = {}

    def report(what: str, done: int, total: int) -> None:
        bar = bars.setdefault(what, tqdm(total=total, desc=what, file=sys.stderr))
        bar.update(done - bar.n)

    with tempfile.TemporaryDirectory() as directory:
        use_directory(Path(directory))
        try:
            config = EngineConfig(**given, compile="on")
            if config.graph_mode == "auto":
                config = config.model_copy(update={"graph_mode": "replay"})
            engine = Engine(config, progress=report)
            engine.runner.programs.save(Path(directory) / PROGRAMS_NAME)
            out.parent.mkdir(parents=True, exist_ok=True)
            size = save(out, Path(directory), engine.runner.cache_key)
        except (ValueError, OSError) as error:
            parser.exit(2, f"export_graphs: {error}\n")
        engine.close()
    for bar in bars.values():
        bar.close()
    seconds = round(time.perf_counter() - begin, 1)
    print(
        json.dumps(
            {"file": str(out), "bytes": size, "shapes": engine.runner.programs.count, "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
