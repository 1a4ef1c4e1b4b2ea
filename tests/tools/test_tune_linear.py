"""What the tuner times: candidates that change no bit before a norm, and only the weights that are named."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.ops.shares import share_count

TOOLS = Path(__file__).parents[2] / "tools"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("tune_linear")


@pytest.mark.parametrize("n, k", [(5120, 17408), (5120, 6144), (2560, 9216), (1024, 3584)])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_before_a_norm_no_candidate_changes_a_bit(tool: Any, n: int, k: int, dtype: torch.dtype) -> None:
    found = tool.candidates(n, k, dtype, True)
    assert found
    assert {config.split * config.chains for config in found} == {share_count(k)}
    assert all(config.is_even(k) for config in found)


def test_one_kernel_is_compiled_once(tool: Any) -> None:
    down = tool.kernels_of(5120, 17408, BF16, True, 4, 90)
    assert {kernel.config for kernel in down.values()} == set(tool.candidates(5120, 17408, BF16, True))
    # The weight's size makes no other kernel of the configurations that both have.
    both = down | tool.kernels_of(5120, 6144, BF16, True, 4, 90)
    assert len(both) < len(down) + len(tool.candidates(5120, 6144, BF16, True))


def test_only_the_named_weights(tool: Any) -> None:
    assert tool.wanted_sizes("27b", BF16, ["down", "gdn_out"]) == {
        "gdn_out": (5120, 6144),
        "down": (5120, 17408),
    }
    assert "lm_head" in tool.wanted_sizes("27b", BF16, None)
    assert "lm_head" not in tool.wanted_sizes("27b", FP8, None)
