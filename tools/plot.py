"""Draw what the other tools print as SVG: speedup, acceptance or time to the first token.

    python tools/plot.py speedup --output docs/speedup.svg 27B=docs/data/speedup-h200-27b.jsonl
    python tools/plot.py acceptance --output docs/acceptance.svg "temperature 0=docs/data/acceptance-0.jsonl"
    python tools/plot.py first-token --output docs/first_token.svg CPU=docs/data/first-token-cpu.jsonl

Each input LABEL=FILE is a file of JSON lines; other lines and objects of other tools are ignored.

speedup: tokens per second over those of mtp_step 0, against requests at a time. Reads rows of `bench step`
    (--mtp-step 0,3: every depth except 0 is a line) or of bench_engine depth (fixed and auto, per text).
acceptance: per draft index, the share of the rounds with such a draft that accepted it. Reads results of
    `compiled-mtp run --output`.
first-token: time to the first token against the prompt's tokens, for new and for cached prompts. Reads lines
    of bench_engine prefix, one per length.

The same files give the same bytes. Needs matplotlib: pip install 'compiled-mtp[plot]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiled_mtp.terminal.flags import Parser

Points = dict[float, float]
# Chosen for a white background, which the picture has on dark pages too.
COLOURS = ("#2563a8", "#c2571a", "#3a7d44", "#8250a8", "#a8324f", "#5b6470")


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among a file's lines."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def speedup(label: str, objects: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return, by label and depth: requests at a time -> tokens per second over those of mtp_step 0."""
    speeds: dict[str, Points] = defaultdict(dict)
    for found in objects:
        if isinstance(found.get("tokens_per_s"), dict) and "case" in found:
            for depth, tokens_per_s in found["tokens_per_s"].items():
                speeds[f"{found['case']}, {depth}"][found["batch"]] = tokens_per_s
        elif {"mtp_step", "batch", "tokens_per_s"} <= found.keys():
            speeds[str(found["mtp_step"])][found["batch"]] = found["tokens_per_s"]
    lines = {}
    for name, points in speeds.items():
        case, _, depth = name.rpartition(", ")
        plain = speeds.get(f"{case}, 0" if case else "0", {})
        ratios = {batch: value / plain[batch] for batch, value in sorted(points.items()) if batch in plain}
        if depth != "0" and ratios:
            lines[", ".join(part for part in (label, case, f"mtp_step {depth}") if part)] = ratios
    return lines


def acceptance(label: str, objects: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return one line: draft index, from 1 -> share of the rounds with that draft that accepted it."""
    drafted: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for found in objects:
        metrics = found.get("metrics") or {}
        for index, number in enumerate(metrics.get("drafted_by_index", ()), start=1):
            drafted[index] += number
            accepted[index] += metrics["accepted_by_index"][index - 1]
    shares = {float(index): accepted[index] / number for index, number in drafted.items() if number}
    return {label: shares} if shares else {}


def first_token(label: str, objects: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return two lines: prompt tokens -> seconds, of new prompts and of repeated ones."""
    rows = sorted((o for o in objects if "first_token_s" in o), key=lambda row: row["prompt_tokens"])
    names = {"new": "new prompts", "again": "prompts that come again, cached"}
    lines = {}
    for name, said in names.items() if rows else ():
        points = {row["prompt_tokens"]: row["first_token_s"][name] for row in rows}
        lines[", ".join(part for part in (label, said) if part)] = points
    return lines


Reader = Callable[[str, Sequence[Mapping[str, Any]]], dict[str, Points]]
# By plot: the reader of its files, the names of its x and y axes, and the scale of the x axis.
PLOTS: dict[str, tuple[Reader, str, str, str]] = {
    "speedup": (speedup, "requests at a time", "tokens/s over those of mtp_step 0", "log"),
    "acceptance": (acceptance, "index of the draft", "share of rounds that kept it", "linear"),
    "first-token": (first_token, "tokens of the prompt", "seconds to the first token", "log"),
}


def draw(plot: str, lines: Mapping[str, Points], title: str, file: Path) -> None:
    """Write the picture to `file`; the same lines give the same bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": plot, "svg.fonttype": "path", "axes.spines.top": False}
    mpl.rcParams |= {"axes.spines.right": False, "font.size": 10.0, "axes.grid": True, "grid.alpha": 0.3}
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, NullLocator

    _, across, up, scale = PLOTS[plot]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for index, (label, points) in enumerate(lines.items()):
        colour, marker = COLOURS[index % len(COLOURS)], "os^Dv*"[index % 6]
        axes.plot(list(points), list(points.values()), marker=marker, color=colour, label=label)
    ticks = sorted({x for points in lines.values() for x in points})
    if scale == "log":
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=across, ylabel=up, title=title, ylim=(0, 1.02 if plot == "acceptance" else None))
    if plot == "speedup":
        axes.axhline(1.0, color="#888888", linewidth=1.0)
    axes.legend()
    figure.savefig(file, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def labelled(text: str) -> tuple[str, Path]:
    """Parse LABEL=FILE."""
    label, separator, file = text.partition("=")
    if not separator or not file:
        raise argparse.ArgumentTypeError(f"inputs must be LABEL=FILE, got {text}; put a label before it")
    return label, Path(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot; return 2 if a file cannot be read or has nothing for this plot."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", choices=PLOTS)
    parser.add_argument("inputs", nargs="+", type=labelled, metavar="LABEL=FILE", help="JSON lines")
    parser.add_argument("--title", default="", help="title, such as the machine that measured")
    parser.add_argument("--output", type=Path, required=True, help="the .svg to write")
    flags = parser.parse_args(argv)
    lines: dict[str, Points] = {}
    try:
        for label, path in flags.inputs:
            found = PLOTS[flags.plot][0](label, list(read_objects(path)))
            if not found:
                raise ValueError(
                    f"inputs must hold what {flags.plot} needs, got {path}; --help says which tools print it"
                )
            lines |= found
        draw(flags.plot, lines, flags.title, flags.output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
