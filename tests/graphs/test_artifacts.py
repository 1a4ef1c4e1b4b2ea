"""Graph caches: a second process compiles nothing, even without a compiler; a wrong cache is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli.export import main
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs import artifacts
from compiled_mtp.graphs.artifacts import load, read_key, save
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.graphs.quickly import EXPORT_QUICKLY

ROOT = Path(__file__).parents[2]
SHAPE = {"mtp_step": 0, "max_batch": 1, "prefill_chunk": 64, "max_model_len": 128, "num_threads": 1}

FIRST_PROCESS = f"""
{EXPORT_QUICKLY}
import runpy
runpy.run_path("tools/export_graphs.py", run_name="__main__")
"""
SECOND_PROCESS = """
import json, sys
from compiled_mtp import Engine, EngineConfig, SamplingParams
from torch._dynamo.utils import counters
import torch
given = json.loads(sys.argv[1])
engine = Engine(EngineConfig(device="cpu", **given))
with torch.compiler.set_stance("fail_on_recompile"):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = engine.generate([[1, 2, 3]], params)[0].new_token_ids
print(json.dumps({
    "tokens": tokens,
    "is_compiled": engine.is_compiled,
    "inductor": dict(counters["inductor"]),
    "traced": counters["stats"]["calls_captured"],
}))
"""


@pytest.fixture(autouse=True)
def temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a test; environment variables set by loading are reset."""
    directory = tmp_path / "temporaries"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(directory))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cached")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return directory


@pytest.fixture(scope="module")
def graph_cache(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("caches") / "graphs.zip"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    command = [sys.executable, "-c", FIRST_PROCESS, "--device=cpu", *flags]
    done = subprocess.run(
        [*command, f"--model={checkpoint}", f"--output={file}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shapes"] == 3
    return file


def run_second(directory: Path, given: dict[str, object]) -> dict[str, Any]:
    """Run a process that finds no C++ compiler."""
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
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_second_process_compiles_nothing_without_a_compiler(
    checkpoint: Path, graph_cache: Path, tmp_path: Path
) -> None:
    plain = Engine(EngineConfig(model=checkpoint, device="cpu", **SHAPE))
    assert not plain.is_compiled
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = plain.generate([[1, 2, 3]], params)[0].new_token_ids
    cached = run_second(tmp_path, {"model": str(checkpoint), "graph_cache": str(graph_cache), **SHAPE})
    assert cached["is_compiled"]
    assert cached["tokens"] == tokens
    assert cached["traced"] == 0
    assert "fxgraph_cache_miss" not in cached["inductor"]
    (unpacked,) = private_directory().iterdir()
    before = snapshot(unpacked)
    assert load(graph_cache) == unpacked
    assert snapshot(unpacked) == before, "running from the directory must not make the next load repair it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_step": 2}, "graph_cache must be made for mtp_step=2, got 0"),
        ({"max_batch": 3}, "graph_cache must be made for max_batch=3, got 1"),
        ({"scoring": True}, "graph_cache must be made for scoring=True, got False"),
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
    """Saved programs are not traced again, so no other check would find it."""
    given = {"model": checkpoint, "device": "cpu", **SHAPE}
    changes = {
        "key.json": ('"source": "', '"source": "0', r"graph_cache must be made for source='\w+', got '0\w+'"),
        "programs/layout.json": (
            '"slots.pos": [[3]',
            '"slots.pos": [[9]',
            r"graph_cache must be made for slots\.pos=\[\[3\], .*, got \[\[9\], ",
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


def test_a_broken_program_is_refused_by_name(checkpoint: Path, graph_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.zip"
    with zipfile.ZipFile(graph_cache) as source, zipfile.ZipFile(file, "w") as target:
        for member in source.namelist():
            content = source.read(member)
            target.writestr(member, content[:100] if member == "programs/first_token_0_drafts" else content)
    with pytest.raises(
        ValueError, match=r"graph_cache must hold programs .* from first_token_0_drafts; export it"
    ):
        Engine(EngineConfig(model=checkpoint, device="cpu", graph_cache=file, **SHAPE))


@pytest.mark.parametrize("layout", [None, b"[1]", b"[["])
def test_a_cache_without_a_layout_is_refused_by_name(
    checkpoint: Path, graph_cache: Path, tmp_path: Path, layout: bytes | None
) -> None:
    file, name = tmp_path / "broken.zip", "programs/layout.json"
    with zipfile.ZipFile(graph_cache) as source, zipfile.ZipFile(file, "w") as target:
        for member in source.namelist():
            content = layout if member == name else source.read(member)
            if content is not None:
                target.writestr(member, content)
    with pytest.raises(ValueError, match=r"graph_cache must hold a layout\.json of tensors, got .*; export"):
        Engine(EngineConfig(model=checkpoint, device="cpu", graph_cache=file, **SHAPE))


NOT_WRITTEN = r"graph_cache must be a file that `compiled-mtp export` wrote"


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_a_file_that_is_no_cache_is_refused(checkpoint: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "wrong.zip"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=NOT_WRITTEN):
        Engine(EngineConfig(model=checkpoint, device="cpu", graph_cache=file, **SHAPE))


@pytest.mark.parametrize("key", ["[1]", "null", "{"])
def test_a_key_that_is_no_object_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "wrong.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("key.json", key)
    with pytest.raises(ValueError, match=NOT_WRITTEN):
        read_key(file)


def private_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"compiled_mtp_{os.getuid()}"


def snapshot(directory: Path) -> dict[Path, tuple[int, int]]:
    """Return the files; a file that was replaced or written to differs."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A cache of three files without code."""
    directory = tmp_path / "made"
    for name in ("inductor/a/code.py", "triton/b.cubin", "programs/step"):
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(name * 100)
    save(tmp_path / "small.zip", directory, {"device": "cpu"})
    return tmp_path / "small.zip"


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_files_that_a_cleaner_removed_are_restored_and_no_others_are_touched(small: Path) -> None:
    directory = load(small)
    with zipfile.ZipFile(small) as archive:
        whole = {name: archive.read(name) for name in archive.namelist()}
    assert contents(directory) == whole
    assert list(private_directory().iterdir()) == [directory]
    before = snapshot(directory)
    assert load(small) == directory
    assert snapshot(directory) == before

    (directory / "triton/b.cubin").write_text("half of it")
    shutil.rmtree(directory / "inductor")
    assert load(small) == directory
    assert contents(directory) == whole
    kept = directory / "programs/step"
    assert snapshot(directory)[kept] == before[kept]

    for path in before:
        path.unlink()
    assert load(small) == directory
    assert contents(directory) == whole
    assert list(private_directory().iterdir()) == [directory]


def test_the_directory_is_closed_to_others(small: Path) -> None:
    directory = load(small)
    assert directory.parent == private_directory()
    assert directory.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["link", "open to the group", "file", "of another user"])
def test_a_directory_that_others_can_write_to_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    if planted == "of another user":
        # Files that this process creates then belong to another user.
        user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: user)
    directory = private_directory()
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    elif planted == "open to the group":
        directory.mkdir()
        directory.chmod(0o750)
    elif planted == "file":
        directory.touch(mode=0o600)
    message = rf"{directory} must be a directory of user \d+ with mode 0700, got .*; remove it or set TMPDIR"
    with pytest.raises(ValueError, match=message):
        load(small)


@pytest.mark.parametrize("name", ["/absolute", "../above", "inductor/../../above", "."])
def test_a_file_that_would_unpack_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "wrong.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inductor/code.py", "pass")
        archive.writestr(name, "code")
    with pytest.raises(ValueError, match=f"graph_cache must hold names of files below it, got '{name}' in"):
        load(file)
    assert list(private_directory().iterdir()) == []


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    for name, match in (
        ("programs/a", r"graph_cache must unpack to at most 67108864 bytes, 64 times its own, got 671\d+ in"),
        (artifacts.KEY_NAME, r"graph_cache must be .*: its .* is longer than 8388608 bytes; export it again"),
    ):
        file = tmp_path / "graphs.zip"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, bytes((64 << 20) + 1))
        assert file.stat().st_size < 1 << 20
        with pytest.raises(ValueError, match=match):
            load(file) if name == "programs/a" else read_key(file)
    assert list(private_directory().iterdir()) == []


# Zeros are no deflated stream (zlib.error), and a stored file's checksum does not fit them (BadZipFile).
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_damaged_file_is_refused_and_leaves_no_files(tmp_path: Path, compression: int) -> None:
    file = tmp_path / "damaged.zip"
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("inductor/a.py", "pass")
        archive.writestr("inductor/b.so", bytes(range(256)) * 8)
        offset = archive.getinfo("inductor/b.so").header_offset
    damaged = bytearray(file.read_bytes())
    damaged[offset + 50 : offset + 150] = bytes(100)
    file.write_bytes(damaged)
    message = rf"graph_cache must be whole and have room in .*, got {file}: .*; export it again or free space"
    with pytest.raises(ValueError, match=message):
        load(file)
    assert list(private_directory().iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_no_files(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fail)
        with pytest.raises(ValueError, match=f"got {small}: .*No space left on device; .* or free space"):
            load(small)
    assert list(private_directory().iterdir()) == []
    load(small)


def test_the_stand_in_for_the_compiler_is_never_partly_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cat").symlink_to(str(shutil.which("cat")))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", fail)
        with pytest.raises(ValueError, match="graph_cache must be whole and have room"):
            load(small)
    (directory,) = private_directory().iterdir()
    assert list((directory / "bin").iterdir()) == []
    script = load(small) / "bin" / "g++"
    assert shutil.which("g++") == str(script)
    answer = subprocess.run([script, "--version"], capture_output=True, check=True).stdout
    assert answer == (directory / "compiler--version.txt").read_bytes()
    assert subprocess.run([script, "code.cpp"], capture_output=True, check=False).returncode == 1


def test_two_exports_to_one_file_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, file = tmp_path / "made", tmp_path / "out" / "graphs.zip"
    directory.mkdir()
    file.parent.mkdir()

    def save_another(_: str) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(artifacts, "_ask_compiler", lambda _: b"")
            save(file, directory, {"export": "inner"})
        return b""

    monkeypatch.setattr(artifacts, "_ask_compiler", save_another)
    assert save(file, directory, {"export": "outer"}) == file.stat().st_size
    assert read_key(file) == {"export": "outer"}
    assert list(file.parent.iterdir()) == [file]
    umask = os.umask(0o027)
    save(file, directory, {})
    os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o640


def test_an_export_that_fails_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, file = tmp_path / "made", tmp_path / "out" / "graphs.zip"
    directory.mkdir()
    file.parent.mkdir()
    file.write_text("unchanged")

    def interrupt(_: str) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifacts, "_ask_compiler", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(file, directory, {})
    assert contents(file.parent) == {"graphs.zip": b"unchanged"}


def run_export(out: Path) -> int:
    """Return its exit code."""
    return main(["--device=cpu", f"--output={out}"])


def test_an_interrupted_export_leaves_no_file(
    temporaries: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs: list[EngineConfig] = []

    def start(config: EngineConfig, **_: object) -> None:
        configs.append(config)
        assert list(temporaries.iterdir()) != []
        raise KeyboardInterrupt

    monkeypatch.setattr("compiled_mtp.engine.Engine", start)
    monkeypatch.setenv("COMPILED_MTP_GRAPH_CACHE", str(tmp_path / "of_the_environment.zip"))
    (tmp_path / "out").mkdir()
    assert run_export(tmp_path / "out" / "graphs.zip") == 130
    assert capsys.readouterr().err == "interrupted: nothing more was done\n"
    assert [config.graph_cache for config in configs] == [None]
    assert list(temporaries.iterdir()) == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["directory", "file/below", "device"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "device")

    def start(*_: object, **__: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("compiled_mtp.engine.Engine", start)
    assert run_export(tmp_path / name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: output must be a file that can be written, got {tmp_path / name}: ")
    assert error.count("\n") == 1
