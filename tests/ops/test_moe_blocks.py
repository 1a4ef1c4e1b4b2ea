"""moe_experts_blocks: experts in scaled codes against a float64 loop over their values, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.blocks import KINDS, products
from compiled_mtp.ops.moe_experts import moe_experts_blocks
from compiled_mtp.ops.moe_experts.codes import ExpertTile, Tiles, launch_experts
from tests.ops.harness import check_compiles, poisoned_allocations
from tests.ops.left_on_cpu import put_experts_on_cpu
from tests.ops.test_linear_blocks import scaled_codes
from tests.ops.test_moe_experts import loop_float64, relative_error, routing
from tests.ops.test_moe_w4a16 import arguments

Case = dict[str, Any]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_experts_on_cpu(monkeypatch)


# Pairs of kinds: that of gate and up, and that of down.
KIND_PAIRS = (
    *(("Q4_K", "Q6_K"), ("Q5_K", "Q5_K"), ("Q8_0", "Q4_0")),
    *(("IQ4_XS", "IQ4_XS"), ("MXFP4", "Q8_0"), ("NVFP4", "NVFP4")),
)


def case_of(
    rows: int, experts: int, top_k: int, width: int, inner: int, kinds: tuple[str, str] = ("Q4_K", "Q6_K")
) -> Case:
    """Arguments by name; the last expert is the shared one, which is plain."""
    torch.manual_seed(rows + width + inner)
    weights, ids = routing(rows, experts, top_k)
    case: Case = {"x": torch.randn(rows, width).bfloat16(), "weights": weights, "ids": ids}
    sizes = {"gate_up": (2 * inner, width, kinds[0]), "down": (width, inner, kinds[1])}
    for name, (n, k, kind) in sizes.items():
        stack = [scaled_codes(kind, n, k) for _ in range(experts)]
        case[name] = torch.stack([words for words, _, _ in stack])
        case[f"{name}_scale"] = torch.stack([scales for _, scales, _ in stack])
        case[f"shared_{name}"] = (torch.randn(n, k) * k**-0.5).bfloat16()
        case[f"{name}_kind"] = kind
    return case


def values_of(case: Case, name: str) -> torch.Tensor:
    """The values of all experts as products take them, the shared one last."""
    values = []
    for words, scales in zip(case[name], case[f"{name}_scale"], strict=True):
        found, factor = products(words, scales, KINDS[case[f"{name}_kind"]])
        found = found.bfloat16().double()
        values.append(found if factor is None else found * factor[:, None].double())
    return torch.stack([*values, case[f"shared_{name}"].double()])


def exact(case: Case) -> torch.Tensor:
    stacks = [values_of(case, name) for name in ("gate_up", "down")]
    return loop_float64(case["x"], case["weights"], case["ids"], *stacks)


def first_rows(case: Case, rows: int) -> Case:
    return case | {name: case[name][:rows].contiguous() for name in ("x", "weights", "ids")}


@pytest.mark.parametrize("kinds", KIND_PAIRS, ids=[" and ".join(pair) for pair in KIND_PAIRS])
def test_kernel_in_interpreter(interpreter: None, kinds: tuple[str, str]) -> None:
    """Padded rows of any stride."""
    case = case_of(5, 3, 2, 256, 128, kinds)
    wide = torch.full((5, 264), float("nan")).bfloat16()
    wide[:, :256] = case["x"]
    with poisoned_allocations():
        got = moe_experts_blocks.launch(**case | {"x": wide[:, :256]})
    assert relative_error(got, exact(case)) < 5e-3
    assert relative_error(moe_experts_blocks(**case), exact(case)) < 5e-3


def test_rows_do_not_depend_on_their_company_in_interpreter(interpreter: None) -> None:
    """Experts with no pair, one pair, and with many, in tiles of 8, 16 and 64 pairs."""
    case = case_of(33, 3, 2, 128, 512)
    case["ids"][:, 0] = 0
    case["ids"][:, 1] = torch.where(torch.arange(33) % 16 == 0, 1, 2).int()
    with poisoned_allocations():
        whole = moe_experts_blocks.launch(**case)
        assert relative_error(whole, exact(case)) < 5e-3
        for rows in (1, 13):
            got = moe_experts_blocks.launch(**first_rows(case, rows))
            assert torch.equal(got, whole[:rows]), rows


@pytest.mark.parametrize("kinds", [("Q5_K", "Q8_0"), ("NVFP4", "Q6_K")])
def test_tiles_have_the_same_bits_in_interpreter(interpreter: None, kinds: tuple[str, str]) -> None:
    args = arguments(moe_experts_blocks, case_of(4, 2, 1, 256, 512, kinds))
    whole = launch_experts(Tiles(ExpertTile(8, 64, 2, 2, 3), ExpertTile(8, 64, 2, 2, 3)), *args)
    for tiles in (
        Tiles(ExpertTile(8, 64, 4, 1, 3, tiles=2), ExpertTile(8, 64, 4, 3, 2, tiles=4)),
        Tiles(ExpertTile(16, 128, 4, 1, 3), ExpertTile(16, 128, 4, 3, 2, tiles=2)),
        Tiles(ExpertTile(64, 32, 2, 1, 4), ExpertTile(64, 256, 8, 1, 3)),
    ):
        assert torch.equal(launch_experts(tiles, *args), whole), tiles


def test_registration_and_compile() -> None:
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    case = case_of(3, 2, 2, 128, 128)
    names = ("x", "weights", "ids", "gate_up", "down", "gate_up_scale", "down_scale")
    names += ("shared_gate_up", "shared_down", "gate_up_kind", "down_kind")
    args = tuple(case[name] for name in names)
    torch.library.opcheck(moe_experts_blocks.overload, args, test_utils=kinds)
    check_compiles(moe_experts_blocks, [args])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 128)}, "x must have dtype"),
        ({"down_kind": "Q2_K"}, "down_kind must be one of Q4_K"),
        ({"down_kind": "Q4_K"}, "down must have 32 words per 128 of 128 columns"),
        (
            {"gate_up_scale": torch.zeros(2, 3, 256, 5).short()},
            "gate_up_scale must have 1 units",
        ),
        ({"shared_down": torch.zeros(128, 64).bfloat16()}, "must have shape"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(change: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_experts_blocks(**case_of(3, 2, 2, 128, 128) | change)
