"""Ctrl-C and SIGTERM while packages are imported. Imports almost nothing, so that it can come first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted: nothing more was done"


def leaving() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM end the process at once, with one line and the exit code that shells use.

    For imports, torch's above all: an import may swallow a KeyboardInterrupt or turn it into another error.
    Use it while there is nothing to save or remove.
    """
    return handling(_leave)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` handle Ctrl-C and SIGTERM; the previous handlers are restored at the end.

    Changes nothing outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in NUMBERS}
    try:
        yield
    finally:
        restore(before)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers that `signal.signal` returned."""
    for number, handler in handlers.items():
        # None: the handler was not installed from Python, which cannot restore it.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _leave(number: int, frame: FrameType | None) -> None:
    # Standard error may be closed, or its reader gone.
    with contextlib.suppress(OSError):
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)
