"""How much memory is free on the host: of the machine, of control groups, of the address space."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compiled_mtp.runner.host_memory import available_bytes

MIB = 2**20


def write_group(folder: Path, limit: str, use: int, active: int, inactive: int, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{use}\n")
    # A group of version 1 names its own share without the prefix.
    own = "active_file 1\n" if version == 1 else ""
    stat = f"{own}anon 7\n{names[2]}active_file {active}\n{names[2]}inactive_file {inactive}\n"
    (folder / "memory.stat").write_text(stat)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A host with 1000 MiB available and 10 MiB free, and a process in the group /a/b."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    lines = ("MemTotal: 2048000 kB", "MemFree: 10240 kB", "MemAvailable:    1024000 kB", "Buffers: 5 kB")
    (proc / "meminfo").write_text("\n".join(lines))
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    return proc


def test_available_bytes_count_the_page_cache(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 1000 * MIB
    (proc / "self" / "cgroup").unlink()
    assert available_bytes(proc, tmp_path / "none") == 1000 * MIB


def test_available_bytes_stay_below_the_limit_of_the_address_space(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    (proc / "self" / "statm").write_text("100 50 20 10 0 30 0\n")
    for limit, left in ((300, 200), (60, 0)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit * page, -1))
        assert available_bytes(proc, tmp_path / "none") == left * page


def test_available_bytes_are_capped_by_every_group_above(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write_group(groups / "a" / "b", "max", 900 * MIB, 0, 0)
    assert available_bytes(proc, groups) == 1000 * MIB
    # 500 MiB, of which 300 are used, 250 of them for files.
    write_group(groups / "a" / "b", str(500 * MIB), 300 * MIB, 200 * MIB, 50 * MIB)
    assert available_bytes(proc, groups) == 450 * MIB
    write_group(groups / "a", str(600 * MIB), 300 * MIB, 50 * MIB, 50 * MIB)
    assert available_bytes(proc, groups) == 400 * MIB
    write_group(groups, str(400 * MIB), 100 * MIB, 10 * MIB, 0)
    assert available_bytes(proc, groups) == 310 * MIB
    # Of another branch.
    write_group(groups / "c", "1", 0, 0, 0)
    assert available_bytes(proc, groups) == 310 * MIB
    # The counters are read one after the other: neither difference goes below 0.
    write_group(groups, str(200 * MIB), 10 * MIB, 20 * MIB, 0)
    assert available_bytes(proc, groups) == 200 * MIB
    write_group(groups, str(200 * MIB), 300 * MIB, 0, 0)
    assert available_bytes(proc, groups) == 0


def test_available_bytes_in_a_container_that_names_its_group_as_the_host_does(
    proc: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "cgroup"
    write_group(groups, str(64 * MIB), 0, 0, 0)
    for path in ("/docker/0123/x", "/../other", "/"):
        (proc / "self" / "cgroup").write_text(f"0::{path}\n")
        assert available_bytes(proc, groups) == 64 * MIB


def test_available_bytes_with_control_groups_of_version_1(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/c\n4:memory:/a:b\n1:name=systemd:/\n0::/\n")
    write_group(groups / "memory" / "a:b", str(2**63 - 4096), 900 * MIB, 0, 0, version=1)
    write_group(groups / "memory", str(500 * MIB), 300 * MIB, 200 * MIB, 50 * MIB, version=1)
    write_group(groups / "memory" / "c", "1", 0, 0, 0, version=1)
    assert available_bytes(proc, groups) == 450 * MIB


def test_available_bytes_without_proc_are_the_physical_memory(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes(tmp_path, tmp_path) == physical
    # Kernels before 3.14.
    (tmp_path / "meminfo").write_text("MemTotal: 2048000 kB\nMemFree: 10240 kB\n")
    assert available_bytes(tmp_path, tmp_path) == physical
    assert 0 < available_bytes() <= physical
