"""A replica's identity: a text that is equal only for engines that decode equal tokens."""

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
# They tokenise and make grammars' masks. `machine_key` has torch and Triton.
_LIBRARIES = ("llguidance", "tokenizers")
# Each part is hashed separately, so that many threads read one large file.
_PART_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20
_MOST_READERS = 16


class CheckpointFile(NamedTuple):
    """A file of a checkpoint with the stamps that show a later replacement or change."""

    path: Path
    size: int
    # Unlike mtime, programs cannot set ctime back.
    ctime_ns: int
    inode: int


def list_files(model: Path, lora: Path | None = None) -> list[CheckpointFile]:
    """Return the files that decide tokens, of a GGUF file or a checkpoint directory, sorted by path; those of
    the adapter directory `lora` follow.

    Returns [] for a model that does not exist.
    """
    found = []
    is_gguf = model.suffix == ".gguf"
    # A GGUF file may use a tokenizer from its directory.
    paths = [*part_files(model), *model.parent.glob("*.json")] if is_gguf else model.glob("*")
    for path in sorted(paths):
        if path.is_file() and (is_gguf or path.suffix in _SUFFIXES):
            stat = path.stat()
            found.append(CheckpointFile(path, stat.st_size, stat.st_ctime_ns, stat.st_ino))
    return found if lora is None else found + list_files(lora)


def identify(config: EngineConfig, engine: Engine, loaded: Sequence[CheckpointFile]) -> str:
    """Return a text that differs between engines that may decode different tokens.

    It depends on every byte of the checkpoint, the config, the device, the threads, torch's settings, the
    versions and, for an editable install, this package's code and tables. loaded: the files before the engine
    read them. Raises ValueError if one has changed since.
    """
    # Imported here: they import torch, which the ingress does not need.
    import torch

    from compiled_mtp.graphs.artifacts import machine_key, source_digest
    from compiled_mtp.runner.numeric_settings import NumericSettings

    _check_unchanged(engine.frontend.path, config.lora, loaded)
    sources = source_digest((_PACKAGE, _PACKAGE / "ops", _PACKAGE / "graphs"))
    # On a GPU the number of CPU threads, which differs between machines, changes no token.
    settings = dataclasses.replace(NumericSettings.read(), num_threads=engine.num_threads or 0)
    parts: list[Any] = [platform.machine(), sorted(machine_key(engine.runner.spec.device).items())]
    parts += [torch.__config__.show(), settings, [_version(name) for name in _LIBRARIES]]
    parts += [compiled_mtp.__version__, sources, config.model_dump_json()]
    parts += [engine.scheduler.limits.longest, engine.runner.memory.max_model_len, digest_files(loaded)]
    _check_unchanged(engine.frontend.path, config.lora, loaded)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _check_unchanged(model: Path, lora: Path | None, loaded: Sequence[CheckpointFile]) -> None:
    if changed := {one.path.name for one in {*loaded} ^ {*list_files(model, lora)}}:
        raise ValueError(
            f"model must not change while it is loaded, got changes of {sorted(changed)}; start the replica "
            "again"
        )


def digest_files(files: Sequence[CheckpointFile]) -> str:
    """Return a digest of the names, sizes and all bytes of `files`; several threads read them."""
    parts = [(one.path, start) for one in files for start in range(0, one.size, _PART_BYTES)]
    digest = hashlib.sha256(repr([(one.path.name, one.size) for one in files]).encode())
    with ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1)) as pool:
        for part in pool.map(_digest_part, parts):
            digest.update(part)
    return digest.hexdigest()


def _digest_part(part: tuple[Path, int]) -> bytes:
    path, start = part
    # hashlib releases the interpreter lock while it hashes.
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_BUFFER_BYTES, _PART_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        num_left = _PART_BYTES
        while num_left and (num_read := file.readinto(buffer[:num_left])):
            digest.update(buffer[:num_read])
            num_left -= num_read
    return digest.digest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
