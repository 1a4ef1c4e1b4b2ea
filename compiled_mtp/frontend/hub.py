"""Finds a checkpoint: a local path, or a repository of the Hugging Face Hub in its local cache.

A GGUF file of a repository is named by its path there: Acme/Tiny-GGUF/Tiny-Q4_K_M.gguf. huggingface_hub is
imported only for names of repositories; it reads the cache's directory, the token and the mirror from the
environment as in other programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from compiled_mtp.errors import fail, shown
from compiled_mtp.gguf.container import part_names

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# What a checkpoint is read from. Weights of other formats lie beside them in some repositories.
_WANTED = ("*.json", "*.jinja", "*.safetensors")
_ELSEWHERE = ("*/*",)
_TOKENIZER = "tokenizer.json"


def is_repository(model: Path) -> bool:
    """Return whether `model` names a repository of the Hub, or a GGUF file of one, and no local path."""
    name, file = _split(model)
    if (file is None) == (model.suffix == ".gguf") or ".." in model.parts:
        return False
    return _REPOSITORY.fullmatch(name) is not None and not model.exists()


def find_checkpoint(model: Path, *, is_offline: bool = False) -> Path:
    """Return the directory or the GGUF file of the checkpoint `model`: `model` itself if it is a local path.

    Downloads what the local cache lacks of a repository, with bars on standard error, unless is_offline.
    Raises ValueError if the checkpoint is not there and cannot be downloaded; a local path is not checked.
    """
    if not is_repository(model):
        return model
    name, file = _split(model)
    hub = _import_hub(name)
    directory = _find_cached(hub, name)
    if file is not None:
        return _find_file(hub, name, file, directory, is_offline)
    lacking = _find_lacking(directory)
    if directory is not None and (not lacking or (is_offline and lacking == [_TOKENIZER])):
        return directory
    if is_offline:
        got = f"{name}, which lacks {', '.join(lacking)} there"
        remedy = f"run `hf download {name}` where there is a network, or leave offline out"
        raise fail("model", "be a directory, or whole in the local Hugging Face cache", got, remedy)
    return _download_directory(hub, name)


def _split(model: Path) -> tuple[str, str | None]:
    """Return the name of the repository, and the path in it if `model` names a file."""
    parts = model.as_posix().split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None


def _find_file(hub: ModuleType, name: str, file: str, directory: Path | None, is_offline: bool) -> Path:
    """Return the path of one GGUF file in the cache; a file in parts is there with all of its parts."""
    parts = [(Path(file).parent / part).as_posix() for part in part_names(Path(file).name)]
    lacking = [part for part in parts if directory is None or not (directory / part).is_file()]
    if lacking and is_offline:
        got = f"{name}, which lacks {', '.join(lacking)} there"
        remedy = (
            f"run `hf download {name} {' '.join(lacking)}` where there is a network, or leave offline out"
        )
        raise fail("model", "be a file, or whole in the local Hugging Face cache", got, remedy)
    if lacking:
        directory = _download(hub, name, parts, ())
    assert directory is not None
    if absent := [part for part in parts if not (directory / part).is_file()]:
        there = _list_gguf(hub, name)
        remedy = f"name one of its files: {shown(', '.join(there))}" if there else "it has no .gguf file"
        raise fail("model", f"name a file of the repository {name}", shown(absent[0]), remedy)
    return directory / file


def _list_gguf(hub: ModuleType, name: str) -> list[str]:
    """The GGUF files of a repository, of each file in parts the first; none if the Hub cannot be asked."""
    try:
        files = [file for file in hub.list_repo_files(name) if file.endswith(".gguf")]
    except Exception:  # As for a download, the errors differ between versions.
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
    """The repository's newest snapshot in the local cache, whole or not."""
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except Exception:  # What is raised for an absent one differs between versions.
        return None


def _find_lacking(directory: Path | None) -> Sequence[str]:
    """What the directory lacks of a checkpoint, in words."""
    if directory is None:
        return ["everything"]
    index = directory / "model.safetensors.index.json"
    weights = ["*.safetensors"]
    if index.is_file():
        try:
            weights = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            return [index.name]
        # Of other names than those of files beside it globs are not even patterns.
        if not all(isinstance(n, str) and n and Path(n).name == n for n in weights):
            return [index.name]
    return [n for n in ("config.json", *weights, _TOKENIZER) if not any(directory.glob(n))]


def _download_directory(hub: ModuleType, name: str) -> Path:
    """Download the safetensors and their configs. Raises ValueError if the repository has only GGUF files."""
    directory = _download(hub, name, _WANTED, _ELSEWHERE)
    if not any(directory.glob("*.safetensors")) and (there := _list_gguf(hub, name)):
        remedy = f"name one of its files, as {name}/{there[0]}"
        raise fail("model", "have safetensors", f"{name}, which has {len(there)} GGUF models", remedy)
    return directory


def _download(hub: ModuleType, name: str, wanted: Sequence[str], elsewhere: Sequence[str]) -> Path:
    rule = "be a directory or a repository that can be downloaded"
    try:
        return Path(hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=elsewhere))
    except Exception as error:  # Of the Hub, of the network, of the disk: they differ between versions.
        kind = type(error).__name__
        remedy = f"check the network, or run `hf download {name}` where there is one and pass its directory"
        if kind == "GatedRepoError":
            remedy = f"accept its licence at https://huggingface.co/{name} and log in with `hf auth login`"
        elif kind in ("RepositoryNotFoundError", "HFValidationError"):
            remedy = "no such directory is here either: check the name; for a private one `hf auth login`"
        raise fail(
            "model", rule, f"{name} ({kind}: {shown(' '.join(str(error).split())[:200])})", remedy
        ) from None
