"""bench_op checks an operator before it times it: the checks pass for the CPU's operators and fail for wrong
ones."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
# The tools' operators with a CPU route fast enough for a test: all products, norms and FP8 operators.
MODULES = ("linear", "linear_w8a8", "quantize_rows", "rms_norm", "silu_mul", "moe_experts")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    shapes = importlib.import_module("op_cases")
    return shapes.ModelShape(
        "tiny", 256, 1, 2, 1, 1, 256, experts=4, top_k=2, expert_intermediate=128, vocab=300
    )


@pytest.mark.parametrize("settings", [{}, {"prefill": 1, "parts": 4}])
@pytest.mark.parametrize("module", MODULES)
def test_cases_are_right(tiny: Any, module: str, settings: dict[str, int]) -> None:
    cases = importlib.import_module(f"op_cases.{module}").cases(tiny, 3, settings)
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels) > 0
    for case in cases:
        args = case.make_inputs("cpu", 0)
        case.call(*args)
        # A CPU rounds the weights of FP8 experts when it dequantises them, a GPU does not.
        if not case.label.endswith("experts fp8"):
            case.check(args)


@pytest.mark.parametrize(
    "module, rows, settings",
    [
        ("gdn_verify", 4, {}),
        ("gdn_prefill", 64, {}),
        ("spec_conv1d", 4, {}),
        ("spec_conv1d", 64, {"prefill": 1}),
        ("moe_router", 3, {}),
        ("paged_attention", 4, {"keys": 100}),
        ("qk_norm_rope_kv_write", 3, {}),
        ("sample", 3, {}),
        ("find_drafts", 3, {"tokens": 300}),
    ],
)
def test_cases_of_operators_that_are_their_specification_here(
    tiny: Any, module: str, rows: int, settings: dict[str, int]
) -> None:
    found = importlib.import_module(f"op_cases.{module}").cases(replace(tiny, vocab=1024), rows, settings)
    assert found
    for case in found:
        case.check(case.make_inputs("cpu", 0))
        if case.alternative is not None:
            case.alternative(*case.make_inputs("cpu", 0))


@pytest.mark.parametrize(
    "module, name, wrong",
    [
        ("linear", "linear_silu_mul", lambda x, w, *rest: torch.ones(3, len(w) // 2).bfloat16()),
        ("linear", "linear_partials", lambda x, w, *rest, **given: torch.ones(1, 3, len(w))),
        ("linear_w8a8", "linear_w8a8", lambda *args: torch.ones(3, len(args[2]))),
        ("linear_w8a8", "linear_w8a8_partials", lambda *args: torch.ones(1, 3, len(args[2]))),
        ("quantize_rows", "quantize_rows", lambda x: (x.to(torch.float8_e4m3fn), torch.full((3, 2), 1.1))),
        ("rms_norm", "add_rms_norm", lambda x, r, *rest: (r, r)),
        ("rms_norm", "add_rms_norm_quantized", lambda x, r, *rest: (r, r, r, torch.ones(3, 2))),
        ("silu_mul", "silu_mul_quantized", lambda x: (x[:, :256].float(), torch.ones(3, 2))),
        ("moe_experts", "moe_experts_w8a8", lambda x, *rest: torch.ones(x.shape)),
    ],
)
def test_a_wrong_operator_is_not_timed(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str, wrong: Any
) -> None:
    loaded = importlib.import_module(f"op_cases.{module}")
    wrong.reference = getattr(loaded, name).reference
    monkeypatch.setattr(loaded, name, wrong)
    refused = 0
    for case in loaded.cases(tiny, 3, {}):
        try:
            case.check(case.make_inputs("cpu", 0))
        except AssertionError:
            refused += 1
    assert refused
