"""The candidate for tall products: right in the interpreter, and tiles that fit and waste little."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_tall")


# Both pieces of a tile and one; several row tiles; weight rows that no tile divides; K in 1 to 8 chains.
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "pieces, split, parts, gated",
    [
        ((16, 16), 1, 1, True),
        ((32, 0), 1, 1, True),
        ((64, 32), 1, 2, False),
        ((64, 32), 2, 4, False),
    ],
)
def test_the_candidate_in_the_interpreter(
    tool: Any, pieces: tuple[int, int], split: int, parts: int, gated: bool
) -> None:
    torch.manual_seed(parts)
    wide = torch.randn(21, 512 + 8).bfloat16()
    wide[:, 512:] = float("nan")
    x, weight = wide[:, :512], (torch.randn(108, 512) * 512**-0.5).bfloat16()
    tile = tool.TallTile(16, *pieces, 64, 4, 3, split)
    got = tool.launch_tall(tile, x, weight, parts, gated, split > 1)
    wanted = x.double() @ weight.double().T
    if gated:
        gate, up = wanted.bfloat16().float().chunk(2, 1)
        wanted = (silu(gate) * up).double()
    if split > 1:
        assert got.shape == (split, 21, 108)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double().sum(0), wanted, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(got, wanted.bfloat16(), rtol=1.6e-2, atol=1e-3)


def test_a_tree_of_chains_is_the_order_in_use(tool: Any) -> None:
    """1 + 2^-30 + ... in float32: only the tree of eight chains keeps what a long sum loses."""
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    x = torch.ones(1, 512).bfloat16()
    weight = torch.zeros(16, 512).bfloat16()
    # A large number in the first chain and its negative in the second; small ones in the third.
    weight[:, 0], weight[:, 64], weight[:, 128] = 2.0**30, -(2.0**30), 1.0
    tile = tool.TallTile(16, 16, 0, 64, 4, 3)
    assert (tool.launch_tall(tile, x, weight, 8, False, True) == 1.0).all()
    weight[:, 64], weight[:, 192] = 0.0, -(2.0**30)
    # (0 + 1) + (2 + 3): the one is lost beside the third chain's neighbour.
    assert (tool.launch_tall(tile, x, weight, 8, False, True) == 0.0).all()


@pytest.mark.parametrize("shape", ["27b", "9b", "4b", "0.8b"])
@pytest.mark.parametrize("rows", [32, 128, 256])
def test_tiles_fit(tool: Any, shape: str, rows: int) -> None:
    weights = list(tool.weights_of(shape))
    assert {"gate|up", "down", "lm_head"} <= {weight.name for weight in weights}
    for weight in weights:
        tiles = tool.tiles_of(weight, rows)
        assert tiles
        for tile in tiles:
            columns = (tile.block_n + tile.rest_n) * (2 if weight.gated else 1)
            stages = tile.num_stages * tile.block_k * 2 * (tile.block_m + columns)
            assert stages <= 227 * 1024 - 2048
            assert tile.num_stages >= 2
            assert weight.chains % tile.split == 0
            assert weight.k % (weight.chains * tile.block_k) == 0


def test_27b_gate_up_has_one_round_of_programs(tool: Any) -> None:
    gate_up = next(weight for weight in tool.weights_of("27b") if weight.name == "gate|up")
    best = tool.tiles_of(gate_up, 128)[0]
    programs = -(-17408 // (best.block_n + best.rest_n))
    assert 120 <= programs <= 132
    assert all(tile.specialized for tile in tool.specialized_tiles(gate_up, 128))


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_the_candidate_compiles_to_one_class_of_product() -> None:
    """Warp-group products whatever the tile, and no spills."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    flags = ["--compile-only", "--workers=2", "--rows=128", "--weights=gate|up"]
    command = [sys.executable, str(TOOLS / "bench_tall.py"), *flags]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [line for line in out.splitlines() if " rows " in line and "in use" not in line]
    assert len(lines) > 4
    assert all(re.search(r" 0 spilled, .*\{'HGMMA': \d+\}$", line) for line in lines), "\n".join(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "name, chains, split", [("gate|up", 1, 1), ("qkvz|ba", 2, 1), ("down", 4, 1), ("down", 4, 2)]
)
def test_a_job_is_checked_and_timed(
    tool: Any, monkeypatch: pytest.MonkeyPatch, name: str, chains: int, split: int
) -> None:
    """All but the times, which a call stands for here."""
    called = []
    monkeypatch.setattr(tool, "DEVICE", "cpu")
    monkeypatch.setattr(tool, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tool, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(tool, "time_us", lambda calls: called.append(calls[-1]()) or 50.0)
    weight, rows = tool.Weight(name, 96, 512, chains), 20
    tile = tool.TallTile(32, 32, 16, 64, 4, 3, split)
    own = tool.Job(weight, rows, 1, tile)
    for job in (tool.Job(weight, rows, is_cublas=True), tool.Job(weight, rows), own):
        found = json.loads(tool.time_job(job))
        assert found["us"] == 50.0
        assert found["floor_us"] == pytest.approx(96 * 512 * 2 / 1e3)
        assert ("with_norm_us" in found) == (name == "down" and not job.is_cublas)
        # In the interpreter a product rounds as the CPU does: of a wrong tile no value would be near.
        assert found["same_bits"] in ({None} if job.is_cublas else {True, False})
    x, wanted = tool.wanted_of(weight, rows)
    got = tool.sums_of(own, x, tool.sets_of(weight)[0])
    torch.testing.assert_close(got, wanted, rtol=1.6e-2, atol=2e-3)
    assert len(called) == (5 if name == "down" else 3)


def test_a_line_says_what_was_found(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    weight = tool.Weight("down", 5120, 17408, 8)
    job = tool.Job(weight, 128, 8, tool.TallTile(128, 256, 64, 64, 8, 4, 8))
    best: dict[str, tuple[float, str]] = {}
    tool.show(job, "HUNG", best)
    found = '{"us": 50.0, "floor_us": 40.0, "same_bits": %s, "with_norm_us": 60.0}'
    tool.show(job, found % "false", best)
    assert not best
    tool.show(job, found % "true", best)
    assert best["down 5120x17408 128 rows"][0] == 60.0
    hung, other, same = capsys.readouterr().out.splitlines()
    assert hung.endswith("HUNG")
    assert other.endswith("50.0 us, 1.25 of reading it, with the norm 60.0, OTHER BITS")
    assert same.endswith(", same bits")
