"""How much memory a CPU host has for this process."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

# What a control group's files are called: its limit, its use, the prefix of memory.stat's keys for it and
# those below it. Source: the kernel's documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
_GROUP_V2 = ("memory.max", "memory.current", "")
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can take on a CPU host now without swapping or being killed.

    They include the page cache, full after a checkpoint was read, because the kernel gives it back. Every
    control group from the process's own upwards may limit them. Without a /proc/meminfo: all physical memory.
    """
    try:
        meminfo = (proc / "meminfo").read_text()
        room = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([room, *_group_rooms(proc / "self" / "cgroup", cgroups)])


def _group_rooms(membership: Path, cgroups: Path) -> list[int]:
    """The bytes left below each limit on the groups that the file `membership` names and on those above."""
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
        # In a container the path may be the host's, of which only the root is to be seen.
        for group in (own, *own.parents):
            room = _group_room(root / group, *names)
            rooms += [] if room is None else [room]
    return rooms


def _group_room(group: Path, limit_name: str, use_name: str, prefix: str) -> int | None:
    """The bytes left below the limit on one group, or None where it has none."""
    try:
        limit = int((group / limit_name).read_text())
        use = int((group / use_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(limit - max(use - cached, 0), 0)
