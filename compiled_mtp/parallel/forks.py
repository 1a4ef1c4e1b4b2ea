"""Forked processes: a rank ends with its parent, and a fork does not remove its parent's folders."""

from __future__ import annotations

import os
import select
import shutil
from pathlib import Path

# How often a process checks that its parent lives.
_CHECK_S = 1.0


def wait_for_parent_end(parent: int) -> None:
    """Return once the process `parent`, at the other end of stdin, has closed it or ended.

    A fork of the parent may hold the other end for longer, so the parent's process number is checked too.
    """
    while os.getppid() == parent:
        # Read the descriptor: a thread that reads from `sys.stdin` holds its lock, and the interpreter aborts
        # at exit if it cannot take that lock.
        if select.select([0], [], [], _CHECK_S)[0] and not os.read(0, 1 << 16):
            return


def remove_own(folder: Path, owner: int) -> None:
    """Remove a folder if this process is `owner`, which made it, and not a fork of it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
