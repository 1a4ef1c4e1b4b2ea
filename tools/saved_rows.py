"""Rows that were measured before, by us or by another engine, to stand beside a table of ours.

A file holds one JSON object a line; lines that do not begin with "{" are passed over, so what `bench_step.py`
prints is such a file too (another commit's rows beside this one's). The fields, of which all but the last two
must be there (any others are passed over):

engine      text: who measured, with its version ("vLLM 0.26.0")
device      text: the GPU, as torch.cuda.get_device_name() has it; rows of another kind are not shown
shape       text: a shape of `bench_step.py` ("27b")
weights     text: "bf16" or "fp8", whatever the recipe of the activations
mtp_step    integer: drafted tokens a round
batch       integer: requests
context     integer: prompt tokens of each request
step_ms     number: milliseconds of one round, draft and verify, median
new_tokens_per_round   number: mean new tokens of one request a round
note        text

Several rows of one case are several measurements: the table shows the least and the most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEXTS = ("engine", "device", "shape", "weights")
INTEGERS = ("mtp_step", "batch", "context")
# What must be equal for two rows to be of one case.
CASE = ("device", "shape", "weights", "mtp_step", "batch", "context")
WEIGHTS = ("bf16", "fp8")

Row = Mapping[str, Any]


def check_row(row: Any) -> Row:
    """`row`, or ValueError for the first field that is not as the module says."""

    def fail(name: str, rule: str) -> ValueError:
        found = repr(row[name]) if name in row else "nothing"
        return ValueError(f"{name} must {rule}, got {found}; tools/saved_rows.py lists the fields")

    for name in TEXTS:
        if not isinstance(row.get(name), str):
            raise fail(name, "be text")
    if row["weights"] not in WEIGHTS:
        raise fail("weights", f"be one of {', '.join(WEIGHTS)}")
    for name in INTEGERS:
        if not isinstance(row.get(name), int) or row[name] < 0:
            raise fail(name, "be an integer from 0 on")
    for name in ("step_ms", "new_tokens_per_round"):
        if name == "step_ms" or name in row:
            value = row.get(name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise fail(name, "be a number above 0")
    return dict(row)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, in its order; ValueError names the line that is not one, or a file without any."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.lstrip().startswith("{"):
            continue
        try:
            rows.append(check_row(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} must hold a row, got none; tools/saved_rows.py says how they are written")
    return rows


def rows_beside(saved: Sequence[Row], row: Row) -> dict[str, list[float]]:
    """Milliseconds of a step of each engine that measured the case of `row`, in the file's order."""
    found: dict[str, list[float]] = {}
    for other in saved:
        if all(other[name] == row[name] for name in CASE):
            found.setdefault(other["engine"], []).append(float(other["step_ms"]))
    return found


def describe_beside(beside: Mapping[str, Sequence[float]], step_ms: float) -> str:
    """ "vLLM 0.26.0 18.900 to 20.100 ms (1.21 to 1.29 of ours)" of each engine; empty without any."""
    texts = []
    for engine, times in beside.items():
        least, most = min(times), max(times)
        span = f"{least:.3f}" if least == most else f"{least:.3f} to {most:.3f}"
        ratio, most_ratio = f"{least / step_ms:.2f}", f"{most / step_ms:.2f}"
        ratios = ratio if ratio == most_ratio else f"{ratio} to {most_ratio}"
        texts.append(f"{engine} {span} ms ({ratios} of ours)")
    return ", ".join(texts)
