"""Every operator folder registers what it declares; the switch to references; the one import name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compiled_mtp.ops import registry
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, I64, Like, Remedy, Signature

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent.name for path in (ROOT / "ops").glob("*/reference.py"))
MUTATED = {
    "qk_norm_rope_kv_write": {"kv", "kv_scale"},
    "spec_conv1d": {"conv_ring"},
    "conv_prefill": {"conv_ring"},
    "gdn_verify": {"state", "ring_k", "ring_u", "ring_g"},
    "gdn_prefill": {"state"},
    "recorded_router": {"record"},
    "accept_window": {"base", "pos", "last_token", "output_counts", "recent_ids", "token_ids"},
    "find_drafts": {"drafts", "matched", "threshold", "chain_kept"},
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


class Pair(NamedTuple):
    left: Annotated[Tensor, "M N", ACTIVATION]
    right: Annotated[Tensor, "M|0 _", Like("left"), Remedy("mind the right")]


class Sums(NamedTuple):
    total: Annotated[Tensor, "M", Like("left")]
    flat: Annotated[Tensor, "M*N+extra 2", I64]


def specification(
    weight: Annotated[Tensor, "2*N", F32, CONTIGUOUS],
    pair: Pair,
    option: Annotated[Tensor, "... N", F32] | None,
    extra: int,
    scale: float = 1.0,
) -> Sums:
    raise NotImplementedError


def rule(N: int, extra: int) -> None:
    if extra > N:
        raise ValueError("extra must be at most N")


def made_functions() -> tuple[Signature, list[tuple[object, ...]], tuple[object, ...]]:
    signature, seen = Signature(specification), list[tuple[object, ...]]()

    def overload(*flat: object) -> tuple[object, object]:
        seen.append(flat)
        return "total", "flat"

    def on_cpu(weight: Tensor, pair: Pair, option: Tensor | None, extra: int, scale: float) -> Sums:
        return Sums(*overload(weight, *pair, option, extra, scale))  # type: ignore[arg-type]

    return signature, seen, signature.functions(overload, lambda: on_cpu, rule, None)


def valid() -> dict[str, object]:
    pair = Pair(torch.zeros(3, 4).bfloat16(), torch.zeros(0, 9).bfloat16())
    return {"weight": torch.zeros(8), "pair": pair, "option": None, "extra": 2}


def test_a_schema_is_flat_and_says_what_is_mutated() -> None:
    assert Signature(specification).schema(("right", "option")) == (
        "specification(Tensor weight, Tensor left, Tensor(a2!) right, Tensor(a3!)? option, SymInt extra, "
        "float scale) -> (Tensor, Tensor)"
    )
    with pytest.raises(TypeError, match="mutates must name tensors of specification"):
        Signature(specification).schema(("pair",))


def test_a_plain_tensor_on_a_cpu_bypasses_the_dispatcher_unless_watched() -> None:
    seen: list[str] = []

    def twice(x: Annotated[Tensor, "N", F32]) -> Annotated[Tensor, "N", F32]:
        seen.append("direct")
        return 2.0 * x

    def overload(x: Tensor) -> Tensor:
        seen.append("dispatched")
        return x

    call = Signature(twice).functions(overload, lambda: twice, None, None)[0]
    call(torch.ones(2))
    with FlopCounterMode(display=False):
        call(torch.ones(2))
    call(torch.ones(2, device="meta"))
    assert seen == ["direct", "dispatched", "dispatched"]


def test_a_call_flattens_records_and_names_its_results() -> None:
    _, seen, (call, fake, nest) = made_functions()
    given = valid()
    assert call(**given) == Sums("total", "flat")  # type: ignore[operator]
    assert [type(value).__name__ for value in seen[0]] == ["Tensor"] * 3 + ["NoneType", "int", "float"]
    assert nest(*seen[0]).pair is not given["pair"]  # type: ignore[operator]
    assert nest(*seen[0])._asdict() == {**given, "scale": 1.0}  # type: ignore[operator]
    total, flat = fake(*seen[0])  # type: ignore[operator]
    assert (total.shape, total.dtype) == ((3,), torch.bfloat16)
    assert (flat.shape, flat.dtype) == ((14, 2), torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9)}, r"weight must have shape \[8\], got \[9\]; compare its docstring"),
        ({"weight": torch.zeros(16)[::2]}, r"weight must be contiguous, got \[2\]; make it contiguous"),
        ({"weight": torch.zeros(8).double()}, r"weight must have dtype torch.float32, got torch.float64"),
        ({"pair": Pair(torch.zeros(3), torch.zeros(3, 1))}, r"left must have shape \[M, N\], got \[3\]"),
        (
            {"pair": Pair(torch.zeros(4, 3).t(), torch.zeros(3, 1))},
            "left must have a last dimension of stride 1",
        ),
        ({"pair": Pair(torch.zeros(3, 4), torch.zeros(2, 1))}, r"right must have shape \[3 or 0, _\]"),
        (
            {"pair": Pair(torch.zeros(3, 4), torch.zeros(3, 1).double())},
            "right must have dtype torch.float32",
        ),
        ({"option": torch.zeros(7, 7, 5)}, r"option must have shape \[..., 4\], got \[7, 7, 5\]"),
        ({"extra": 5}, "extra must be at most N"),
    ],
)
def test_a_call_is_checked_against_the_annotations(change: dict[str, object], message: str) -> None:
    call = made_functions()[2][0]
    with pytest.raises(ValueError, match=message):
        call(**valid() | change)  # type: ignore[operator]
    assert call(**valid() | {"option": torch.zeros(7, 7, 4)}) is not None  # type: ignore[operator]


def test_a_declaration_that_cannot_work_is_refused() -> None:
    def unknown(x: Annotated[Tensor, "2*K", F32]) -> Annotated[Tensor, "K", F32]:
        raise NotImplementedError

    def untyped(x: Tensor) -> Annotated[Tensor, "K", F32]:
        raise NotImplementedError

    with pytest.raises(AssertionError, match="unknown dimensions"):
        Signature(unknown).functions(None, lambda: print, None, None)
    with pytest.raises(TypeError, match="x must be an Annotated"):
        Signature(untyped)
