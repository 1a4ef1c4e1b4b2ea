"""moe_experts_w4a16: four-bit experts against a float64 loop over their values, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.blocks import KINDS
from compiled_mtp.ops.int4 import dequantize, pack, unpack
from compiled_mtp.ops.left_config import form_of_int4, form_of_kind
from compiled_mtp.ops.moe_experts import moe_experts_w4a16, moe_hidden_w4a16, moe_sums_w4a16
from compiled_mtp.ops.moe_experts.codes import (
    ExpertTile,
    Stack,
    Tiles,
    launch_experts,
    plain_stages,
    tiles_for,
)
from tests.ops.harness import check_compiles, poisoned_allocations
from tests.ops.left_on_cpu import put_experts_on_cpu
from tests.ops.test_linear_w4a16 import four_bits
from tests.ops.test_moe_experts import loop_float64, relative_error, routing

Case = dict[str, Any]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_experts_on_cpu(monkeypatch)


def stack(experts: int, n: int, k: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The words and groups of random experts."""
    words, groups = zip(*(four_bits(n, k, group, dtype) for _ in range(experts)), strict=True)
    # Values of about 1 / sqrt(k): hidden values of size one.
    return torch.stack(words), torch.stack(groups) * torch.tensor([k**-0.5 * 16, 1.0]).to(dtype)


def case_of(
    rows: int,
    experts: int,
    top_k: int,
    width: int = 128,
    inner: int = 128,
    group: int = 128,
    *,
    is_shared_plain: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Case:
    """Arguments by name. The last expert is the shared one, in codes or plain."""
    torch.manual_seed(rows + width + inner + group)
    weights, ids = routing(rows, experts, top_k)
    count = experts + (not is_shared_plain)
    gate_up, gate_up_scale = stack(count, 2 * inner, width, group, dtype)
    down, down_scale = stack(count, width, inner, group, dtype)
    case: Case = {"x": torch.randn(rows, width).bfloat16(), "weights": weights, "ids": ids}
    case |= {"gate_up": gate_up, "down": down, "gate_up_scale": gate_up_scale, "down_scale": down_scale}
    if is_shared_plain:
        case["shared_gate_up"] = (torch.randn(2 * inner, width) * width**-0.5).bfloat16()
        case["shared_down"] = (torch.randn(width, inner) * inner**-0.5).bfloat16()
    return case


def values_of(case: Case, name: str) -> torch.Tensor:
    """The float32 values of all experts, the shared one last."""
    values = [dequantize(*one) for one in zip(case[name], case[f"{name}_scale"], strict=True)]
    shared = case.get(f"shared_{name}")
    return torch.stack(values if shared is None else [*values, shared.float()])


def exact(case: Case) -> torch.Tensor:
    stacks = [values_of(case, name) for name in ("gate_up", "down")]
    return loop_float64(case["x"], case["weights"], case["ids"], *stacks)


def first_rows(case: Case, rows: int) -> Case:
    return case | {name: case[name][:rows].contiguous() for name in ("x", "weights", "ids")}


@pytest.mark.parametrize("is_shared_plain", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernel_in_interpreter(interpreter: None, group: int, is_shared_plain: bool) -> None:
    """Padded rows of any stride."""
    dtype = torch.bfloat16 if group == 64 else torch.float16
    case = case_of(5, 4, 2, 256, 128, group, is_shared_plain=is_shared_plain, dtype=dtype)
    wide = torch.full((5, 264), float("nan")).bfloat16()
    wide[:, :256] = case["x"]
    with poisoned_allocations():
        got = moe_experts_w4a16.launch(**case | {"x": wide[:, :256]})
    assert got.dtype == torch.bfloat16
    assert relative_error(got, exact(case)) < 5e-3
    assert relative_error(moe_experts_w4a16(**case), exact(case)) < 5e-3


@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_rows_do_not_depend_on_their_company_in_interpreter(interpreter: None, is_shared_plain: bool) -> None:
    """Experts with no pair, one pair, and with many, in tiles of 8, 16, 32 and 64 pairs."""
    case = case_of(129, 12, 2, is_shared_plain=is_shared_plain)
    # Most rows ask one expert, a few the others, and none the last.
    case["ids"][:, 0] = 0
    case["ids"][:, 1] = torch.where(torch.arange(129) % 16 == 0, torch.arange(129) // 16 + 1, 10).int()
    with poisoned_allocations():
        whole = moe_experts_w4a16.launch(**case)
        assert relative_error(whole, exact(case)) < 5e-3
        for rows in (1, 3, 17, 40, 64):
            got = moe_experts_w4a16.launch(**first_rows(case, rows))
            assert torch.equal(got, whole[:rows]), rows


def test_random_routings_have_the_same_bits_in_interpreter(interpreter: None) -> None:
    case = case_of(64, 8, 3)
    whole = moe_experts_w4a16.launch(**case)
    order = torch.randperm(64)
    mixed = case | {name: case[name][order].contiguous() for name in ("x", "weights", "ids")}
    for rows in (1, 3, 16, 17):
        assert torch.equal(moe_experts_w4a16.launch(**first_rows(mixed, rows)), whole[order[:rows]]), rows


def arguments(operator: Any, case: Case) -> Any:
    """What launch_experts takes after the tiles."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        launch = "compiled_mtp.ops.moe_experts.codes.launch_experts"
        patch.setattr(launch, lambda tiles, *args: found.append(args))
        operator.launch(**case)
    return found[0]


@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_tiles_have_the_same_bits_in_interpreter(interpreter: None, is_shared_plain: bool) -> None:
    """A program has one tile or several, and copies chunks of the next while it multiplies one."""
    case = case_of(20, 3, 2, 256, 512, is_shared_plain=is_shared_plain)
    args = arguments(moe_experts_w4a16, case)
    whole = launch_experts(Tiles(ExpertTile(8, 64, 2, 2, 3), ExpertTile(8, 64, 2, 2, 3)), *args)
    assert relative_error(whole, exact(case)) < 5e-3
    for tiles in (
        Tiles(ExpertTile(32, 128, 4, 1, 3), ExpertTile(32, 32, 2, 2, 2)),
        Tiles(ExpertTile(16, 32, 2, 1, 4, tiles=2), ExpertTile(16, 96, 2, 4, 3)),
        # More stages than chunks, and units that are no multiple of a chunk.
        Tiles(ExpertTile(8, 64, 4, 2, 3, tiles=4), ExpertTile(8, 64, 4, 3, 3, tiles=2)),
        Tiles(ExpertTile(64, 256, 8, 3, 2), ExpertTile(64, 64, 4, 1, 5, tiles=4)),
    ):
        with poisoned_allocations():
            assert torch.equal(launch_experts(tiles, *args), whole), tiles


def cut(case: Case, columns: slice) -> Case:
    """The shard of every expert with these hidden columns."""
    inner = case["down"].shape[2] * 4
    rows = [*range(*columns.indices(inner))]
    rows += [inner + row for row in rows]
    group = inner // case["down_scale"].shape[1]
    groups = slice(columns.start // group, columns.stop // group)
    words = [pack(unpack(one)[rows]) for one in case["gate_up"]]
    down = [pack(unpack(one)[:, columns].contiguous()) for one in case["down"]]
    own = {
        "gate_up": torch.stack(words),
        "gate_up_scale": case["gate_up_scale"][:, :, rows].contiguous(),
        "down": torch.stack(down),
        "down_scale": case["down_scale"][:, groups].contiguous(),
    }
    if "shared_down" in case:
        own["shared_gate_up"] = case["shared_gate_up"][rows].contiguous()
        own["shared_down"] = case["shared_down"][:, columns].contiguous()
    return case | own


@pytest.mark.parametrize("pairs", [1, 36, 72, 205, 206, 1152, 2304, 4608, 9216, 18432])
def test_tiles_fit(pairs: int) -> None:
    """The smallest shared memory of a supported GPU, and one tile for nearly every expert."""
    for form in (*map(form_of_kind, KINDS), form_of_int4(torch.float16, 4)):
        stack = Stack(torch.empty(257, 0), torch.empty(0), form, None)
        tiles = tiles_for(pairs, stack, stack)
        assert tiles.gate_up.block_m == tiles.down.block_m >= min(0.7 * pairs / 257, 64)
        for tile in tiles:
            assert tile.block_n % (16 * tile.num_warps) == 0
            assert tile.tiles == 1 or tile.block_n % 32 == 0
            plain = plain_stages(tile, form) * (tile.block_m + tile.block_n) * 64 * 2
            assert max(tile.shared_bytes(form), plain) <= 99 * 1024, form


def test_registration_and_compile() -> None:
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for is_shared_plain in (False, True):
        case = case_of(3, 4, 2, is_shared_plain=is_shared_plain)
        args = (*case.values(), *((None, None) if not is_shared_plain else ()))
        torch.library.opcheck(moe_experts_w4a16.overload, args, test_utils=kinds)
        check_compiles(moe_experts_w4a16, [args])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 128)}, "x must have dtype"),
        ({"down": torch.zeros(5, 128, 31, dtype=torch.int16)}, "must have shape"),
        ({"down_scale": torch.zeros(5, 3, 128, 2).half()}, "down_scale must have groups of 32, 64, 128"),
        ({"gate_up_scale": torch.zeros(5, 1, 256, 2)}, "gate_up_scale must have dtype"),
        ({"shared_down": torch.zeros(128, 128).bfloat16()}, "shared_down must be given with shared_gate_up"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(change: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_experts_w4a16(**case_of(3, 4, 2) | change)


def two_products(case: Case, entry: str) -> torch.Tensor:
    """The sums of two ranks: some hidden columns each, then some rows of down."""
    half, width = case["down"].shape[2] * 2, case["down"].shape[1]
    shards = [cut(case, slice(first, first + half)) for first in (0, half)]
    names = [name for name in ("x", "ids", "gate_up", "gate_up_scale", "shared_gate_up") if name in case]
    hidden = [getattr(moe_hidden_w4a16, entry)(**{name: own[name] for name in names}) for own in shards]
    sums = []
    for rows in (slice(0, 112), slice(112, width)):
        words = torch.stack([pack(unpack(one)[rows]) for one in case["down"]])
        down: list[torch.Tensor] = [words, case["down_scale"][:, :, rows].contiguous()]
        down += [case["shared_down"][rows]] if "shared_down" in case else []
        sums.append(getattr(moe_sums_w4a16, entry)(torch.cat(hidden, 1), case["weights"], case["ids"], *down))
    return torch.cat(sums, 1)


@pytest.mark.parametrize("entry", ["__call__", "launch"])
@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_products_apart_have_the_bits_of_the_whole(
    interpreter: None, is_shared_plain: bool, entry: str
) -> None:
    case = case_of(5, 3, 2, 256, 256, 64, is_shared_plain=is_shared_plain)
    whole = getattr(moe_experts_w4a16, entry)(**case)
    assert relative_error(whole, exact(case)) < 5e-3
    assert torch.equal(two_products(case, entry), whole)


def test_products_apart_are_registered_and_refuse() -> None:
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    case = case_of(3, 4, 2)
    first = (case["x"], case["ids"], case["gate_up"], case["gate_up_scale"], None)
    second = (moe_hidden_w4a16(*first), case["weights"], case["ids"], case["down"], case["down_scale"], None)
    for made, args in ((moe_hidden_w4a16, first), (moe_sums_w4a16, second)):
        torch.library.opcheck(made.overload, args, test_utils=kinds)
        check_compiles(made, [args])
    narrow = (case["gate_up"][:, :128].contiguous(), case["gate_up_scale"][:, :, :128].contiguous())
    with pytest.raises(ValueError, match="gate_up must have a multiple of 256 rows, got 128"):
        moe_hidden_w4a16(*first[:2], *narrow)
    few = (case["down"][:, :24].contiguous(), case["down_scale"][:, :, :24].contiguous())
    with pytest.raises(ValueError, match="down must have a multiple of 16 rows, got 24"):
        moe_sums_w4a16(*second[:3], *few)
