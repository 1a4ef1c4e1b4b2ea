"""Every operator folder registers what it promises; the switch to references; the one import name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compiled_mtp.ops import registry

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent.name for path in (ROOT / "ops").glob("*/reference.py"))
MUTATED = {
    "qk_norm_rope_kv_write": {"kv", "kv_scale"},
    "spec_conv1d": {"conv_ring"},
    "conv_prefill": {"conv_ring"},
    "gdn_verify": {"state", "ring_k", "ring_u", "ring_g"},
    "gdn_prefill": {"state"},
    "accept_window": {"base", "pos", "last_token"},
}


@pytest.fixture(scope="module")
def operators() -> list[str]:
    for folder in FOLDERS:
        importlib.import_module(f"compiled_mtp.ops.{folder}")
    return sorted(registry._OPERATORS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_three_files(folder: str) -> None:
    files = {path.name for path in (ROOT / "ops" / folder).glob("*.py")}
    assert {"__init__.py", "reference.py", "kernel.py"} <= files


def test_every_operator_serves_both_devices_and_tracing(operators: list[str]) -> None:
    assert len(operators) >= len(FOLDERS)
    for name in operators:
        qualified = f"compiled_mtp::{name}"
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key), (
                f"{name} has no {key} kernel"
            )


def test_schemas_declare_exactly_what_is_mutated(operators: list[str]) -> None:
    for name in operators:
        schema = getattr(torch.ops.compiled_mtp, name).default._schema
        mutated = {argument.name for argument in schema.arguments if argument.is_write}
        assert mutated == MUTATED.get(name, set()), name


@pytest.fixture
def on_kernels() -> Iterator[None]:
    yield
    registry.use_reference([])


def test_reference_switch_refuses_unknown_names(operators: list[str], on_kernels: None) -> None:
    with pytest.raises(ValueError, match=r"reference_ops must name operators, got \['nonesuch'\]"):
        registry.use_reference(["linear", "nonesuch"])
    assert not registry._ON_REFERENCE
    registry.use_reference(["linear"])
    assert sorted(registry._ON_REFERENCE) == ["linear"]
    registry.use_reference(["silu_mul"])
    assert sorted(registry._ON_REFERENCE) == ["silu_mul"]


def test_operators_import_without_triton() -> None:
    imports = "; ".join(f"import compiled_mtp.ops.{folder}" for folder in FOLDERS)
    code = f"import sys; {imports}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_second_import_name() -> None:
    code = "import sys; sys.path.insert(0, '.'); import ops"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "import compiled_mtp.ops, not ops" in result.stderr
