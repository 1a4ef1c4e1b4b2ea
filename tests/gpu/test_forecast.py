"""On a GPU: an engine in a limited process has the slots and tokens that `inspect` foretells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.cli.main import main
from tests.checkpoints import write_checkpoint
from tests.gpu.test_scaled_codes import write

pytestmark = pytest.mark.gpu

# Starts an engine in the share of the GPU, and prints its plan as `inspect` does.
ENGINE = """
import sys, torch
from compiled_mtp import Engine, EngineConfig
from compiled_mtp.cli.inspect import describe_caches
gib = float(sys.argv[2])
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
config = EngineConfig(model=sys.argv[1], device="cuda", compile="off", graph_mode="off")
with Engine(config) as engine:
    print("\\n".join(describe_caches(engine.runner.spec, engine.runner.memory)))
"""
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 4, "vocab_size": 65536}


@pytest.mark.parametrize("gib", [2, 5])
@pytest.mark.parametrize("name", ["bfloat16", "medium", "nvfp4"])
def test_an_engine_has_what_inspect_foretells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, gib: int
) -> None:
    if name == "bfloat16":
        model = write_checkpoint(tmp_path / "model", **WIDE)
    else:
        model = write(tmp_path / "model", name)
    command = [sys.executable, "-c", ENGINE, str(model), str(gib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    major, minor = torch.cuda.get_device_capability()
    flags = ["--memory-gib", str(gib), "--compute-capability", f"{major}.{minor}"]
    assert main(["inspect", str(model), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == done.stdout.splitlines()[-2:]
