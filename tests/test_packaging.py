"""The package is complete in every form, and ops and graphs have no import name of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folder -> import name of every top-level package.
PACKAGES = {"compiled_mtp": "compiled_mtp", "ops": "compiled_mtp.ops", "graphs": "compiled_mtp.graphs"}


def package_files(pattern: str) -> dict[str, Path]:
    """Return the files of all packages by their paths in an installed copy."""
    found: dict[str, Path] = {}
    for folder, name in PACKAGES.items():
        for path in (ROOT / folder).rglob(pattern):
            relative = path.relative_to(ROOT / folder)
            if folder == "compiled_mtp" and relative.parts[0] in ("ops", "graphs"):
                continue
            found[f"{name.replace('.', '/')}/{relative.as_posix()}"] = path
    return found


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = package_files("__init__.py")
    assert sorted(listed) == sorted(name.removesuffix("/__init__.py").replace("/", ".") for name in inits)


def test_versions_that_the_readers_of_pyproject_see() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language")}
    assert {"3.11", "3.12", "3.13"} <= versions
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_folder_with_modules_is_a_package() -> None:
    files = package_files("*.py")
    assert [name for name in files if f"{name.rpartition('/')[0]}/__init__.py" not in files] == []


def test_links_of_the_tree() -> None:
    for name in ("ops", "graphs"):
        link = ROOT / "compiled_mtp" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("name", ["ops", "graphs"])
def test_no_import_under_a_bare_name(name: str) -> None:
    result = run(sys.executable, "-c", f"import {name}", cwd=ROOT)
    assert result.returncode == 1
    assert f"ImportError: import compiled_mtp.{name}, not {name}" in result.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree, and the wheel built from that sdist."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.egg-info")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    shutil.copy(__file__, tree / "tests")
    # Instead of the weights, which would only take time to compress.
    (tree / "compiled_mtp" / "default_model" / "model.safetensors").touch()
    out = tmp_path_factory.mktemp("dist")
    result = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=tree)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_wheel_and_sdist_hold_every_module(built: Path) -> None:
    modules = set(package_files("*.py")) | {
        "compiled_mtp/py.typed",
        "compiled_mtp/default_model/model.safetensors",
    }
    data = {n for n in package_files("*.json") if n.startswith("compiled_mtp/default_model/")}
    data |= {n for n in package_files("page/*") if n.startswith("compiled_mtp/server/")}
    assert "compiled_mtp/server/page/index.html" in data
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert modules | data <= names
    assert {n.split("/")[0] for n in names} == {"compiled_mtp"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        packed = {member.partition("/")[2] for member in sdist.getnames()}
        links = {m.name.partition("/")[2]: m.linkname for m in sdist.getmembers() if m.issym()}
    assert links == {"compiled_mtp/ops": "../ops", "compiled_mtp/graphs": "../graphs"}
    assert "tests/test_packaging.py" in packed
    for folder in ("ops", "graphs"):
        held = {n.removeprefix("compiled_mtp/") for n in modules if n.startswith(f"compiled_mtp/{folder}/")}
        assert held <= packed


def test_installed_package_imports(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, '.');"
        "import compiled_mtp.ops.registry as r, compiled_mtp.graphs.buckets as b;"
        "print(r.__file__, b.__file__)"
    )
    result = run(sys.executable, "-I", "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(Path(p).resolve().is_relative_to(tmp_path.resolve()) for p in result.stdout.split())


def test_the_package_exports_its_public_names() -> None:
    import compiled_mtp

    assert dir(compiled_mtp) == sorted(compiled_mtp.__all__)


# Packages that the extras bring, and that the tests' environment therefore has.
EXTRAS = (
    "numpy",
    "llguidance",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "huggingface_hub",
    "httpx",
)
WITHOUT_EXTRAS = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from compiled_mtp.cli.main import main
sys.exit(main(["run", "--prompt", "def f(", "--max-tokens", "4", "--temperature", "0"]))
"""


def test_the_required_packages_are_enough_to_decode() -> None:
    ran = run(sys.executable, "-c", WITHOUT_EXTRAS.format(names=EXTRAS), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout
