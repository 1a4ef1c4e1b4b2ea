"""Where a checkpoint lies: a directory, or a repository of the Hugging Face Hub in its local cache.

huggingface_hub is imported only for the name of a repository; it reads the cache's place, the token and the
mirror from the environment as in other programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from compiled_mtp.errors import fail, shown

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# What a checkpoint is read from. Weights of other formats lie beside them in some repositories.
_WANTED = ("*.json", "*.jinja", "*.safetensors")
_ELSEWHERE = ("*/*",)
_TOKENIZER = "tokenizer.json"


def is_repository(model: Path) -> bool:
    """Whether `model` names a repository of the Hub, as Qwen/Qwen3.5-4B, and nothing of that name is here."""
    name = model.as_posix()
    return _REPOSITORY.fullmatch(name) is not None and model.suffix != ".gguf" and not model.exists()


def find_checkpoint(model: Path, *, is_offline: bool = False) -> Path:
    """Return the directory of the checkpoint `model`, which is itself unless it names a repository.

    A repository that is not whole in the local cache is downloaded, with bars on standard error, unless
    is_offline. Raises ValueError if it is not there and cannot be downloaded; a path is not looked at.
    """
    if not is_repository(model):
        return model
    name = model.as_posix()
    hub = _import_hub(name)
    directory = _find_cached(hub, name)
    lacking = _find_lacking(directory)
    if directory is not None and (not lacking or (is_offline and lacking == [_TOKENIZER])):
        return directory
    if is_offline:
        got = f"{name}, which lacks {', '.join(lacking)} there"
        remedy = f"run `hf download {name}` where there is a network, or leave offline out"
        raise fail("model", "be a directory, or whole in the local Hugging Face cache", got, remedy)
    return _download(hub, name)


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


def _download(hub: ModuleType, name: str) -> Path:
    rule, elsewhere = "be a directory or a repository that can be downloaded", f"`hf download {name}`"
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_ELSEWHERE))
    except Exception as error:  # Of the Hub, of the network, of the disk: they differ between versions.
        kind = type(error).__name__
        remedy = f"check the network, or run {elsewhere} where there is one and pass its directory"
        if kind == "GatedRepoError":
            remedy = f"accept its licence at https://huggingface.co/{name} and log in with `hf auth login`"
        elif kind in ("RepositoryNotFoundError", "HFValidationError"):
            remedy = "no such directory is here either: check the name; for a private one `hf auth login`"
        raise fail(
            "model", rule, f"{name} ({kind}: {shown(' '.join(str(error).split())[:200])})", remedy
        ) from None
