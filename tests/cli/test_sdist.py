"""The sdist of this tree holds the files of a clone, and its tests run where it was unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests of the tree, of an engine, of the command line, of a tool and of the documents.
PART = (
    "tests/test_packaging.py",
    "tests/test_layering.py",
    "tests/engine/test_engine.py",
    "tests/models/test_draft_vocabulary.py",
    "tests/tools/test_plot.py",
    "tests/cli/test_main.py",
    "tests/docs/test_troubleshooting.py",
)


def call(*command: object, cwd: Path) -> str:
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=cwd, check=False, capture_output=True, text=True, timeout=900, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".*cache")
    tree = place / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    call(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", place, tree, cwd=place)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(place / "out", filter="data")
    (found,) = (place / "out").iterdir()
    return found


@pytest.mark.parametrize("file", PART)
def test_the_tests_to_run_exist(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_it_holds_the_files_of_a_clone(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        ends = (".pyc", ".orig")
        return {
            path.relative_to(root).as_posix()
            for folder in ("compiled_mtp", "ops", "graphs", "tests", "tools", "docs", "examples")
            for path in (root / folder).rglob("*")
            if path.is_file() and not path.name.endswith(ends) and ".egg-info" not in str(path)
        }

    assert files(unpacked) == files(ROOT)
    assert (unpacked / "Makefile").exists()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_its_tests_run(unpacked: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python3*/site-packages")
    # All packages but our own are the installed ones.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    call(*pip, "--no-build-isolation", "--ignore-installed", unpacked, cwd=tmp_path)
    told = call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PART, cwd=unpacked)
    assert " passed" in told
    assert "failed" not in told
