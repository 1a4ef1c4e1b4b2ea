"""What makes two replicas alike: the bytes of the checkpoint and all that decides tokens."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_mtp import ray_serve
from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.replicas.identity import CheckpointFile, digest_files, identify, list_files
from compiled_mtp.replicas.metrics import _empty_stats
from compiled_mtp.runner.numeric_settings import NumericSettings
from tests.server.serving import CHECKPOINT


def test_identities_tell_what_decides_tokens_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, package = tmp_path / "model", tmp_path / "package"
    model.mkdir()
    (package / "ops").mkdir(parents=True)
    (package / "graphs").mkdir()
    monkeypatch.setattr("compiled_mtp.replicas.identity._PACKAGE", package)

    def identity(config: EngineConfig, longest: int = 9, num_threads: int | None = 1) -> str:
        return identify(config, fake_engine(model, longest, num_threads), list_files(model))

    weights = model / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    config = EngineConfig(device="cpu")
    found = [identity(config)]
    lora = tmp_path / "lora"
    lora.mkdir()
    for scale in (1, 2):
        (lora / "adapter_config.json").write_text(f'{{"lora_alpha": {scale}}}')
        adapted = config.model_copy(update={"lora": lora})
        found.append(identify(adapted, fake_engine(model, 9, 1), list_files(model, lora)))
    assert identity(config) == found[0]
    found += [
        identity(config, longest=8),
        identity(config, num_threads=2),
        identity(config.model_copy(update={"prefill_chunk": 64})),
    ]
    for name, value in (
        ("compiled_mtp.__version__", "0"),
        ("compiled_mtp.graphs.artifacts._triton_version", lambda: "0"),
        ("torch.__version__", "0"),
        ("torch.backends.cpu.get_cpu_capability", lambda: "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found.append(identity(config))
    real = metadata.version
    for package_name in ("llguidance", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                metadata, "version", lambda name, own=package_name: "0" if name == own else real(name)
            )
            found.append(identity(config))

    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", missing)
        found.append(identity(config))
    # torch's settings, and its build.
    settings = NumericSettings.read()
    for changed in ({"mkldnn_enabled": not settings.mkldnn_enabled}, {"float32_matmul_precision": "medium"}):
        told = dataclasses.replace(settings, **changed)
        with monkeypatch.context() as patch:
            patch.setattr(NumericSettings, "read", lambda told=told: told)
            found.append(identity(config))
    with monkeypatch.context() as patch:
        patch.setattr("torch.__config__.show", lambda: "another BLAS")
        found.append(identity(config))
    # Replicas on GPUs may run on machines with different numbers of cores.
    on_gpu = identity(config, num_threads=None)
    more = dataclasses.replace(settings, num_threads=settings.num_threads + 1)
    with monkeypatch.context() as patch:
        patch.setattr(NumericSettings, "read", lambda: more)
        assert identity(config, num_threads=None) == on_gpu
    for name in ("engine.py", "ops/table.json", "graphs/buckets.py"):
        (package / name).write_text("1", encoding="utf-8")
        found.append(identity(config))
    for at in (0, 1 << 20, 3 << 19, (2 << 20) - 1, (3 << 20) - 1):
        content = bytearray(3 << 20)
        content[at] = 1
        weights.write_bytes(content)
        found.append(identity(config))
    assert len(set(found)) == len(found)


def fake_engine(model: Path, longest: int = 9, num_threads: int | None = 1) -> Any:
    return SimpleNamespace(
        num_threads=num_threads,
        runner=SimpleNamespace(
            spec=SimpleNamespace(device=SimpleNamespace(type="cpu")), memory=SimpleNamespace(max_model_len=9)
        ),
        scheduler=SimpleNamespace(limits=SimpleNamespace(longest=longest)),
        frontend=SimpleNamespace(path=model),
    )


def test_every_byte_of_a_checkpoint_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No file's size is a multiple of the part's or the buffer's size.
    monkeypatch.setattr("compiled_mtp.replicas.identity._PART_BYTES", 700)
    monkeypatch.setattr("compiled_mtp.replicas.identity._BUFFER_BYTES", 96)
    sizes = {"model-1.safetensors": 2000, "model-2.safetensors": 700, "config.json": 1, "empty.json": 0}
    content = {name: random.Random(size).randbytes(size) for name, size in sizes.items()}

    def digest() -> str:
        for name, data in content.items():
            (tmp_path / name).write_bytes(data)
        return digest_files(list_files(tmp_path))

    found = [digest()]
    (tmp_path / "README.md").write_text("not read", encoding="utf-8")
    assert digest() == found[0]
    for name, data in list(content.items()):
        for at in {0, len(data) // 2, len(data) - 1, *range(0, len(data), 97)} - {-1}:
            content[name] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"x"
            found.append(digest())
        content[name] = data
    # Move a byte from one file to the next, and exchange the names of two files.
    one, two = content["model-1.safetensors"], content["model-2.safetensors"]
    content |= {"model-1.safetensors": one[:-1], "model-2.safetensors": one[-1:] + two}
    found.append(digest())
    content |= {"model-1.safetensors": two, "model-2.safetensors": one}
    found.append(digest())
    assert len(set(found)) == len(found)


def test_files_that_change_while_they_are_loaded_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    loaded = list_files(tmp_path)
    time_ns = weights.stat().st_mtime_ns
    changed = r"model must not change while it is loaded, got changes of \['model.safetensors'\]"

    def check(loaded: Sequence[CheckpointFile]) -> None:
        with pytest.raises(ValueError, match=changed):
            identify(EngineConfig(device="cpu"), fake_engine(tmp_path), loaded)

    # Another file with the same path, size and mtime, as a copy makes it.
    other = tmp_path / "other"
    other.write_bytes(b"new")
    os.utime(other, ns=(time_ns, time_ns))
    other.rename(weights)
    check(loaded)
    # The same file with other bytes and the old mtime, as a tool that syncs in place makes it.
    loaded = list_files(tmp_path)
    weights.write_bytes(b"odd")
    os.utime(weights, ns=(time_ns, time_ns))
    check(loaded)
    loaded = list_files(tmp_path)
    weights.unlink()
    check(loaded)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"got changes of \['config.json'\]; start the replica again"):
        identify(EngineConfig(device="cpu"), fake_engine(tmp_path), list_files(tmp_path)[1:])


def test_a_replica_knows_the_files_before_it_reads_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(CHECKPOINT, model)

    def read_then_change(config: EngineConfig) -> Any:
        frontend = open_frontend(config)
        (model / "config.json").write_text("{}", encoding="utf-8")
        return frontend

    engine = SimpleNamespace(**vars(fake_engine(model)), stats=_empty_stats)
    monkeypatch.setattr(ray_serve, "open_frontend", read_then_change)
    monkeypatch.setattr("compiled_mtp.engine.Engine", lambda config, frontend: engine)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"))
    monkeypatch.setattr(
        ray_serve, "_import_ray", lambda _: SimpleNamespace(get_replica_context=lambda: context)
    )
    warm: list[Any] = []
    name = "compiled_mtp.frontend.processor.RequestProcessor.warm_up_grammars"
    monkeypatch.setattr(name, lambda frontend: warm.append(frontend))
    fields = EngineConfig(model=model, device="cpu").model_dump(mode="json")
    with pytest.raises(ValueError, match=r"got changes of \['config.json'\]"):
        ray_serve.EngineReplica(fields, 8, 0, 8, 300.0)
    assert len(warm) == 1
    with pytest.raises(ValueError, match="missing"):
        ray_serve.EngineReplica(fields | {"model": str(tmp_path / "missing")}, 8, 0, 8, 300.0)
