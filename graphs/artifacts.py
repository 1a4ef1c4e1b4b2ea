"""A file with everything compiled: the second process starts without compiling.

Inductor and Triton keep what they make in directories. For an export both directories are private and
empty, so that afterwards they hold what the engine's shapes need and nothing else: code, shared objects,
cubins, the launch choices of the compiler's own kernels. Beside them lie the programs as Dynamo traced
them. The file is a zip of all that with the key it was made for, in which the digest of our own source
stands for what is not traced again. It holds code: load only files that you made or trust.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

KEY_NAME = "key.json"
PROGRAMS_NAME = "programs"
COMPILER = "g++"
# What Inductor asks the compiler even if nothing is left to compile; the answers are part of its cache keys.
COMPILER_QUESTIONS = ("-v", "--version")


def use_directory(directory: Path) -> None:
    """Let Inductor and Triton keep what they compile below `directory`, from now on, in this process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")


def machine_key(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on besides the engine's shapes: device and versions."""
    if device.type == "cuda":
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": device.type,
        "capability": capability,
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def source_digest(paths: Iterable[Path]) -> str:
    """A digest of the code and tables at and below `paths`: what saved programs were traced from."""
    digest = sha256()
    for path in paths:
        inside = sorted((*path.rglob("*.py"), *path.rglob("*.json"))) if path.is_dir() else (path,)
        for file in inside:
            digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def save(file: Path, directory: Path, key: Mapping[str, Any]) -> int:
    """Write what `directory` holds and `key` (JSON values) to `file`; returns its size in bytes."""
    partial = file.with_name(file.name + ".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        archive.writestr(KEY_NAME, json.dumps(dict(key), indent=1, sort_keys=True))
        for question in COMPILER_QUESTIONS:
            archive.writestr(_answer_name(question), _ask_compiler(question))
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.suffix not in (".lock", ".pch", ".gch"):
                archive.write(path, path.relative_to(directory))
    partial.replace(file)
    return file.stat().st_size


def read_key(file: Path) -> dict[str, Any]:
    """The key a file was made for. Raises ValueError for what is no such file."""
    try:
        with zipfile.ZipFile(file) as archive:
            key = json.loads(archive.read(KEY_NAME))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"graph_cache must be a file that tools/export_graphs.py wrote, got {file}: {error}; "
            "export it again"
        ) from None
    assert isinstance(key, dict)
    return key


def check_key(file: Path, key: Mapping[str, Any]) -> None:
    """Raise ValueError unless `file` was made for `key`; names the first field that differs."""
    stored = read_key(file)
    wanted = json.loads(json.dumps(dict(key)))
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise ValueError(
                f"graph_cache must be made for {name}={wanted.get(name)!r}, got {stored.get(name)!r} in "
                f"{file}; export it again with tools/export_graphs.py or change {name}"
            )


def load(file: Path) -> Path:
    """Unpack `file`, let Inductor and Triton use it, and return the directory. The key is checked before.

    Inductor asks the C++ compiler for its version even if nothing is left to compile. On a machine without
    one, a script that gives the recorded answer, and refuses to compile, is put in its place.
    """
    digest = sha256(file.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"compiled_mtp_{os.getuid()}_{digest}"
    if not directory.is_dir():
        unpacked = Path(tempfile.mkdtemp(prefix=directory.name + "_", dir=directory.parent))
        with zipfile.ZipFile(file) as archive:
            archive.extractall(unpacked)
        try:
            unpacked.rename(directory)
        except OSError:  # Another process was first.
            shutil.rmtree(unpacked)
    use_directory(directory)
    if shutil.which(COMPILER) is None:
        _stand_in_for_compiler(directory)
    return directory


def _stand_in_for_compiler(directory: Path) -> None:
    script = directory / "bin" / COMPILER
    cases = " ".join(
        f'{question}) exec cat "{directory / _answer_name(question)}";;' for question in COMPILER_QUESTIONS
    )
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in {cases} esac\n'
        'echo "the graph cache lacks something and there is no C++ compiler: export it again" >&2\n'
        "exit 1\n"
    )
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(script.parent), *os.get_exec_path()))


def _ask_compiler(question: str) -> bytes:
    if shutil.which(COMPILER) is None:
        return b""
    # The words of a translated answer would change the cache keys; Inductor asks in this locale too.
    command = ["env", "LC_ALL=C", COMPILER, question]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout


def _answer_name(question: str) -> str:
    return f"compiler{question}.txt"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
