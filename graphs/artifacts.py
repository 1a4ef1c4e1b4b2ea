"""The graph cache: a file with all compiled code, so that the next process starts without compiling.

Inductor and Triton cache what they compile in directories. For an export both directories are private and
empty at first; afterwards they hold exactly what the engine's shapes need: code, shared objects, cubins, the
launch choices of the compiler's own kernels. Beside them are the programs as Dynamo traced them. The file is
a zip of all this and of the key that it was made for. The key has a digest of our own source, because a load
traces nothing again. The file holds code: load only files that you made or trust.

`load` unpacks it to <temporary directory>/compiled_mtp_<user id>/<digest of the file>, which only its owner
may enter. You may delete that directory whenever no engine runs from it; the next load restores it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

KEY_NAME = "key.json"
PROGRAMS_NAME = "programs"
COMPILER = "g++"
# Inductor calls the compiler with these flags even if nothing is left to compile; the answers are part of its
# cache keys.
COMPILER_QUESTIONS = ("-v", "--version")
CPUINFO = Path("/proc/cpuinfo")
# The beginnings of the kernel's names of instruction sets that a compiler may use: of x86, then of ARM.
CPU_FLAGS = (
    *("avx", "sse", "ssse", "fma", "bmi", "f16c", "amx", "adx", "gfni", "vaes", "vpclmul", "sha"),
    *("popcnt", "movbe", "abm", "xop", "tbm"),
    *("neon", "asimd", "sve", "sme", "fphp", "i8mm", "bf16", "atomics"),
)
# The largest ratio of unpacked to packed bytes, far above that of compiled code: a zip that claims more would
# fill the disk. Zips that unpack to fewer bytes than the limit are always accepted.
_MOST_RATIO, _LEAST_LIMIT_BYTES = 64, 64 << 20
_MOST_KEY_BYTES = 8 << 20
# The errors of reading a damaged zip; zipfile raises RuntimeError where the zip seems to be encrypted.
DAMAGE = (OSError, EOFError, RuntimeError, UnicodeError, zlib.error, zipfile.BadZipFile)


def use_directory(directory: Path) -> None:
    """Make Inductor and Triton of this process cache what they compile below `directory` from now on."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")


def machine_key(device: torch.device) -> dict[str, Any]:
    """The part of a graph cache's key that names the machine: device and versions.

    torch loads saved programs only with the same full version of Python, the same CUDA toolkit and a GPU of
    the same name (torch/_dynamo/package.py, SystemInfo.check_compatibility). Code for a CPU is compiled with
    -march=native, and one missing instruction kills the process: torch's "AVX2" covers ten years of
    processors, so the key has a digest of all instruction sets.
    """
    key = {
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }
    if device.type == "cuda":
        return key | {
            "capability": "sm_{}{}".format(*torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "gpu": torch.cuda.get_device_name(device),
        }
    return key | {"capability": torch.backends.cpu.get_cpu_capability(), "cpu": _cpu_digest()}


def source_digest(paths: Iterable[Path]) -> str:
    """A digest of the code and JSON tables at and below `paths`, from which saved programs were traced."""
    digest = sha256()
    for path in paths:
        inside = sorted((*path.rglob("*.py"), *path.rglob("*.json"))) if path.is_dir() else (path,)
        for file in inside:
            digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def save(file: Path, directory: Path, key: Mapping[str, Any]) -> int:
    """Write the files below `directory` and `key` (JSON values) to `file`; return its size in bytes.

    A failure leaves `file` as it was.
    """
    with _replacing(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(KEY_NAME, json.dumps(dict(key), indent=1, sort_keys=True))
        for question in COMPILER_QUESTIONS:
            archive.writestr(_answer_name(question), _ask_compiler(question))
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.suffix not in (".lock", ".pch", ".gch"):
                archive.write(path, path.relative_to(directory))
    return file.stat().st_size


def read_key(file: Path) -> dict[str, Any]:
    """Return the key that `file` was made for. Raises ValueError if it is no graph cache."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.getinfo(KEY_NAME).file_size > _MOST_KEY_BYTES:
                raise ValueError(f"its {KEY_NAME} is longer than {_MOST_KEY_BYTES} bytes")
            key = json.loads(archive.read(KEY_NAME))
        if not isinstance(key, dict):
            raise ValueError(f"its {KEY_NAME} is no JSON object")
    except (*DAMAGE, KeyError, ValueError) as error:
        raise ValueError(
            f"graph_cache must be a file that `compiled-mtp export` wrote, got {file}: {error}; "
            "export it again"
        ) from None
    return key


def check_key(file: Path, key: Mapping[str, Any], *, is_whole: bool = True) -> None:
    """Raise ValueError unless `file` was made for `key`; the error names the first field that differs.

    is_whole: whether the file's key may have no other field.
    """
    stored = read_key(file)
    wanted = json.loads(json.dumps(dict(key)))
    # In the key's order: a setting comes before what follows from it, which the caller cannot change.
    for name in (*wanted, *(sorted(stored.keys() - wanted.keys()) if is_whole else ())):
        if stored.get(name) != wanted.get(name):
            raise ValueError(
                f"graph_cache must be made for {name}={wanted.get(name)!r}, got {stored.get(name)!r} in "
                f"{file}; export it again with `compiled-mtp export` or change {name}"
            )


def load(file: Path) -> Path:
    """Unpack `file`, let Inductor and Triton use it, and return the directory. Check the key first.

    A directory from an earlier load is used again; files that a cleaner of temporary files removed are
    restored. Inductor asks the C++ compiler for its version even if nothing is left to compile: on a machine
    without a compiler a script takes its place, which gives the recorded answers and refuses to compile.
    Raises ValueError for a damaged file, a full disk, and a directory that another user could write to.
    """
    parent = Path(tempfile.gettempdir()) / f"compiled_mtp_{os.getuid()}"
    try:
        _make_private(parent)
        with file.open("rb") as stream:
            directory = parent / file_digest(stream, "sha256").hexdigest()[:16]
            _unpack(stream, directory)
        if shutil.which(COMPILER) is None:
            _stand_in_for_compiler(directory)
    except DAMAGE as error:
        raise ValueError(
            f"graph_cache must be whole and have room in {parent}, got {file}: {error}; "
            "export it again or free space there"
        ) from None
    use_directory(directory)
    return directory


def _make_private(directory: Path) -> None:
    """Make `directory`, or raise ValueError unless it belongs to this user alone.

    Every user may create names in the temporary directory, and the files below this one are run as code.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700, got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; remove it or set TMPDIR"
        )


def _unpack(stream: BinaryIO, directory: Path) -> None:
    """Unpack every file of the zip that `directory` lacks or holds with another size.

    First unpack all of them into a temporary directory, so that a damaged zip changes nothing. Then move each
    to its path, so that another process, which may use the directory or unpack too, never sees half a file.
    """
    with zipfile.ZipFile(stream) as archive, tempfile.TemporaryDirectory(dir=directory.parent) as aside:
        size, file_size = sum(m.file_size for m in archive.infolist()), stream.seek(0, os.SEEK_END)
        limit = max(_MOST_RATIO * file_size, _LEAST_LIMIT_BYTES)
        if size > limit:
            raise ValueError(
                f"graph_cache must unpack to at most {limit} bytes, {_MOST_RATIO} times its own, got {size} "
                f"in {stream.name}; export it again"
            )
        unpacked: list[tuple[str, Path]] = []
        for member in archive.infolist():
            name = PurePosixPath(member.filename)
            if not name.parts or name.is_absolute() or ".." in name.parts:
                raise ValueError(
                    f"graph_cache must hold names of files below it, got {member.filename!r} in "
                    f"{stream.name}; export it again"
                )
            target = directory / name
            if not member.is_dir() and not _has_size(target, member.file_size):
                unpacked.append((archive.extract(member, aside), target))
        for source, target in unpacked:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)


def _has_size(file: Path, size: int) -> bool:
    # One system call: between two, a cleaner of temporary files could remove the file.
    with suppress(FileNotFoundError):
        return file.stat().st_size == size
    return False


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A path to write to, which replaces `file` on success and is deleted on an error."""
    # In a directory of its own the file gets the mode that the umask sets; mkstemp would set another.
    with tempfile.TemporaryDirectory(dir=file.parent) as aside:
        partial = Path(aside) / file.name
        yield partial
        partial.replace(file)


def _stand_in_for_compiler(directory: Path) -> None:
    script = directory / "bin" / COMPILER
    cases = " ".join(
        f"{question}) exec cat {shlex.quote(str(directory / _answer_name(question)))};;"
        for question in COMPILER_QUESTIONS
    )
    script.parent.mkdir(exist_ok=True)
    with _replacing(script) as partial:
        partial.write_text(
            "#!/bin/sh\n"
            f'case "$*" in {cases} esac\n'
            'echo "the graph cache lacks something and there is no C++ compiler: export it again" >&2\n'
            "exit 1\n"
        )
        partial.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(script.parent), *os.get_exec_path()))


def _ask_compiler(question: str) -> bytes:
    if shutil.which(COMPILER) is None:
        return b""
    # A translated answer would change the cache keys; Inductor asks in this locale too.
    command = ["env", "LC_ALL=C", COMPILER, question]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout


def _answer_name(question: str) -> str:
    return f"compiler{question}.txt"


def _cpu_digest() -> str:
    """A digest of the instruction sets that -march=native lets a compiler use on this machine."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                used = sorted(flag for flag in flags.split() if flag.startswith(CPU_FLAGS))
                return sha256(" ".join(used).encode()).hexdigest()[:16]
    return "unknown"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
