"""Finds a checkpoint: a local path, or a repository of the Hugging Face Hub in its local cache.

A GGUF file of a repository is named by its path in it: Acme/Tiny-GGUF/Tiny-Q4_K_M.gguf. huggingface_hub is
imported only for names of repositories; it reads the cache's directory, the token and the mirror from the
environment, as in other programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from types import ModuleType

from compiled_mtp.errors import fail, shown
from compiled_mtp.gguf.container import part_names

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# The files of a checkpoint. Some repositories also have weights of other formats, often in subfolders.
_WANTED = ("*.json", "*.jinja", "*.safetensors")
_UNWANTED = ("*/*",)
_TOKENIZER = "tokenizer.json"


def is_repository(model: Path) -> bool:
    """Return whether `model` names a repository of the Hub, or a GGUF file in one, and not a local path.

    A file is local if its folder is, whether it exists or not.
    """
    name, file = _split(model)
    if (file is None) == (model.suffix == ".gguf") or ".." in model.parts:
        return False
    is_local = model.exists() or (file is not None and model.parent.is_dir())
    return _REPOSITORY.fullmatch(name) is not None and not is_local


def find_checkpoint(model: Path, *, is_offline: bool = False) -> Path:
    """Return the directory or the GGUF file of the checkpoint `model`: `model` itself if it is a local path.

    Downloads a repository's files that the local cache lacks, with progress bars on standard error, unless
    is_offline. Raises ValueError if the cache lacks files and the download fails or is_offline is set. Does
    not check a local path.
    """
    if not is_repository(model):
        return model
    name, file = _split(model)
    hub = _import_hub(name)
    directory = _find_cached(hub, name)
    if file is not None:
        return _find_file(hub, name, file, directory, is_offline)
    missing = _find_missing(directory)
    if directory is not None and (not missing or (is_offline and missing == [_TOKENIZER])):
        return directory
    if is_offline:
        got = f"{name} (missing there: {', '.join(missing)})"
        remedy = f"run `hf download {name}` where there is a network, or run without offline"
        raise fail("model", "be a directory, or complete in the local Hugging Face cache", got, remedy)
    return _download_directory(hub, name)


def _split(model: Path) -> tuple[str, str | None]:
    """Return the name of the repository, and the path in it if `model` names a file."""
    parts = model.as_posix().split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None


def _find_file(hub: ModuleType, name: str, file: str, directory: Path | None, is_offline: bool) -> Path:
    """Return the path of one GGUF file in the cache, whose parts are all there; download what is missing."""
    parts = [(Path(file).parent / part).as_posix() for part in part_names(Path(file).name)]
    missing = [part for part in parts if directory is None or not (directory / part).is_file()]
    if missing and is_offline:
        got = f"{name} (missing there: {', '.join(missing)})"
        remedy = (
            f"run `hf download {name} {' '.join(missing)}` where there is a network, or run without offline"
        )
        raise fail("model", "be a file, or complete in the local Hugging Face cache", got, remedy)
    if missing:
        directory = _download(hub, name, parts, ())
    assert directory is not None
    if missing := [part for part in parts if not (directory / part).is_file()]:
        available = _list_gguf(hub, name)
        remedy = (
            f"name one of its files: {shown(', '.join(available))}" if available else "it has no .gguf file"
        )
        raise fail("model", f"name a file of the repository {name}", shown(missing[0]), remedy)
    return directory / file


def _list_gguf(hub: ModuleType, name: str) -> list[str]:
    """Return the GGUF files of a repository, only the first part of a split file; [] if the Hub fails."""
    try:
        files = [file for file in hub.list_repo_files(name) if file.endswith(".gguf")]
    except Exception:  # The error types differ between versions of huggingface_hub.
        return []
    return [file for file in sorted(files) if part_names(Path(file).name)[0] == Path(file).name]


def _import_hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        remedy = f"pip install 'compiled-mtp[hub]', or pass the directory that `hf download {name}` fills"
        raise fail("model", "be a directory without the package huggingface_hub", name, remedy) from None
    return huggingface_hub


def _find_cached(hub: ModuleType, name: str) -> Path | None:
    """Return the repository's newest snapshot in the local cache, complete or not; None without one."""
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except Exception:  # The error type for an absent snapshot differs between versions of huggingface_hub.
        return None


def _find_missing(directory: Path | None) -> Sequence[str]:
    """Return names or patterns of a checkpoint's files that the directory lacks, ["all files"] for None."""
    if directory is None:
        return ["all files"]
    index = directory / "model.safetensors.index.json"
    weights = ["*.safetensors"]
    if index.is_file():
        try:
            weights = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            return [index.name]
        # `glob` raises for some values that are not plain file names.
        if not all(isinstance(n, str) and n and Path(n).name == n for n in weights):
            return [index.name]
    return [n for n in ("config.json", *weights, _TOKENIZER) if not any(directory.glob(n))]


def _download_directory(hub: ModuleType, name: str) -> Path:
    """Download the safetensors and their configs. Raises ValueError if the repository has only GGUF files."""
    directory = _download(hub, name, _WANTED, _UNWANTED)
    if not any(directory.glob("*.safetensors")) and (models := _list_gguf(hub, name)):
        remedy = f"name one of its files, such as {name}/{models[0]}"
        raise fail("model", "have safetensors", f"{name}, which has {len(models)} GGUF models", remedy)
    return directory


def _download(hub: ModuleType, name: str, wanted: Sequence[str], unwanted: Sequence[str]) -> Path:
    rule = "be a directory or a repository that can be downloaded"
    try:
        return Path(hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:  # Errors of the Hub, the network or the disk, whose types differ by version.
        kind = type(error).__name__
        remedy = f"check the network, or run `hf download {name}` where there is one and pass its directory"
        if kind == "GatedRepoError":
            remedy = f"accept its licence at https://huggingface.co/{name} and log in with `hf auth login`"
        elif kind in ("RepositoryNotFoundError", "HFValidationError"):
            remedy = (
                "check the name, under which there is no local directory either; for a private repository "
                "run `hf auth login`"
            )
        raise fail(
            "model", rule, f"{name} ({kind}: {shown(shorten(str(error), 160, placeholder=' ...'))})", remedy
        ) from None
