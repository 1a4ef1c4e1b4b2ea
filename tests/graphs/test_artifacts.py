"""Graph caches: a second process compiles nothing, without a compiler even; a wrong one is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.artifacts import read_key, source_digest
from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
SHAPE = {"mtp_step": 0, "max_batch": 1, "prefill_chunk": 64, "max_model_len": 128, "num_threads": 1}

SECOND_PROCESS = """
import json, sys
from compiled_mtp import Engine, EngineConfig, SamplingParams
from torch._dynamo.utils import counters
import torch
given = json.loads(sys.argv[1])
engine = Engine(EngineConfig(device="cpu", **given))
with torch.compiler.set_stance("fail_on_recompile" if engine.runner.programs.mode else "default"):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = engine.generate([[1, 2, 3]], params)[0].new_token_ids
print(json.dumps({
    "tokens": tokens,
    "mode": engine.runner.programs.mode,
    "inductor": dict(counters["inductor"]),
    "traced": counters["stats"]["calls_captured"],
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cached")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture(scope="module")
def graph_cache(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("caches") / "graphs.zip"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    command = [sys.executable, str(ROOT / "tools" / "export_graphs.py"), "--device=cpu", *flags]
    done = subprocess.run(
        [*command, f"--model={checkpoint}", f"--out={file}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shapes"] == 3
    return file


def run_second(directory: Path, given: dict[str, object]) -> dict[str, object]:
    """A process that finds no C++ compiler."""
    tools = directory / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("env", "sh", "cat"):
        link, found = tools / name, shutil.which(name)
        assert found is not None
        if not link.exists():
            link.symlink_to(found)
    environment = os.environ | {"PATH": str(tools), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET"):
        environment.pop(name, None)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "empty")
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_without_a_compiler(
    checkpoint: Path, graph_cache: Path, tmp_path: Path
) -> None:
    plain = run_second(tmp_path, {"model": str(checkpoint), **SHAPE})
    assert plain["mode"] is None
    cached = run_second(tmp_path, {"model": str(checkpoint), "graph_cache": str(graph_cache), **SHAPE})
    assert cached["mode"] == "replay"
    assert cached["tokens"] == plain["tokens"]
    assert cached["traced"] == 0
    assert "fxgraph_cache_miss" not in cached["inductor"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_step": 2}, r"graph_cache must be made for .*=.*, got .* in"),
        ({"max_model_len": 96}, "graph_cache must be made for max_model_len=96, got 128"),
        ({"dtype": "bfloat16"}, "graph_cache must be made for dtype='bfloat16', got 'float32'"),
        ({"num_blocks": 9}, "graph_cache must be made for num_blocks=9, got 3"),
    ],
)
def test_a_cache_for_other_settings_is_refused_by_name(
    checkpoint: Path, graph_cache: Path, change: dict[str, object], message: str
) -> None:
    given = {"model": checkpoint, "device": "cpu", "graph_cache": graph_cache, **SHAPE, **change}
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(**given))


def test_a_cache_for_another_model_or_torch_is_refused_by_name(
    checkpoint: Path, graph_cache: Path, tmp_path: Path
) -> None:
    given = {"device": "cpu", **SHAPE}
    other = write_checkpoint(tmp_path / "other", hidden_size=128, num_value_heads=1, intermediate_size=64)
    with pytest.raises(ValueError, match=r"graph_cache must be made for model\.hidden_size=128, got 64"):
        Engine(EngineConfig(model=other, graph_cache=graph_cache, **given))
    older = tmp_path / "older.zip"
    key = read_key(graph_cache) | {"torch": "2.0.0"}
    with zipfile.ZipFile(older, "w") as archive:
        archive.writestr("key.json", json.dumps(key))
    with pytest.raises(ValueError, match=r"graph_cache must be made for torch=.*, got '2\.0\.0'"):
        Engine(EngineConfig(model=checkpoint, graph_cache=older, **given))


def test_a_cache_of_other_source_or_tensors_is_refused_by_name(
    checkpoint: Path, graph_cache: Path, tmp_path: Path
) -> None:
    """Saved programs are not traced again, so nothing else would notice."""
    given = {"model": checkpoint, "device": "cpu", **SHAPE}
    changes = {
        "key.json": ('"source": "', '"source": "0', r"graph_cache must be made for source='\w+', got '0\w+'"),
        "programs/layout.json": (
            '"slots.pos": [[2]',
            '"slots.pos": [[9]',
            r"graph_cache must be made for slots\.pos=\[\[2\], .*, got \[\[9\], ",
        ),
    }
    for name, (old, new, message) in changes.items():
        file = tmp_path / "other.zip"
        with zipfile.ZipFile(graph_cache) as source, zipfile.ZipFile(file, "w") as target:
            for member in source.namelist():
                content = source.read(member)
                if member == name:
                    assert old.encode() in content
                    content = content.replace(old.encode(), new.encode())
                target.writestr(member, content)
        with pytest.raises(ValueError, match=message):
            Engine(EngineConfig(graph_cache=file, **given))


def test_the_digest_follows_code_and_tables(tmp_path: Path) -> None:
    """A table decides the shapes of parts, and so the programs, as much as code does."""
    package = tmp_path / "ops"
    package.mkdir()
    (package / "op.py").write_text("a = 1")
    digests = {source_digest([package])}
    (package / "table.json").write_text("[1]")
    digests.add(source_digest([package]))
    (package / "table.json").write_text("[2]")
    digests.add(source_digest([package]))
    (package / "notes.txt").write_text("not read")
    assert source_digest([package]) in digests
    assert len(digests) == 3


def test_a_broken_program_is_refused_by_name(checkpoint: Path, graph_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.zip"
    with zipfile.ZipFile(graph_cache) as source, zipfile.ZipFile(file, "w") as target:
        for member in source.namelist():
            content = source.read(member)
            target.writestr(member, content[:100] if member == "programs/first_token" else content)
    with pytest.raises(ValueError, match=r"graph_cache must hold programs .* from first_token; export it"):
        Engine(EngineConfig(model=checkpoint, device="cpu", graph_cache=file, **SHAPE))


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_what_is_no_cache_is_refused(checkpoint: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "wrong.zip"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"graph_cache must be a file that tools/export_graphs\.py wrote"):
        Engine(EngineConfig(model=checkpoint, device="cpu", graph_cache=file, **SHAPE))
