"""Every kernel compiles for the GPUs that we claim, within recorded resources; Triton's compiler needs no
GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.ops.device import shared_bytes_of

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "kernel_table.py"
SOURCES = (TOOL, TOOL.with_name("record_launches.py"), *(ROOT / "tools" / "op_cases").glob("*.py"))
TABLE = ROOT / "tests" / "ops" / "kernel_table.json"
OPERATORS = sorted(path.parent.name for path in (ROOT / "ops").glob("*/kernel.py"))

FP8_CAPABILITY = 89
# Kernels that older GPUs cannot run: these GPUs have no conversion to e4m3.
WITH_FP8_PRODUCTS = {"linear_w8a8", "quantize_rows", "gate_up_w8a8", "down_w8a8", "silu_mul_quantized"}
# Launched from Hopper on: older GPUs have no copy engine.
WITH_COPY_ENGINE = {"large_m", "large_m_w8a8", "resident", "gdn_many"}

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")


def start_compiler(capabilities: list[int], operators: list[str], *flags: str) -> subprocess.Popen[str]:
    """Start the compiler in a process without the interpreter: with it, kernels cannot be compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        str(TOOL),
        *flags,
        "--capabilities",
        *map(str, capabilities),
        "--operators",
        *operators,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err[-4000:]
    # Triton prints the assembler's messages before the JSON line.
    return json.loads(out.splitlines()[-1])


def cache_key(operator: str, capability: int) -> str:
    """Return a key that changes with the Triton version and with every file of the operator's kernels."""
    digest = hashlib.sha256(f"{triton.__version__} {sys.version} {capability}".encode())
    for path in sorted([*SOURCES, *(ROOT / "ops").glob("*.py"), *(ROOT / "ops" / operator).glob("*.*")]):
        digest.update(path.read_bytes())
    return f"{operator}-{digest.hexdigest()}.json"


@pytest.fixture(scope="module")
def first_configurations(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """One configuration per kernel for sm_80 and sm_90, by operator; cached by a hash of the sources."""
    cache = request.config.cache.mkdir("kernels")
    wanted = [(name, capability) for name in OPERATORS for capability in (80, 90)]
    missing = [pair for pair in wanted if not (cache / cache_key(*pair)).exists()]
    running = {
        capability: start_compiler([capability], names, "--first")
        for capability in (80, 90)
        if (names := [name for name, c in missing if c == capability])
    }
    fresh = {key: value for process in running.values() for key, value in finish(process).items()}
    tables: dict[str, dict[str, Any]] = {name: {} for name in OPERATORS}
    for name, capability in wanted:
        path = cache / cache_key(name, capability)
        if (name, capability) not in missing:
            tables[name].update(json.loads(path.read_text()))
            continue
        part = {
            key: value
            for key, value in fresh.items()
            if key.startswith(f"{name}/") and key.endswith(f"@sm_{capability}")
        }
        tables[name].update(part)
        if not any("error" in value for value in part.values()):
            path.write_text(json.dumps(part))
    return tables


def shared_bytes_for(key: str) -> int:
    """Return the bytes of shared memory per program on the GPU that a configuration was compiled for."""
    capability = int(key.rpartition("_")[2])
    return shared_bytes_of(divmod(capability, 10))


def check_resources(table: dict[str, dict[str, Any]]) -> None:
    """Check that every configuration compiles and fits into its GPU."""
    too_large = {
        key: value for key, value in table.items() if value.get("shared_bytes", 0) > shared_bytes_for(key)
    }
    assert not too_large, f"no GPU of the kind has so much shared memory: {too_large}"
    errors = {key: value["error"] for key, value in table.items() if "error" in value}
    assert not errors, "\n".join(f"{key}: {text}" for key, text in errors.items())


def kernels_of(operator: str) -> set[str]:
    """Names of the kernels in an operator's folder, without "_kernel"."""
    text = "".join(path.read_text() for path in (ROOT / "ops" / operator).glob("*kernel.py"))
    names = set(re.findall(r"^def (\w+)_kernel\(", text, re.MULTILINE))
    assert names, f"{operator} must have kernels named *_kernel"
    return names


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_configuration_per_kernel_compiles(
    operator: str, first_configurations: dict[str, dict[str, Any]]
) -> None:
    table = first_configurations[operator]
    for capability in (80, 90):
        missing = {
            kernel
            for kernel in kernels_of(operator)
            if not any(
                key.startswith(f"{operator}/{kernel}-") and key.endswith(f"@sm_{capability}") for key in table
            )
        }
        if capability < FP8_CAPABILITY:
            missing -= WITH_FP8_PRODUCTS
        if capability < 90:
            missing -= WITH_COPY_ENGINE
        assert not missing, f"tools/op_cases must call what launches {missing} on sm_{capability}"
    errors = {key: value["error"] for key, value in table.items() if "error" in value}
    assert not errors, "\n".join(f"{key}: {text}" for key, text in errors.items())


@pytest.mark.kernels
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operator", OPERATORS)
def test_full_table_stays_within_recorded_resources(operator: str) -> None:
    recorded = json.loads(TABLE.read_text())
    limits = {k: v for k, v in recorded.get(triton.__version__, {}).items() if k.startswith(f"{operator}/")}
    if not limits:
        pytest.fail(
            f"{TABLE.name} must hold {operator} for Triton {triton.__version__}, got {sorted(recorded)}; "
            f"run python tools/kernel_table.py --record --operators {operator} and review the difference"
        )
    table = finish(start_compiler([80, 90, 100], [operator]))
    check_resources(table)
    assert sorted(table) == sorted(limits), "the recorded table names other configurations: record it again"
    above = {
        key: f"{resource} {value[resource]}, recorded {limits[key][resource]}"
        for key, value in table.items()
        for resource in value
        if value[resource] > limits[key][resource]
    }
    assert not above, "\n".join(f"{key}: {text}" for key, text in above.items())


def test_attention_fits_into_the_least_shared_memory() -> None:
    """The least is 99 KiB, on a GeForce and an L40S; heads have 256 dims, as in all releases."""
    table = finish(start_compiler([89], ["paged_attention"], "--first"))
    assert any("prefill-24-4-256" in key for key in table)
    check_resources(table)


# resolve_recipe chooses linear_w8a8 only on GPUs with more shared memory.
@pytest.mark.kernels
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [86, 89, 120])
@pytest.mark.parametrize("operator", sorted(set(OPERATORS) - {"linear_w8a8"}))
def test_every_configuration_fits_into_the_least_shared_memory(operator: str, capability: int) -> None:
    check_resources(finish(start_compiler([capability], [operator])))


def test_several_processes_compile_what_one_does(
    first_configurations: dict[str, dict[str, Any]],
) -> None:
    """Each process compiles its part, and none is compiled twice."""
    operators = ["quantize_rows", "silu_mul"]
    both = first_configurations["quantize_rows"] | first_configurations["silu_mul"]
    alone = {key: value for key, value in both.items() if key.endswith("@sm_90")}
    assert finish(start_compiler([90], operators, "--first", "--jobs", "2")) == alone
    assert len(alone) > 2
