"""Graph caches of ranks: every rank finds its own programs, and compiles nothing, without a compiler even."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.parallel import leader
from compiled_mtp.parallel.exchange import Exchange
from tests.checkpoints import write_checkpoint
from tests.parallel.threads import exchanges

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "device": "cpu",
    "mtp_step": 0,
    "max_batch": 1,
    "prefill_chunk": 64,
    "max_model_len": 128,
    "num_threads": 1,
    "tensor_parallel": 2,
}
# A rank that had to compile would find no compiler.
SECOND_PROCESS = """
import json, sys
from compiled_mtp import Engine, EngineConfig, SamplingParams
from torch._dynamo.utils import counters
import torch
params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
tokens = {}
for options in json.loads(sys.argv[1]):
    with Engine(EngineConfig(**options)) as engine:
        with torch.compiler.set_stance("fail_on_recompile" if engine.is_compiled else "default"):
            tokens[engine.is_compiled] = engine.generate([list(range(70))], params)[0].new_token_ids
print(json.dumps([tokens[True] == tokens[False], counters["stats"]["calls_captured"]]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "interval": 2, "hidden_size": 64, "intermediate_size": 64}
    return write_checkpoint(tmp_path_factory.mktemp("ranks"), **sizes)


def environment_of(directory: Path, path: str) -> dict[str, str]:
    left_out = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "empty"),
    }


@pytest.fixture(scope="module")
def graph_cache(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("caches")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    places = [f"--model={checkpoint}", f"--out={directory / 'graphs.zip'}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "export_graphs.py"), *flags, *places],
        capture_output=True,
        text=True,
        check=False,
        env=environment_of(directory, os.environ["PATH"]),
    )
    assert done.returncode == 0, done.stderr
    return directory / "graphs.zip"


def test_ranks_compile_nothing_and_decode_what_they_do_uncompiled(
    checkpoint: Path, graph_cache: Path, tmp_path: Path
) -> None:
    """Also of an engine behind another in its process: programs know their exchange by who calls them."""
    key = read_key(graph_cache)
    assert (key["tensor_parallel"], key["exchange"]) == (2, "gloo")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("env", "sh", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    plain = SHAPE | {"model": str(checkpoint)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SECOND_PROCESS,
            json.dumps([plain, plain | {"graph_cache": str(graph_cache)}]),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment_of(tmp_path, str(tools)),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 0]


@pytest.mark.parametrize("world", [1, 4])
def test_a_cache_of_another_number_of_ranks_is_refused_by_name(
    checkpoint: Path, graph_cache: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """Before any rank starts."""
    monkeypatch.delattr(leader, "Ranks")
    given = SHAPE | {"model": checkpoint, "graph_cache": graph_cache, "tensor_parallel": world}
    message = f"^graph_cache must be made for tensor_parallel={world}, got 2 in .*graphs.zip; export it"
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(**given))


def test_an_open_program_exchanges_by_its_caller() -> None:
    one, other = exchanges(1)[0], exchanges(1)[0]
    came: list[Exchange] = []
    for exchange in (one, other):
        exchange._gather = lambda x, exchange=exchange: came.append(exchange) or x[None]  # type: ignore
    with one.left_open():
        number = one._number

    def program(x: torch.Tensor) -> Any:
        return torch.ops.compiled_mtp.exchange(x, 1, number)

    x = torch.zeros(1)
    one.calls(lambda x: (program(x), other.calls(program)(x), program(x)))(x)
    one.gather(x)
    assert came == [one, other, one, one]
