"""The tuner of products: which candidates it tries and checks, and what it prints and writes."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.ops.k_splits import count_k_splits
from compiled_mtp.ops.linear import large_m_config
from compiled_mtp.ops.linear.resident_config import RESIDENT_TABLE
from compiled_mtp.ops.linear_w8a8 import large_m_config as w8a8_config

TOOL = "tune_products"
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tried(tools_path: None) -> Any:
    return importlib.import_module("product_tuning.candidates")


@pytest.fixture
def ways(tools_path: None) -> Any:
    return importlib.import_module("product_tuning.ways")


@pytest.mark.parametrize(
    "name, n, k", [("down", 5120, 17408), ("o", 5120, 6144), ("down", 2560, 9216), ("down", 1024, 3584)]
)
@pytest.mark.parametrize("recipe", ["bf16", "w8a16"])
def test_before_a_norm_no_narrow_candidate_changes_a_bit(
    tried: Any, ways: Any, name: str, n: int, k: int, recipe: str
) -> None:
    found = tried.narrow_configs(ways.Product("a", name, n, k, recipe))
    assert found
    assert {config.split * config.chains for config in found} == {count_k_splits(k)}
    assert all(config.is_even(k) for config in found)


def test_one_kernel_is_compiled_once(
    tool: Any, tried: Any, ways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "launches_of", lambda way: [SimpleNamespace(key=way.tile)])
    down, out = (ways.Product("27b", name, 5120, k) for name, k in (("down", 17408), ("gdn_out", 6144)))
    alone = tool.distinct(tried.ways_of("narrow", down, 4))
    assert [way.tile for way in alone] == tried.narrow_configs(down)
    # The weight's size makes no other kernel for the configurations that both have.
    both = tool.distinct([*tried.ways_of("narrow", down, 4), *tried.ways_of("narrow", out, 4)])
    assert len(both) < len(alone) + len(tried.narrow_configs(out))


def test_only_the_named_weights(tried: Any) -> None:
    found = tried.products_of(["27b"], ["bf16"], ["down", "gdn_out"])
    assert [(one.name, one.n, one.k) for one in found] == [("down", 5120, 17408), ("gdn_out", 5120, 6144)]
    for recipe in ("bf16", "w8a16", "w8a8"):
        names = {one.name for one in tried.products_of(["27b"], [recipe])}
        assert ("lm_head" in names) == (recipe == "bf16")


def test_the_named_weights_once_each(tried: Any) -> None:
    products = tried.products_of(["27b", "4b"], ["bf16", "w8a8"], ["down", "o"])
    assert [(one.name, one.n, one.k, one.recipe) for one in products] == [
        ("down", 5120, 17408, "bf16"),
        ("o", 5120, 6144, "bf16"),
        ("down", 5120, 17408, "w8a8"),
        ("o", 5120, 6144, "w8a8"),
        ("down", 2560, 9216, "bf16"),
        ("o", 2560, 4096, "bf16"),
        ("down", 2560, 9216, "w8a8"),
        ("o", 2560, 4096, "w8a8"),
    ]
    every = [one.name for one in tried.products_of(["27b"], ["bf16"], (), tried.NOT_TIMED)]
    # Attention's output projection has the size of GDN's.
    assert every == ["gate|up", "down", "qkvz|ba", "q|k|v", "gdn_out", "lm_head"]


@pytest.mark.parametrize("shape", ["27b", "9b", "4b", "0.8b"])
@pytest.mark.parametrize("rows", [32, 128, 256])
def test_every_number_of_partials_has_large_m_tiles(tried: Any, shape: str, rows: int) -> None:
    products = [
        one for one in tried.products_of([shape], ["bf16"], (), tried.NOT_TIMED) if tried.fits_large_m(one)
    ]
    assert {"gate|up", "down", "lm_head"} <= {product.name for product in products}
    for product in products:
        found = tried.ways_of("large-m", product, rows)
        for count in product.counts:
            own = [way for way in found if way.count == count and way.kernel != "cuBLAS"]
            assert sum(way.kernel == "plain" for way in own) == 1
            tiles = [way.tile for way in own if way.tile]
            assert tiles
            assert product.chains % count == 0
            for tile in tiles:
                assert tile.num_stages >= 2
                assert product.k % (product.chains * tile.block_k) == 0


@pytest.mark.parametrize("name, n, k", [("gate|up", 34816, 5120), ("down", 5120, 17408)])
@pytest.mark.parametrize("rows", [4, 32, 128, 256])
def test_every_number_of_partials_has_tiles_in_fp8(
    tried: Any, ways: Any, name: str, n: int, k: int, rows: int
) -> None:
    found = tried.ways_of("w8a8", ways.Product("27b", name, n, k, "w8a8"), rows)
    assert len({way.label for way in found}) == len(found)
    for count in {way.count for way in found}:
        own = [way.tile for way in found if way.count == count and way.tile]
        assert sum(isinstance(tile, w8a8_config.LargeMTile) for tile in own) > 1
        assert sum(isinstance(tile, ways.W8A8Config) for tile in own) > 1


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_the_candidate_compiles_to_one_class_of_product() -> None:
    """Every tile multiplies by warp-group instructions, without spills."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    flags = ["large-m", "--compile-only", "--workers=2", "--rows=128", "--weights=gate|up"]
    command = [sys.executable, str(TOOLS / "tune_products.py"), *flags]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [line for line in out.splitlines() if " large-m (" in line]
    assert len(lines) > 4
    assert all(re.search(r"'stack_bytes': 0, .*\{'HGMMA': \d+\}$", line) for line in lines), "\n".join(lines)


@pytest.fixture
def timed(ways: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the timing: for each call, its result."""
    called: list[Any] = []
    monkeypatch.setattr(ways, "DEVICE", "cpu")
    monkeypatch.setattr(ways, "ROTATED_BYTES", 1)
    monkeypatch.setattr(ways, "FEW_ROWS", (4,))
    monkeypatch.setattr(ways, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(ways, "time_us", lambda calls: called.append(calls[-1]()) or 50.0)
    # The operator on a CPU is another product, and has no split-K partials.
    for name in ("linear", "linear_partials", "linear_silu_mul"):
        monkeypatch.setattr(ways, name, getattr(ways, name).launch)
    return called


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "name, chains, count",
    [("gate|up", 1, 1), ("qkvz|ba", 2, 1), ("lm_head", 2, 1), ("down", 4, 1), ("down", 4, 2)],
)
def test_a_candidate_is_checked_and_timed(
    ways: Any, timed: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, chains: int, count: int
) -> None:
    monkeypatch.setattr(ways.Product, "chains", chains)
    product, rows = ways.Product("a", name, 96, 512), 20
    tile = ways.Way(product, rows, "tile", count, ways.LargeMTile(32, 32, 16, 64, 4, 3))
    plain, in_use = (ways.Way(product, rows, kernel, count) for kernel in ("plain", "operator"))
    for way in (ways.Way(product, rows, "cuBLAS"), in_use, plain, tile):
        found = json.loads(ways.time_way(way))
        assert found["us"] == 50.0
        assert found["floor_us"] == pytest.approx(96 * 512 * 2 / 1e3)
        assert ("decisive_us" in found) == (name == "down" and way.kernel != "cuBLAS")
        # In the interpreter a product rounds like the CPU's: a wrong tile's values would all be far off.
        assert found["same_bits"] in ({None} if way.kernel == "cuBLAS" else {True, False})
    wanted = ways.wanted_of(product, rows)
    assert wanted.dtype == (torch.float32 if name == "lm_head" else torch.bfloat16)
    for way in (plain, tile):
        torch.testing.assert_close(ways.result_of(way, rows), wanted, rtol=1.6e-2, atol=2e-3)
    assert len(timed) == (7 if name == "down" else 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name, count", [("qkvz", 1), ("down", 2)])
def test_an_fp8_candidate_is_checked_timed_printed_and_written(
    tool: Any,
    ways: Any,
    timed: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    count: int,
) -> None:
    product = ways.Product("a", name, 192, 512, "w8a8")
    large_m = ways.Way(product, 18, "tile", count, w8a8_config.LargeMTile(16, 64, 1, 32, 4, 3))
    left = replace(large_m, tile=ways.W8A8Config(16, 64, 4, 3))
    best: Any = {}
    for way in (large_m, left):
        found = json.loads(ways.time_way(way))
        # In the interpreter a product rounds like the CPU's.
        assert found["same_bits"] in {True, False}
        assert ("decisive_us" in found) == (name == "down")
        torch.testing.assert_close(
            ways.result_of(large_m, 18), ways.result_of(left, 18), rtol=1.6e-2, atol=1e-2
        )
        tool.show(way, json.dumps({**found, "same_bits": True}), best)
    tool.show(large_m, "HUNG", best)
    tool.show(large_m, json.dumps({"us": 1.0, "floor_us": 1.0, "same_bits": False}), best)
    tool.show(replace(left, rows=4), json.dumps({"us": 1.0, "floor_us": 1.0, "same_bits": True}), best)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("same bits")
    assert lines[2].endswith("HUNG")
    assert lines[3].endswith("OTHER BITS")
    entry = f"192x512 {'parts2' if name == 'down' else 'product'}"
    assert {key: (us, tool.fields_of(way.tile)) for key, (us, way) in best.items()} == {
        (entry, 64): (50.0, [16, 64, 1, 32, 4, 3, 512]),
        (entry, 16): (1.0, None),
    }
    written = tmp_path / "large_m.json"
    tool.write_table(tool.merged(best, w8a8_config.read_large_m_table()), written)
    entries = json.loads(written.read_text())
    assert entries.pop(entry) == {"16": None, "64": [16, 64, 1, 32, 4, 3, 512]}
    assert entries == w8a8_config.read_large_m_table()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_a_narrow_tile_is_timed_among_its_neighbours(ways: Any, timed: list[Any]) -> None:
    config = ways.LinearConfig(16, 32, 64, 4, 3, 2, 4, 0)
    for name, same in (("down", {True, False}), ("router", {None})):
        product = ways.Product("a", name, 96, 512)
        found = json.loads(ways.time_way(ways.Way(product, 4, "tile", 2, config)))
        assert found["same_bits"] in same
        assert found["decisive_us"] == 50.0
    # The norm's rows and sums, and the result of the product alone.
    assert [len(timed[1]), timed[3].shape] == [2, (4, 96)]


def test_results_are_printed_and_written(
    tool: Any, ways: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    product, tile = ways.Product("27b", "down", 5120, 17408), ways.LargeMTile(128, 256, 64, 64, 8, 4)
    way, plain = ways.Way(product, 128, "tile", 8, tile), ways.Way(product, 128, "plain", 8)
    best: Any = {}
    tool.show(way, "HUNG", best)
    found = '{"us": 50.0, "floor_us": 40.0, "same_bits": %s, "decisive_us": %s}'
    tool.show(way, found % ("false", 60.0), best)
    assert not best
    tool.show(way, found % ("true", 60.0), best)
    tool.show(plain, found % ("true", 61.0), best)
    assert best == {("5120x17408 parts8", 128): (60.0, way)}
    hung, other, same, _ = capsys.readouterr().out.splitlines()
    assert hung.endswith("HUNG")
    assert other.endswith("50.0 us, 1.25 of reading it, with its neighbours 60.0, OTHER BITS")
    assert same.endswith(", same bits")
    # Without descriptors it is faster, so no tile is written.
    tool.show(replace(plain, rows=20), found % ("true", 30.0), best)
    written = tmp_path / "large_m.json"
    tool.write_table(tool.merged(best, large_m_config.read_large_m_table()), written)
    entries = json.loads(written.read_text())
    assert entries.pop("5120x17408 parts8") == {"64": None, "128": [128, 256, 64, 64, 8, 4, 512]}
    assert entries == large_m_config.read_large_m_table()


def test_narrow_products_compete_in_a_stack_unless_they_are_in_none(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU is used: a tile's time alone is its number, and in the stack the second candidate wins."""
    table: dict[str, dict[str, list[int]]] = {}
    best: dict[str, list[Any]] = {}

    def run_phase(work: Any, jobs: list[Any], *rest: Any) -> Any:
        for index, way in enumerate(jobs if work is tool.time_way else []):
            assert way.capability == 90
            # A product before a norm must keep its bits; the other products' tables decide theirs.
            same = None if not way.product.is_before_norm else index % 2 == 1
            times = {"us": 1.0 + index, "decisive_us": 1.0 + index, "floor_us": 1.0}
            yield way, json.dumps(times | {"same_bits": same})
        yield from [(("27b", 4), "")] * (work is tool.compile_stack)

    def choose(stack: Any, entries: Any, name: str, rivals: list[Any]) -> str:
        best[name] = rivals
        entries[name] = [*astuple(rivals[1])[1:-1]]
        return "chosen"

    monkeypatch.setattr(tool, "run_phase", run_phase)
    monkeypatch.setattr(tool, "choose_config", choose)
    monkeypatch.setattr(tool, "compile_all", lambda ways, flags: None)
    monkeypatch.setattr(tool, "Stack", lambda shape, rows: None)
    monkeypatch.setattr(tool, "read_table", lambda: table)
    monkeypatch.setattr(tool, "device_of", lambda index: SimpleNamespace(arch="sm_90"))
    cuda = tool.torch.cuda
    for name, value in (("is_available", True), ("current_device", 0)):
        monkeypatch.setattr(cuda, name, lambda value=value: value)
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132)
    )
    table_file = tmp_path / "table.json"
    flags = ["--shapes=27b", "--recipes=bf16", "--weights=down,lm_head", f"--output={table_file}"]
    tool.main(["narrow", *flags])
    written = json.loads((tmp_path / "table.json").read_text())
    assert written == table
    assert written["sm_90"].keys() == {"5120x17408 bf16", "248320x5120 bf16"}
    assert list(best) == ["5120x17408 bf16"]
    # Products are tried by size, down first: of its tiles, the odd ones have the operator's bits.
    products = tool.candidates.products_of(["27b"], ["bf16"], ["down", "lm_head"])
    down, head = (tool.candidates.narrow_configs(product) for product in products)
    assert best["5120x17408 bf16"][:2] == [down[1], down[3]]
    assert written["sm_90"]["248320x5120 bf16"] == [*astuple(head[0])[1:-1]]
    assert "27b 5120x17408 bf16    chosen" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", [large_m_config.LARGE_M_TABLE, w8a8_config.LARGE_M_TABLE, RESIDENT_TABLE], ids=str
)
def test_the_committed_table_is_what_the_tool_writes(tool: Any, tmp_path: Path, path: Path) -> None:
    tool.write_table(json.loads(path.read_text()), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == path.read_text()


@pytest.mark.parametrize("kind", ["narrow", "resident", "large-m", "w8a8"])
def test_without_a_gpu_it_says_so(tool: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^device must be a CUDA GPU, .*, got none; use one, or --compile-only$"
    ):
        tool.main([kind])


def test_a_table_holds_no_flags_that_are_not_set(tool: Any, ways: Any) -> None:
    tile = ways.LargeMTile(128, 128, 32, 64, 8, 6, 512, False, True)
    fields = [128, 128, 32, 64, 8, 6, 512, False, True]
    assert tool.fields_of(tile) == fields
    assert tool.fields_of(replace(tile, apart=False)) == fields[:7]


def test_each_kind_has_its_own_defaults(tool: Any) -> None:
    large_m, w8a8 = (tool.parse_flags([kind, "--compile-only"]) for kind in ("large-m", "w8a8"))
    assert (large_m.recipes, large_m.rows, large_m.out) == (["bf16"], [128, 32], None)
    assert (w8a8.recipes, w8a8.rows, w8a8.shapes) == (["w8a8"], [4, 32, 128], ["27b"])
    assert tool.parse_flags(["resident", "--compile-only"]).out == RESIDENT_TABLE
