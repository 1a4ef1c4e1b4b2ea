"""Which products have shared-memory-resident weights: the table, its use, the launches. Bits: tests/gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.linear import linear, linear_partials, linear_silu_mul
from compiled_mtp.ops.linear.config import LinearConfig, choose
from compiled_mtp.ops.linear.resident_config import (
    LEAST_PIECE,
    ResidentTile,
    can_be_resident,
    find_resident,
    read_resident_table,
)
from compiled_mtp.ops.rms_norm import add_rms_norm

pytest.importorskip("triton", reason="Triton exists on Linux only")

from compiled_mtp.ops import gdn_triton
from compiled_mtp.ops.gdn_verify import kernel as gdn_module
from compiled_mtp.ops.linear import kernel as module
from compiled_mtp.ops.linear import resident_kernel as resident_module
from compiled_mtp.ops.rms_norm import kernel as norm_module
from tests.ops import gluon_on_cpu

HOPPER = Device("sm_90", 227 * 1024, True, True, 132)
# Shared memory besides the weights: the rows' tile, and what a conversion and the system take.
ROWS, OTHER_BYTES = 16, 2048


def operands(name: str, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, str]:
    size, kind = name.split()
    n, k = map(int, size.split("x"))
    x, weight = (torch.zeros(height, k, dtype=torch.bfloat16) for height in (rows, n))
    return x, weight, kind


@pytest.mark.parametrize("name", read_resident_table())
def test_all_programs_of_a_measured_product_run_at_once(name: str) -> None:
    x, weight, kind = operands(name)
    parts = int(kind.removeprefix("parts")) if kind.startswith("parts") else 0
    config = choose(x, weight, (0, 0), False, parts)
    tile = find_resident(HOPPER, x, weight, config, kind == "gated", parts > 0)
    assert tile is not None
    n, k = weight.shape
    length = config.part_length(k)
    assert config.split == max(1, parts)
    assert length * config.chains * config.split == k
    pieces = tile.pieces(length)
    assert sum(pieces) == length
    assert min(pieces) >= LEAST_PIECE
    assert tile.block_n % 16 == 0
    programs = -(-n // tile.block_n) * config.split
    size = 2 * (k // config.split) * (tile.block_n + ROWS) + OTHER_BYTES
    assert programs <= HOPPER.shared_bytes // size * HOPPER.num_processors


def test_a_chain_is_cut_into_powers_of_two() -> None:
    assert ResidentTile(32, 128, 1).pieces(896) == [128] * 7
    assert ResidentTile(32, 256, 1).pieces(448) == [256, 128, 64]
    assert ResidentTile(32, 256, 1).pieces(256) == [256]


def test_other_rows_other_types_and_other_gpus_have_no_resident_weights() -> None:
    name = next(name for name in read_resident_table() if name.endswith("product"))
    x, weight, _ = operands(name, 16)
    config = choose(x, weight, (0, 0), False)
    assert find_resident(HOPPER, x, weight, config) == ResidentTile(*read_resident_table()[name])
    assert find_resident(HOPPER, torch.cat((x, x)), weight, config) is None
    assert find_resident(HOPPER, x.float(), weight, config) is None
    assert find_resident(HOPPER, x, weight.float(), config) is None
    assert find_resident(HOPPER, x, weight[:-32], config) is None
    assert find_resident(HOPPER, x, weight, config, gated=True) is None
    assert find_resident(HOPPER, torch.cat((x, x[:, :1]), 1)[:, :-1], weight, config) is None
    # The row stride is a multiple of 16 bytes but not of 16 numbers.
    assert find_resident(HOPPER, torch.cat((x, x[:, :8]), 1)[:, :-8], weight, config) is None
    assert find_resident(replace(HOPPER, arch="sm_100"), x, weight, config) is None
    assert find_resident(replace(HOPPER, num_processors=114), x, weight, config) is None
    assert find_resident(replace(HOPPER, has_dependent_launch=False), x, weight, config) is None
    assert not can_be_resident(weight)


@pytest.mark.parametrize("name", read_resident_table())
def test_only_a_product_that_may_be_resident_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> torch.Tensor:
        launched.append(given)
        return torch.zeros(1)

    monkeypatch.setattr(module, "device_of", lambda index: HOPPER)
    monkeypatch.setattr(module, "launch_resident", launch)
    monkeypatch.setattr(module, "launch_config", lambda *given: torch.zeros(1))
    monkeypatch.setattr(module, "launch_large_m", lambda *given: torch.zeros(1))
    for rows, resident in ((16, True), (16, False), (17, True)):
        x, weight, kind = operands(name, rows)
        if kind == "gated":
            linear_silu_mul.launch(x, weight, resident=resident)
        elif kind.startswith("parts"):
            linear_partials.launch(x, weight, None, int(kind.removeprefix("parts")), resident=resident)
        else:
            linear.launch(x, weight, resident=resident)
    ((tile, config, _, _, dtype, gated, keep_partials),) = launched
    assert tile == ResidentTile(*read_resident_table()[name])
    assert (gated, keep_partials) == (kind == "gated", kind.startswith("parts"))
    assert dtype == (torch.float32 if keep_partials and config.split > 1 else torch.bfloat16)


class Launched:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **given: self.given.append(given)


@pytest.mark.parametrize(
    ("rows", "kept", "resident", "wanted"),
    [(16, None, True, True), (17, None, True, False), (16, None, False, False), (20, 4, True, False)],
)
def test_norms_follow_the_rows_of_the_products_around_them(
    rows: int, kept: int | None, resident: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launched()
    monkeypatch.setattr(norm_module, "add_rms_norm_kernel", kernel)
    x, weight = torch.zeros(rows, 64), torch.zeros(64)
    kept_rows = None if kept is None else torch.arange(kept)
    add_rms_norm.launch(x, x.clone(), weight, 1e-6, kept_rows, resident)
    assert [given["RESIDENT"] for given in kernel.given] == [wanted]


@pytest.mark.parametrize(
    ("requests", "resident", "wanted"), [(4, True, True), (5, True, False), (4, False, False)]
)
def test_a_gated_norm_follows_the_rows_of_the_product_after_it(
    requests: int, resident: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launched()
    monkeypatch.setattr(gdn_triton, "gated_norm_kernel", kernel)
    monkeypatch.setattr(gdn_module, "gdn_verify_kernel", Launched())
    rows, slots = 4 * requests, requests + 1
    qk, v = torch.zeros(2, rows, 1, 16), torch.zeros(rows, 2, 16)
    gates, z = torch.zeros(2, rows, 2), torch.zeros(rows, 32)
    state, ring_k, ring_u = (
        torch.zeros(slots, 2, 16, 16),
        torch.zeros(slots, 1, 8, 16),
        torch.zeros(slots, 2, 8, 16),
    )
    cursors = torch.zeros(2, requests, dtype=torch.int64)
    rings = (state, ring_k, ring_u, torch.zeros(slots, 2, 8), torch.zeros(requests, dtype=torch.int32))
    gdn_verify.launch(*qk, v, *gates, z, torch.zeros(16), *rings, *cursors, 1e-6, "silu", resident)
    assert [given["RESIDENT"] for given in kernel.given] == [wanted]


class OnCpu:
    """Launches a Gluon kernel on a CPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.programs: list[gluon_on_cpu.Program] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(
            *args: Any, num_warps: int, launch_pdl: bool, enable_fp_fusion: bool, **given: Any
        ) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            self.programs += gluon_on_cpu.run(self.kernel, grid, num_warps, **named, **given)

        return launch


# Weight rows that no tile divides, copies of different lengths, one chain and several, split-K partials.
@pytest.mark.parametrize(
    ("rows", "n", "k", "split", "chains", "tile"),
    [
        (1, 40, 128, 1, 1, ResidentTile(32, 64, 1)),
        (4, 70, 896, 1, 1, ResidentTile(64, 256, 2)),
        (8, 32, 512, 2, 2, ResidentTile(16, 128, 1)),
        (9, 52, 1536, 4, 1, ResidentTile(32, 256, 3)),
        (16, 64, 512, 1, 4, ResidentTile(32, 64, 2)),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_adds_up_what_it_should(
    rows: int,
    n: int,
    k: int,
    split: int,
    chains: int,
    tile: ResidentTile,
    gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of these whole numbers are exact; NaN lies between and after the rows of both operands."""
    if gated and split > 1:
        split, chains = 1, split * chains
    kernel = OnCpu(resident_module.resident_kernel)
    monkeypatch.setattr(resident_module, "resident_kernel", kernel)
    config = LinearConfig(16, 64, 64, 4, 2, split, chains, 0)
    x, weight = (
        torch.full((height + 2, k + 16), float("nan"), dtype=torch.bfloat16)[1 : height + 1, :k]
        for height in (rows, n)
    )
    x.copy_(torch.randint(-4, 5, x.shape))
    weight.copy_(torch.randint(-4, 5, weight.shape))
    dtype = torch.bfloat16 if gated else torch.float32
    got = resident_module.launch_resident(tile, config, x, weight, dtype, gated, split > 1)
    # All copies start before the wait, but at most `in_flight` + 1 are in flight at once.
    count = chains * len(tile.pieces(config.part_length(k)))
    assert {program.most_early for program in kernel.programs} == {min(count, tile.in_flight + 1)}
    if gated:
        wanted = linear_silu_mul.reference(x, weight)
        torch.testing.assert_close(got, wanted, rtol=1.6e-2, atol=1e-5)
    elif split == 1:
        assert torch.equal(got, x.float() @ weight.float().T)
    else:
        parts = [
            a.float() @ b.float().T for a, b in zip(x.chunk(split, 1), weight.chunk(split, 1), strict=True)
        ]
        assert torch.equal(got, torch.stack(parts))


def test_a_use_before_the_copy_has_arrived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for a GPU delivers copies at the wait: without the last wait, the result is NaN."""
    monkeypatch.setattr(resident_module, "resident_kernel", OnCpu(resident_module.resident_kernel))
    monkeypatch.setattr(gluon_on_cpu.Program, "wait_group", lambda program, count: None)
    x, weight = torch.ones(2, 128, dtype=torch.bfloat16), torch.ones(32, 128, dtype=torch.bfloat16)
    got = resident_module.launch_resident(
        ResidentTile(32, 64, 1), LinearConfig(16, 64, 64, 4, 2, 1, 1, 0), x, weight, torch.float32
    )
    assert got.isnan().all()
