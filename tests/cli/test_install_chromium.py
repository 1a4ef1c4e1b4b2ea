"""The script that installs Chromium for `make browser`, with and without a package in apt."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install_chromium.sh"


def run(folder: Path, **commands: str) -> tuple[int, str]:
    """Run it as root with no other commands on the path than `commands`, each a line of shell."""
    for name, line in {"id": "echo 0", **commands}.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT)], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=20
    )
    return done.returncode, done.stderr


def test_installed_packages_are_not_installed_again(tmp_path: Path) -> None:
    assert run(tmp_path, chromium="", chromedriver="", apt_get="exit 9") == (0, "")


def test_it_installs_the_packages_of_apt(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run(tmp_path, apt_get=f'echo "$@" >> {log}', apt_cache="") == (0, "")
    update, install = log.read_text().splitlines()
    assert update.startswith("update")
    assert {"install", "chromium", "chromium-driver"} < set(install.split())


@pytest.mark.parametrize("missing", ["chromium", "chromium-driver"])
def test_where_apt_has_no_driver_it_names_a_remedy(tmp_path: Path, missing: str) -> None:
    log = tmp_path / "log"
    code, error = run(tmp_path, apt_get=f'echo "$@" >> {log}', apt_cache=f'[ "$2" != {missing} ]')
    assert code == 1
    assert error.startswith(
        f"error: chromium and chromedriver must be installed, got none; apt has no package {missing} here; "
    )
    assert "snap install chromium, then ln -s /snap/bin/chromium.chromedriver" in error
    assert error.count("\n") == 1
    assert "install" not in log.read_text()
