"""A repository's name as the model, with a cache and a Hub that the tests make."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.hub import find_checkpoint, is_repository
from compiled_mtp.models.hf_config import read_model_config
from tests.checkpoints import write_checkpoint

NAME = "Acme/Tiny-1.0"
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    sizes = {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}
    return write_checkpoint(directory, tokenizer=True, sharded=True, **sizes)


class Hub:
    """A Hub without a network: records requests and answers them."""

    def __init__(self, cache: Path, files: Path) -> None:
        self.cache, self.files = cache, files
        self.error: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        self.local = huggingface_hub.snapshot_download

    @property
    def snapshot(self) -> Path:
        return self.cache / "models--Acme--Tiny-1.0" / "snapshots" / COMMIT

    def fill(self, *left_out: str) -> None:
        """Put the repository into the cache as huggingface_hub does."""
        refs = self.snapshot.parent.parent / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(COMMIT)
        shutil.copytree(self.files, self.snapshot, ignore=shutil.ignore_patterns(*left_out))

    def download(self, name: str, *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            return self.local(name, local_files_only=True, cache_dir=self.cache)
        self.asked.append({"name": name, **options})
        if self.error is not None:
            raise self.error
        shutil.rmtree(self.cache)
        self.fill()
        return str(self.snapshot)

    def list_files(self, name: str) -> list[str]:
        return [path.relative_to(self.files).as_posix() for path in self.files.rglob("*") if path.is_file()]


@pytest.fixture
def hub(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "cache", files)
    made.cache.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", made.list_files)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_repository_that_is_whole_in_the_cache_makes_no_request(hub: Hub) -> None:
    hub.fill()
    assert find_checkpoint(Path(NAME)) == hub.snapshot
    frontend = open_frontend(EngineConfig(model=NAME, offline=True))
    assert frontend.path == hub.snapshot
    assert hub.asked == []


@pytest.mark.parametrize(
    "left_out", ["*", "model-00002*", "model.safetensors.index.json", "tokenizer.json", "config.json"]
)
def test_what_is_not_is_downloaded(hub: Hub, left_out: str) -> None:
    hub.fill(left_out)
    if left_out == "model.safetensors.index.json":
        (hub.snapshot / left_out).write_text("[")
    assert find_checkpoint(Path(NAME)) == hub.snapshot
    (asked,) = hub.asked
    assert asked["name"] == NAME
    assert {"*.json", "*.safetensors"} <= set(asked["allow_patterns"])


@pytest.mark.parametrize("name", [5, "", "/etc/passwd", "../x.safetensors"])
def test_an_index_of_other_than_files_beside_it_is_lacking(hub: Hub, name: object) -> None:
    hub.fill()
    (hub.snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"missing there: model.safetensors.index.json"):
        find_checkpoint(Path(NAME), is_offline=True)


def test_offline_names_what_is_lacking_and_the_command(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r"missing there: all files\); run `hf download Acme/Tiny-1.0`"):
        find_checkpoint(Path(NAME), is_offline=True)
    hub.fill("model-00002*")
    with pytest.raises(ValueError, match=r"missing there: model-00002-of-00003.safetensors"):
        open_frontend(EngineConfig(model=NAME, offline=True))
    assert hub.asked == []


def test_offline_does_without_a_tokenizer(hub: Hub) -> None:
    hub.fill("tokenizer.json")
    assert find_checkpoint(Path(NAME), is_offline=True) == hub.snapshot


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (ConnectionError, r"\(ConnectionError: no way\); check the network, or run `hf download Acme/Tiny"),
        (GatedRepoError, r"accept its licence at https://huggingface.co/Acme/Tiny-1.0 and log in"),
        (RepositoryNotFoundError, r"check the name, under which there is no local directory either"),
    ],
)
def test_a_download_that_fails_says_what_to_do(hub: Hub, kind: type[Exception], remedy: str) -> None:
    # `__new__`: the Hub's errors require a response, which the code does not read.
    hub.error = kind.__new__(kind)
    hub.error.args = ("no\nway",)
    with pytest.raises(ValueError, match=remedy) as error:
        find_checkpoint(Path(NAME))
    assert "\n" not in str(error.value)


@pytest.fixture
def gguf_hub(hub: Hub, tmp_path: Path) -> Hub:
    """A repository with only GGUF files: one single file, and one in two parts in a folder."""
    hub.files = tmp_path / "gguf"
    (hub.files / "BF16").mkdir(parents=True)
    for name in ("Tiny-Q4_K_M.gguf", "BF16/Tiny-00001-of-00002.gguf", "BF16/Tiny-00002-of-00002.gguf"):
        (hub.files / name).write_bytes(b"GGUF")
    (hub.files / "config.json").write_text("{}")
    return hub


def test_a_gguf_file_of_a_repository_is_found_or_downloaded_alone(gguf_hub: Hub) -> None:
    whole = Path(f"{NAME}/Tiny-Q4_K_M.gguf")
    assert is_repository(whole)
    assert find_checkpoint(whole) == gguf_hub.snapshot / "Tiny-Q4_K_M.gguf"
    assert gguf_hub.asked.pop()["allow_patterns"] == ["Tiny-Q4_K_M.gguf"]
    assert find_checkpoint(whole, is_offline=True) == gguf_hub.snapshot / "Tiny-Q4_K_M.gguf"
    assert gguf_hub.asked == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_gguf_file_in_parts_comes_with_all_of_them(gguf_hub: Hub, number: int) -> None:
    gguf_hub.fill("Tiny-00002*")
    path = Path(f"{NAME}/BF16/Tiny-0000{number}-of-00002.gguf")
    with pytest.raises(ValueError, match=r"missing there: BF16/Tiny-00002-of-00002.gguf\); run `hf download"):
        find_checkpoint(path, is_offline=True)
    assert find_checkpoint(path) == gguf_hub.snapshot / "BF16" / path.name
    wanted = ["BF16/Tiny-00001-of-00002.gguf", "BF16/Tiny-00002-of-00002.gguf"]
    assert gguf_hub.asked.pop()["allow_patterns"] == wanted


def test_a_repository_of_gguf_files_is_refused_with_their_names(gguf_hub: Hub) -> None:
    with pytest.raises(
        ValueError, match=r"2 GGUF models; name one of its files, such as Acme/Tiny-1.0/BF16/Tiny-00001"
    ):
        find_checkpoint(Path(NAME))
    with pytest.raises(ValueError, match=r"got Q9.gguf; .*: BF16/Tiny-00001-of-00002.gguf, Tiny-Q4_K_M.gguf"):
        find_checkpoint(Path(f"{NAME}/Q9.gguf"))


@pytest.mark.parametrize(
    "name", ["Acme/Tiny-GGUF:Q4_K_M", "https://huggingface.co/Acme/Tiny", "hf.co/Acme/Tiny:Q4_K_M", "tiny:4b"]
)
def test_an_address_and_a_name_with_a_quantisation_say_how_to_name_it(name: str) -> None:
    assert not is_repository(Path(name))
    with pytest.raises(ValueError, match=r"as ORG/NAME, and a GGUF file in it as ORG/NAME/FILE\.gguf"):
        read_model_config(Path(name))


def test_a_wrong_name_in_a_local_folder_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "right.gguf").touch()
    with pytest.raises(ValueError, match=r"^models/tiny/wrong\.gguf must be a readable file, .*right\.gguf$"):
        read_model_config(find_checkpoint(Path("models/tiny/wrong.gguf")))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'compiled-mtp\[hub\]', or pass the directory that"):
        find_checkpoint(Path(NAME))


def test_directories_are_left_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    for path in (
        NAME,
        "/nowhere/x",
        "../a/b",
        "a/b/c",
        "one",
        "a/b.gguf",
        "/a/b/c.gguf",
        "../a/b.gguf",
        ".",
        "a/.b",
    ):
        assert not is_repository(Path(path)), path
        assert find_checkpoint(Path(path)) == Path(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineConfig(model="~/x").model == tmp_path / "x"
    with pytest.raises(ValueError, match="model must be a path, got ~nobody-here/x"):
        EngineConfig(model="~nobody-here/x")
    assert hub.asked == []
