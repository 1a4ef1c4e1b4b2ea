"""How much memory a host has free for this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path, PurePosixPath

# Of a control group: the files with its limit and its use, and the prefix of the keys in memory.stat that
# count it together with the groups below it. Source: the kernel's documentation, admin-guide/cgroup-v2.rst
# and cgroup-v1/memory.rst.
_GROUP_V2 = ("memory.max", "memory.current", "")
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process can allocate now without swapping or being killed.

    They include the page cache, which is full after a checkpoint was read: the kernel reclaims it. The
    process's control group, every group above it, and the limit of its address space (`ulimit -v`) may limit
    them. Without /proc/meminfo: all physical memory.
    """
    try:
        meminfo = (proc / "meminfo").read_text()
        room = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([room, *_group_rooms(proc / "self" / "cgroup", cgroups), *_address_room(proc)])


def _address_room(proc: Path) -> list[int]:
    """The bytes left below the limit of the process's address space; empty without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int((proc / "self" / "statm").read_text().split()[0])
    return [max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)]


def _group_rooms(membership: Path, cgroups: Path) -> list[int]:
    """The bytes left below each limit of the groups that the file `membership` names and the groups above."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", _GROUP_V1) if controllers else (cgroups, _GROUP_V2)
        own = PurePosixPath(path).relative_to("/")
        # In a container the path may be the host's, and only its root may be visible.
        for group in (own, *own.parents):
            room = _group_room(root / group, *names)
            rooms += [] if room is None else [room]
    return rooms


def _group_room(group: Path, limit_name: str, use_name: str, prefix: str) -> int | None:
    """The bytes left below the limit of one group; None for a group without a limit."""
    try:
        limit = int((group / limit_name).read_text())
        use = int((group / use_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(limit - max(use - cached, 0), 0)
