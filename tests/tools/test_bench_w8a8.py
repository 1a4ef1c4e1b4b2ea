"""The tuner of FP8 products: what it tries, checks, prints and writes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_w8a8")


@pytest.mark.parametrize("name, n, k", [("gate|up", 34816, 5120), ("down", 5120, 17408)])
@pytest.mark.parametrize("rows", [4, 32, 128, 256])
def test_every_number_of_parts_has_tiles(tool: Any, name: str, n: int, k: int, rows: int) -> None:
    jobs = list(tool.jobs_of(name, n, k, rows))
    assert len({job.label for job in jobs}) == len(jobs)
    for count in {job.count for job in jobs}:
        own = [job for job in jobs if job.count == count and (job.left or job.tall)]
        assert sum(job.is_in_use for job in own) == 1
        assert sum(bool(job.tall) for job in own) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name, count", [("qkvz", 1), ("down", 2)])
def test_a_job_is_checked_timed_printed_and_written(
    tool: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    count: int,
) -> None:
    """All but the times, which a call stands for here."""
    monkeypatch.setattr(tool, "DEVICE", "cpu")
    monkeypatch.setattr(tool, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tool, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(tool, "time_us", lambda calls: 50.0 if calls[-1]() is not None else 0.0)
    tall = tool.Job(name, 192, 512, 18, count, None, tool.TallTile(16, 64, 1, 32, 4, 3))
    left = tool.Job(name, 192, 512, 18, count, tool.W8A8Config(16, 64, 4, 3))
    best: Any = {}
    for job in (tall, left):
        found = json.loads(tool.time_job(job))
        # In the interpreter a product rounds as the CPU does.
        assert found["same_bits"] in {True, False}
        assert ("with_norm_us" in found) == (name == "down")
        torch.testing.assert_close(tool.sums_of(tall, 18), tool.sums_of(left, 18), rtol=1.6e-2, atol=1e-2)
        tool.show(job, json.dumps({**found, "same_bits": True}), best)
    tool.show(tall, "HUNG", best)
    tool.show(tall, json.dumps({"us": 1.0, "floor_us": 1.0, "same_bits": False}), best)
    tool.show(replace(left, rows=4), json.dumps({"us": 1.0, "floor_us": 1.0, "same_bits": True}), best)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("same bits")
    assert lines[2].endswith("HUNG")
    assert lines[3].endswith("OTHER BITS")
    product = f"192x512 {'parts2' if name == 'down' else 'product'}"
    assert best == {(product, 64): (50.0, tall.tall), (product, 16): (1.0, None)}
    tool.write_table(tool.merged(best), tmp_path / "tall.json")
    entries = json.loads((tmp_path / "tall.json").read_text())
    assert entries.pop(product) == {"16": None, "64": [16, 64, 1, 32, 4, 3, 512]}
    assert entries == tool.read_tall_table()
    # The table that is there is what the tool writes.
    tool.write_table(tool.merged({}), tmp_path / "tall.json")
    table = TOOLS.parent / "ops" / "linear_w8a8" / "tall.json"
    assert (tmp_path / "tall.json").read_text() == table.read_text()
