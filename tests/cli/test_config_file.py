"""--config FILE: its names, its place after flags and environment, and mistakes in it; and the help."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import chat, export, run
from compiled_mtp.cli.main import main
from compiled_mtp.config import EngineConfig
from compiled_mtp.request import SamplingParams
from compiled_mtp.server import serve
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.terminal.flags import COMMON_ENGINE, COMMON_SAMPLING, given
from tests.cli.fakes import FakeEngine, made, run_main

TOML = """\
max-batch = 3
mtp_depths = [0, 2]
prefix_cache = false
temperature = 0.5
stop = ["a", "b"]
logit_bias = {5 = 1.5}
"""
YAML = """\
max_batch: 3
mtp_depths: [0, 2]
prefix_cache: false
temperature: 0.5
stop: [a, b]
logit_bias: {5: 1.5}
seed:
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_settings_come_from_a_file(engine: type[FakeEngine], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert run_main("--prompt", "x", "--config", tmp_path / name, "--temperature", "1.5") == 0
    config, (params,) = made[0].config, made[0].params
    assert (config.max_batch, config.mtp_depths, config.prefix_cache) == (3, (0, 2), False)
    # A flag wins over the file.
    assert params == SamplingParams(temperature=1.5, stop=("a", "b"), logit_bias={5: 1.5})


def test_the_environment_wins_over_the_file(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("max_batch = 3\nblock_size = 32\n")
    monkeypatch.setenv("COMPILED_MTP_MAX_BATCH", "5")
    monkeypatch.setenv("compiled_mtp_block_size", "")
    assert run_main("--prompt", "x", "--config", tmp_path / "a.toml") == 0
    assert (made[0].config.max_batch, made[0].config.block_size) == (5, 32)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "port = 1", "config must name settings of this command only, got 'port' in "),
        (
            "a.toml",
            "max_num_seqs = 1",
            "config must name settings of this command only, got 'max_num_seqs' in {file}; --max-num-seqs is "
            "--max-batch here",
        ),
        (
            "a.toml",
            "max-batch = 1\nmax_batch = 1",
            "config must name a setting once, got 'max_batch' again in",
        ),
        ("a.toml", "max_batch = ", "config must be a file of TOML, got "),
        ("a.yaml", "a: [", "config must be a file of YAML, got "),
        (
            "a.yaml",
            "seed: 1\nmax_batch: 1\nseed: 2\n",
            "config must be a file of YAML, got {file}: seed twice; correct it",
        ),
        ("a.yaml", "- a", "config must hold names and values, got "),
        ("a.yaml", "", "config must hold names and values, got "),
        ("a.json", "{}", "config must end in .toml, .yaml or .yml, got "),
        ("a.toml", "max_batch = true", "max_batch must not be a bool, got True"),
        ("a.toml", None, "config must be a file of TOML, got "),
    ],
)
def test_mistakes_in_a_file_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["run", "--prompt", "x", "--config", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}".replace("{file}", str(tmp_path / name)))


def test_yaml_needs_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("max_batch: 1")
    assert main(["run", "--prompt", "x", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "YAML needs the package PyYAML" in capsys.readouterr().err


def test_a_service_reads_both_of_its_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text("max_batch = 3\nport = 70000\nallowed_hosts = ['a', 'b']\n")
    flags = serve.make_parser().read(["--config", str(tmp_path / "a.toml")])
    assert flags == {"max_batch": 3, "port": 70000, "allowed_hosts": ["a", "b"]}
    assert main(["serve", "--config", str(tmp_path / "a.toml")]) == 2
    assert "port must be less than or equal to 65535, got 70000" in capsys.readouterr().err
    (tmp_path / "a.toml").write_text("api_key = 'x'\n")
    assert main(["serve", "--config", str(tmp_path / "a.toml")]) == 2
    assert "got 'api_key' in" in capsys.readouterr().err
    # One file holds the settings of both: no name stands for two of them.
    assert not set(ServerConfig.model_fields) & set(EngineConfig.model_fields)


def test_the_file_of_the_docs_is_taken(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "a.yaml").write_text(block)
    for command in (run, chat, export, serve):
        words = {run: ["--prompt", "x"], export: ["--output", "x"]}.get(command, [])
        flags = command.make_parser().read([*words, "--config", str(tmp_path / "a.yaml")])
        assert EngineConfig(**given(flags, EngineConfig)).max_batch == 16


@pytest.mark.parametrize("command", [run, chat, export, serve])
def test_help_is_short_and_help_all_is_whole(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = command.make_parser()
    short, whole = parser.format_help(), parser.format_all()
    assert len(short.splitlines()) < 80
    # Of each field there is one flag, and the common ones come first.
    flags = {"--" + name.replace("_", "-") for name in parser._fields}
    assert [flag for flag in flags if f"  {flag}" not in whole] == []
    assert [flag for flag in ("--block-size", "--communicator") if flag in short] == []
    assert whole.index("--max-batch") < whole.index("--block-size")
    assert "environment variable (COMPILED_MTP_MODEL)" in short
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--help-all"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == whole


def test_the_common_flags_exist() -> None:
    assert set(COMMON_ENGINE) <= set(EngineConfig.model_fields)
    assert set(COMMON_SAMPLING) <= set(SamplingParams.model_fields)
    assert set(import_module("compiled_mtp.server.serve")._COMMON) <= set(ServerConfig.model_fields)
