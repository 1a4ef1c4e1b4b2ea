"""The files of examples/deploy and the manifest in docs/production.md name flags, variables and paths that
exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from compiled_mtp.config import EngineConfig
from compiled_mtp.config.environment import ENV_PREFIX, SERVER_ENV_PREFIX
from compiled_mtp.server.auth import _OPEN_PATHS
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.serve import make_parser
from tests.docs.error_texts import ROOT

DEPLOY = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
# What the image and the unit set for other programs.
OTHERS = {"PATH", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
LONGEST_DRAIN_S = ServerConfig.model_fields["drain_timeout_s"].default


def check_variable(name: str) -> None:
    if name in OTHERS:
        return
    if name.startswith(SERVER_ENV_PREFIX):
        assert name.removeprefix(SERVER_ENV_PREFIX).lower() in ServerConfig.model_fields
    else:
        assert name.removeprefix(ENV_PREFIX).lower() in EngineConfig.model_fields


def check_start(arguments: Sequence[str], variables: dict[str, str], monkeypatch: Any) -> None:
    """Check that the service takes these flags and variables, with a key if its address needs one."""
    for name, value in variables.items():
        check_variable(name)
        monkeypatch.setenv(name, value)
    flags = vars(make_parser().parse_args(list(arguments)))
    assert all(name in {**ServerConfig.model_fields, **EngineConfig.model_fields} for name in flags)
    if "api_key_file" in flags:
        monkeypatch.setenv(f"{SERVER_ENV_PREFIX}API_KEY", "a key in place of the file's")
    ServerConfig()


def instructions() -> Iterator[tuple[str, str]]:
    """Return (instruction, arguments) of each step of the Dockerfile."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, arguments = line.partition(" ")
            yield name, arguments.strip()


def variables_of_image() -> dict[str, str]:
    """Return the variables that the last stage sets."""
    found: dict[str, str] = {}
    for name, arguments in instructions():
        if name == "FROM":
            found = {}
        elif name == "ENV":
            found |= dict(word.split("=", 1) for word in shlex.split(arguments))
    return found


def test_the_image_starts_the_service_as_a_user_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(instructions())
    assert json.loads(given["ENTRYPOINT"]) == ["compiled-mtp", "serve"]
    assert int(given["USER"]) > 0
    assert f"--uid {given['USER']} " in " ".join(a for n, a in instructions() if n == "RUN")
    assert int(given["EXPOSE"]) == ServerConfig.model_fields["port"].default
    variables = variables_of_image()
    assert all(
        value.startswith("/data/") for name, value in variables.items() if name.endswith(("HOME", "DIR"))
    )
    monkeypatch.setenv("COMPILED_MTP_SERVER_ALLOWED_HOSTS", "example.org")
    monkeypatch.setenv("COMPILED_MTP_SERVER_API_KEY", "key")
    del variables["PATH"]
    check_start([], variables, monkeypatch)


def test_the_images_probe_asks_for_an_open_path_and_compiles() -> None:
    (probe,) = [arguments for name, arguments in instructions() if name == "HEALTHCHECK"]
    command = json.loads(probe.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "probe", "exec")
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", command[2])
    assert path in _OPEN_PATHS
    assert "127.0.0.1" in ServerConfig(api_key="k", host="0.0.0.0", allowed_hosts="example.org").hosts()


def test_the_image_installs_extras_that_exist_from_files_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = " ".join(arguments for name, arguments in instructions() if name == "RUN")
    (named,) = re.findall(r"\"\.\[(.*?)\]\"", commands)
    assert set(named.split(",")) <= set(extras)
    for file in re.findall(r"--constraint (\S+)", commands):
        assert (ROOT / file).is_file()
    for name, arguments in instructions():
        if name == "COPY" and "--from" not in arguments:
            assert all((ROOT / source).exists() for source in arguments.split()[:-1])
    # The two kinds of image are those of the build argument's branches.
    assert re.findall(r"(\w+)\) ", commands.partition("case ")[2].partition("esac")[0]) == ["cpu", "cuda"]
    assert 'if [ "$DEVICE" = cuda ]' in commands


def test_the_page_names_every_build_argument_with_its_default() -> None:
    given = {a.partition("=")[0]: a.partition("=")[2] for n, a in instructions() if n == "ARG"}
    table = dict(
        re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.partition("| build argument |")[2], re.MULTILINE)
    )
    assert given.keys() <= table.keys()
    assert {name: table[name].strip("`") for name in ("DEVICE", "BASE")} == {
        name: given[name] for name in ("DEVICE", "BASE")
    }


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_compose_files_fit_the_image_and_each_other(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, yaml.safe_load((DEPLOY / file).read_text()))
    service = merged["services"]["compiled-mtp"]
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert build.get("args", {}).keys() <= {a.partition("=")[0] for n, a in instructions() if n == "ARG"}
    variables = variables_of_image() | service["environment"]
    del variables["PATH"]
    check_start(service["command"], variables, monkeypatch)
    assert float(service["stop_grace_period"].removesuffix("s")) > LONGEST_DRAIN_S
    named = {volume.partition(":")[0] for each in merged["services"].values() for volume in each["volumes"]}
    assert {name for name in named if not name.startswith(".")} == merged["volumes"].keys()
    assert all((DEPLOY / name).is_file() for name in named if name.startswith("."))
    used = {name for each in merged["services"].values() for name in each.get("secrets", [])}
    assert used == merged["secrets"].keys()


def merge(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    both = one | two
    for name in one.keys() & two.keys():
        if isinstance(one[name], dict):
            both[name] = merge(one[name], two[name])
    return both


def test_prometheus_may_scrape_the_service_and_grafana_finds_its_board() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    hosts = compose["services"]["compiled-mtp"]["environment"]["COMPILED_MTP_SERVER_ALLOWED_HOSTS"].split(",")
    assert host in hosts
    assert host in compose["services"]
    assert int(port) == ServerConfig.model_fields["port"].default
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = [volume.split(":") for volume in compose["services"]["grafana"]["volumes"]]
    (board,) = [place for file, place, *_ in mounts if file.endswith("grafana.json")]
    assert Path(board).parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in compose["services"]


def test_the_unit_starts_the_service_and_waits_for_its_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "compiled-mtp.service").read_text()
    values = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    command = shlex.split(values["ExecStart"])
    assert command[1] == "serve"
    assert command[0].startswith("/opt/compiled-mtp/bin/")
    assert "/opt/compiled-mtp" in PAGE
    variables = dict(line.split("=", 2)[1:] for line in text.splitlines() if line.startswith("Environment="))
    check_start(command[2:], variables, monkeypatch)
    assert float(values["TimeoutStopSec"]) > LONGEST_DRAIN_S
    assert values["KillMode"] == "mixed"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    program = tmp_path / "compiled-mtp"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "compiled-mtp.service"
    unit.write_text(text.replace(command[0], str(program)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, env=os.environ)
    assert done.stderr.strip() == ""
    assert done.returncode == 0


def test_the_manifest_has_probes_that_the_service_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```yaml\n(containers:.*?)```", PAGE, re.DOTALL)
    manifest = yaml.safe_load(text)
    (container,) = manifest["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in _OPEN_PATHS
        assert probe["port"] in [port["name"] for port in container["ports"]]
        (header,) = probe["httpHeaders"]
        assert header["name"] == "Host"
        assert header["value"] in ServerConfig(api_key="k", host="0.0.0.0", allowed_hosts="a.example").hosts()
    variables = {one["name"]: one.get("value", "a key") for one in container["env"]}
    check_start(container["args"], {"COMPILED_MTP_SERVER_HOST": "0.0.0.0", **variables}, monkeypatch)
    assert manifest["terminationGracePeriodSeconds"] > LONGEST_DRAIN_S


def test_metrics_that_the_page_names_exist() -> None:
    source = (ROOT / "compiled_mtp" / "server" / "metrics.py").read_text()
    named = set(re.findall(r"compiled_mtp_(\w+)", PAGE.partition("## What to watch")[2]))
    assert len(named) >= 3
    assert [name for name in named if f'name("{name}")' not in source] == []
