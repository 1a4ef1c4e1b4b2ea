"""What a replica promises: a text that is equal for engines that decode equal tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import compiled_mtp
from compiled_mtp.config import EngineConfig
from compiled_mtp.gguf.container import part_files

if TYPE_CHECKING:
    from compiled_mtp.engine import Engine

_PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".json", ".jinja", ".safetensors")
# They make text and grammars' masks; torch and Triton are in the machine's key.
_LIBRARIES = ("llguidance", "tokenizers")
# Each part is hashed by itself, so that one large file has many readers.
_PART_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20
_MOST_READERS = 16


class CheckpointFile(NamedTuple):
    """A file of a checkpoint as it was found: what took its place since, or its bytes', has another stamp."""

    path: Path
    size: int
    # Unlike mtime it is nobody's to set back.
    ctime_ns: int
    inode: int


def list_files(model: Path) -> list[CheckpointFile]:
    """Return what decides tokens of a GGUF file, or in the directory of a checkpoint, by name; nothing of one
    that is not there."""
    found = []
    is_gguf = model.suffix == ".gguf"
    # A tokenizer may lie beside it.
    paths = [*part_files(model), *model.parent.glob("*.json")] if is_gguf else model.glob("*")
    for path in sorted(paths):
        if path.is_file() and (is_gguf or path.suffix in _SUFFIXES):
            stat = path.stat()
            found.append(CheckpointFile(path, stat.st_size, stat.st_ctime_ns, stat.st_ino))
    return found


def identify(config: EngineConfig, engine: Engine, loaded: Sequence[CheckpointFile]) -> str:
    """Return a text that differs with every byte of the checkpoint, the config, the device, the threads, what
    torch was told, the versions and, for a package that is edited where it lies, the code and tables of this
    one.

    loaded: the files as they were before the engine read them. Raises ValueError if one is another by now.
    """
    # They wait for torch, which the ingress does without.
    import torch

    from compiled_mtp.graphs.artifacts import machine_key, source_digest
    from compiled_mtp.runner.numeric_settings import NumericSettings

    _check_unchanged(engine.frontend.path, loaded)
    sources = source_digest((_PACKAGE, _PACKAGE / "ops", _PACKAGE / "graphs"))
    # On a GPU the threads of the CPU, which are those of the machine, decide nothing.
    told = dataclasses.replace(NumericSettings.read(), num_threads=engine.num_threads or 0)
    what: list[Any] = [platform.machine(), sorted(machine_key(engine.runner.spec.device).items())]
    what += [torch.__config__.show(), told, [_version(name) for name in _LIBRARIES]]
    what += [compiled_mtp.__version__, sources, config.model_dump_json()]
    what += [engine.scheduler.limits.longest, engine.runner.memory.max_model_len, digest_files(loaded)]
    _check_unchanged(engine.frontend.path, loaded)
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _check_unchanged(model: Path, loaded: Sequence[CheckpointFile]) -> None:
    if changed := {one.path.name for one in {*loaded} ^ {*list_files(model)}}:
        raise ValueError(
            f"model must stay as it is while it is loaded, got {sorted(changed)} changed; start the replica "
            "again"
        )


def digest_files(files: Sequence[CheckpointFile]) -> str:
    """Return a digest of the names, sizes and all bytes of files, read by several threads."""
    parts = [(one.path, start) for one in files for start in range(0, one.size, _PART_BYTES)]
    digest = hashlib.sha256(repr([(one.path.name, one.size) for one in files]).encode())
    with ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1)) as pool:
        for part in pool.map(_digest_part, parts):
            digest.update(part)
    return digest.hexdigest()


def _digest_part(part: tuple[Path, int]) -> bytes:
    path, start = part
    # hashlib lets other threads run meanwhile.
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_BUFFER_BYTES, _PART_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _PART_BYTES
        while left and (num_read := file.readinto(buffer[:left])):
            digest.update(buffer[:num_read])
            left -= num_read
    return digest.digest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
