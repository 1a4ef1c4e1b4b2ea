"""The tuner of products of many rows: what it tries, checks, prints and writes."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_tall")


@pytest.mark.parametrize("shape", ["27b", "9b", "4b", "0.8b"])
@pytest.mark.parametrize("rows", [32, 128, 256])
def test_every_number_of_parts_has_tiles(tool: Any, shape: str, rows: int) -> None:
    weights = list(tool.weights_of(shape))
    assert {"gate|up", "down", "lm_head"} <= {weight.name for weight in weights}
    for weight in weights:
        jobs = list(tool.jobs_of(weight, rows, False))
        for count in weight.counts:
            own = [job for job in jobs if job.count == count and not job.is_cublas]
            assert sum(job.is_plain for job in own) == 1
            tiles = [job.tile for job in own if job.tile]
            assert tiles
            assert weight.chains % count == 0
            for tile in tiles:
                assert tile.num_stages >= 2
                assert weight.k % (weight.chains * tile.block_k) == 0
        assert all(tile.specialized for tile in tool.specialized_tiles(weight, rows))


def test_named_tiles_are_timed_beside_what_is_in_use(tool: Any) -> None:
    fields = [128, 128, 32, 64, 8, 6, 512, False, True]
    named = [tool.parse_tile("down:4=128,128,32,64,8,6,512,false,true")]
    assert tool.fields_of(named[0][2]) == fields
    assert tool.fields_of(replace(named[0][2], apart=False)) == fields[:7]
    weights = {weight.name: weight for weight in tool.weights_of("27b")}
    cublas, in_use, tile = tool.jobs_of_tiles(weights["down"], 128, named[:1])
    assert cublas.is_cublas
    assert (in_use.count, in_use.tile, in_use.is_plain) == (4, None, False)
    assert (tile.count, tile.tile) == (4, named[0][2])
    assert "apart" in tile.label
    assert not [*tool.jobs_of_tiles(weights["gate|up"], 128, named[:1])]


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_the_candidate_compiles_to_one_class_of_product() -> None:
    """Warp-group products whatever the tile, and no spills."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    flags = ["--compile-only", "--workers=2", "--rows=128", "--weights=gate|up"]
    command = [sys.executable, str(TOOLS / "bench_tall.py"), *flags]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [line for line in out.splitlines() if " w8 " in line or " w4 " in line]
    assert len(lines) > 4
    assert all(re.search(r" 0 spilled, .*\{'HGMMA': \d+\}$", line) for line in lines), "\n".join(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "name, chains, count",
    [("gate|up", 1, 1), ("qkvz|ba", 2, 1), ("lm_head", 2, 1), ("down", 4, 1), ("down", 4, 2)],
)
def test_a_job_is_checked_and_timed(
    tool: Any, monkeypatch: pytest.MonkeyPatch, name: str, chains: int, count: int
) -> None:
    """All but the times, which a call stands for here."""
    called = []
    monkeypatch.setattr(tool, "DEVICE", "cpu")
    monkeypatch.setattr(tool, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tool, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(tool, "time_us", lambda calls: called.append(calls[-1]()) or 50.0)
    # The operator on a CPU is another product, and without parts.
    monkeypatch.setattr(tool, "linear", tool.linear.launch)
    monkeypatch.setattr(tool, "linear_parts", tool.linear_parts.launch)
    monkeypatch.setattr(tool, "linear_silu_mul", tool.linear_silu_mul.launch)
    weight, rows = tool.Weight(name, 96, 512, chains), 20
    own = tool.Job(weight, rows, count, tool.TallTile(32, 32, 16, 64, 4, 3))
    plain, in_use = tool.Job(weight, rows, count, is_plain=True), tool.Job(weight, rows, count)
    for job in (tool.Job(weight, rows, is_cublas=True), in_use, plain, own):
        found = json.loads(tool.time_job(job))
        assert found["us"] == 50.0
        assert found["floor_us"] == pytest.approx(96 * 512 * 2 / 1e3)
        assert ("with_norm_us" in found) == (name == "down" and not job.is_cublas)
        # In the interpreter a product rounds as the CPU does: of a wrong tile no value would be near.
        assert found["same_bits"] in ({None} if job.is_cublas else {True, False})
    x, wanted = tool.wanted_of(weight, rows)
    assert wanted.dtype == (torch.float32 if name == "lm_head" else torch.bfloat16)
    for job in (plain, own):
        got = tool.sums_of(job, x, tool.sets_of(weight)[0])
        torch.testing.assert_close(got, wanted, rtol=1.6e-2, atol=2e-3)
    assert len(called) == (7 if name == "down" else 4)


def test_what_was_found_is_printed_and_written(
    tool: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weight = tool.Weight("down", 5120, 17408, 8)
    tile = tool.TallTile(128, 256, 64, 64, 8, 4)
    job, plain = tool.Job(weight, 128, 8, tile), tool.Job(weight, 128, 8, is_plain=True)
    best: Any = {}
    tool.show(job, "HUNG", best)
    found = '{"us": 50.0, "floor_us": 40.0, "same_bits": %s, "with_norm_us": %s}'
    tool.show(job, found % ("false", 60.0), best)
    assert not best
    tool.show(job, found % ("true", 60.0), best)
    tool.show(plain, found % ("true", 61.0), best)
    assert best == {("5120x17408 parts8", 128): (60.0, tile)}
    hung, other, same, _ = capsys.readouterr().out.splitlines()
    assert hung.endswith("HUNG")
    assert other.endswith("50.0 us, 1.25 of reading it, with the norm 60.0, OTHER BITS")
    assert same.endswith(", same bits")
    # Without descriptors it is faster: nothing is left of the tile.
    tool.show(replace(plain, rows=20), found % ("true", 30.0), best)
    written = tmp_path / "tall.json"
    tool.write_table(tool.merged(best), written)
    entries = json.loads(written.read_text())
    assert entries.pop("5120x17408 parts8") == {"64": None, "128": [128, 256, 64, 64, 8, 4, 512]}
    assert entries == tool.read_tall_table()
    # The table that is there is what the tool writes.
    tool.write_table(tool.merged({}), written)
    assert written.read_text() == tool_table()


def tool_table() -> str:
    return (Path(__file__).parents[2] / "ops" / "linear" / "tall.json").read_text()
