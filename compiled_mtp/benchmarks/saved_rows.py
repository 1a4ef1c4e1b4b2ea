"""Saved rows of a benchmark: the rows of another engine or commit, shown beside ours.

A file holds one JSON object per line, as the benchmarks print them; lines that do not begin with "{" are
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_mtp.errors import fail

Row = Mapping[str, Any]


def read_rows(path: Path, fields: Collection[str], defaults: Row) -> list[Row]:
    """Return the rows of a file, with `defaults` for fields that it leaves out.

    Raises ValueError for a row without one of `fields`, and for a file without rows or that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        rows: list[Row] = [
            {**defaults, **json.loads(line)} for line in lines if line.lstrip().startswith("{")
        ]
    except (OSError, ValueError) as error:
        raise fail("beside", "be a file of JSON lines", f"{path}: {error}", "check the path") from None
    missing = [sorted(set(fields) - row.keys()) for row in rows]
    if not rows or any(missing):
        got = f"none of {max(missing)}" if rows else "no row"
        raise ValueError(f"beside must hold rows with {sorted(fields)}, got {got} in {path}; add them")
    return rows


def rows_beside(saved: Sequence[Row], row: Row, case: Collection[str], figure: str) -> dict[str, list[float]]:
    """Return the figures of each engine that measured the case of `row`, in file order.

    case: the fields in which two rows of one case agree.
    """
    found: dict[str, list[float]] = {}
    for other in saved:
        if all(other[name] == row[name] for name in case):
            found.setdefault(other["engine"], []).append(float(other[figure]))
    return found


def describe_beside(beside: Mapping[str, Sequence[float]], own: float, unit: str, digits: int) -> str:
    """ "vLLM 0.26.0 18.900 to 20.100 ms (1.21 to 1.29 of ours)" for each engine, "" for none."""
    texts = []
    for engine, figures in beside.items():
        ends = sorted({min(figures), max(figures)})
        span = " to ".join(f"{figure:.{digits}f}" for figure in ends)
        ratios = " to ".join(f"{figure / own:.2f}" for figure in ends)
        texts.append(f"{engine} {span} {unit} ({ratios} of ours)")
    return ", ".join(texts)
