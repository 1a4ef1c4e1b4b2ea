"""Ctrl-C and SIGTERM while packages are imported. Imports next to nothing, so that it can be first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted: nothing more was done"


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM end the process at once, with one line and the exit code that shells have.

    For imports, torch's above all: a KeyboardInterrupt in the middle of one may be swallowed there, or become
    another error. Nothing is to be saved or removed as yet. The handlers from before are there again behind
    it. In other threads than the main one signals do not arrive, and nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in NUMBERS}
    try:
        yield
    finally:
        restore(before)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers that `signal.signal` returned."""
    for number, handler in handlers.items():
        # None: installed by something else than Python, which cannot put it back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _leave(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # Standard error may be closed, or read by nobody.
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)
