"""What must hold when a process has forked: a rank ends with its parent, a fork removes no folder of it."""

from __future__ import annotations

import os
import select
import shutil
from pathlib import Path

# How often a process looks whether its parent lives.
_LOOK_S = 1.0


def wait_for_parent_end(parent: int) -> None:
    """Return once the process `parent`, at the other end of stdin, has closed it or ended.

    A fork of the parent may hold the other end for longer, so the parent's number is asked for too.
    """
    while os.getppid() == parent:
        # Not by `sys.stdin`: a thread that reads from that holds a lock, for want of which the interpreter
        # aborts at an end of its own.
        if select.select([0], [], [], _LOOK_S)[0] and not os.read(0, 1 << 16):
            return


def remove_own(folder: Path, owner: int) -> None:
    """Remove a folder in the process `owner`, which made it, and not in a fork that ends before."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
