"""Graph caches of ranks: every rank finds its own programs, and compiles nothing, without a compiler even."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.parallel import leader
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.communicators.threads import thread_communicators
from tests.graphs.quickly import EXPORT_QUICKLY

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
PROMPT = list(range(70))
PARAMS: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 1, "ignore_eos": True}
# Every rank does it.
FIRST_PROCESS = f"""
import sys
from compiled_mtp.cli.export import main
from compiled_mtp.parallel import ranks
quickly = {EXPORT_QUICKLY!r}
exec(quickly)
first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
ranks._CODE = first + quickly + import_main + call
sys.exit(main(sys.argv[1:]))
"""
# It imports what it needs while the first one works. A rank that had to compile would find no compiler.
SECOND_PROCESS = """
import gc, json, sys
gc.disable()
from compiled_mtp import Engine, EngineConfig, SamplingParams
from torch._dynamo.utils import counters
import torch
import compiled_mtp.parallel.leader
options, prompt, params = json.loads(sys.stdin.readline())
with Engine(EngineConfig(**options)) as engine, torch.compiler.set_stance("fail_on_recompile"):
    assert engine.is_compiled
    tokens = engine.generate([prompt], SamplingParams(**params))[0].new_token_ids
print(json.dumps([tokens, counters["stats"]["calls_captured"]]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 1, "interval": 1, "hidden_size": 64, "intermediate_size": 64}
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
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }


@pytest.fixture(scope="module")
def second_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    directory = tmp_path_factory.mktemp("second")
    tools = directory / "bin"
    tools.mkdir()
    for name in ("env", "sh", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = environment_of(directory, str(tools))
    with subprocess.Popen(
        [sys.executable, "-c", SECOND_PROCESS], **pipes, text=True, env=environment
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def graph_cache(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("caches")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    places = [f"--model={checkpoint}", f"--output={directory / 'graphs.zip'}"]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PROCESS, *flags, *places],
        capture_output=True,
        text=True,
        check=False,
        env=environment_of(directory, os.environ["PATH"]),
    )
    assert done.returncode == 0, done.stderr
    return directory / "graphs.zip"


def test_ranks_compile_nothing_and_decode_what_one_does_uncompiled(
    checkpoint: Path, second_process: subprocess.Popen[str], graph_cache: Path
) -> None:
    key = read_key(graph_cache)
    assert (key["tensor_parallel"], key["communicator"]) == (2, "gloo")
    options = SHAPE | {"model": str(checkpoint)}
    given = [options | {"graph_cache": str(graph_cache)}, PROMPT, PARAMS]
    out, errors = second_process.communicate(json.dumps(given), timeout=100)
    assert second_process.returncode == 0, errors
    with Engine(EngineConfig(**options | {"tensor_parallel": 1, "compile": "off"})) as engine:
        tokens = engine.generate([PROMPT], SamplingParams(**PARAMS))[0].new_token_ids
    assert json.loads(out.splitlines()[-1]) == [tokens, 0]


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


def test_an_unbound_program_uses_its_callers_communicator() -> None:
    one, other = thread_communicators(1)[0], thread_communicators(1)[0]
    came: list[Communicator] = []
    for communicator in (one, other):
        communicator._gather = lambda x, communicator=communicator: came.append(communicator) or x[None]  # type: ignore
    with one.unbound():
        number = one._number

    def program(x: torch.Tensor) -> Any:
        return torch.ops.compiled_mtp.gather(x, 1, number)

    x = torch.zeros(1)
    one.bind(lambda x: (program(x), other.bind(program)(x), program(x)))(x)
    one.gather(x)
    assert came == [one, other, one, one]
