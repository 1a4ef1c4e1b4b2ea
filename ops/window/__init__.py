"""The rows of a decode round: read from the slots before it, committed to them after it."""

from compiled_mtp.ops.window.reference import (
    Accepted,
    Cursors,
    Window,
    accept_window,
    place_chain,
    place_rows,
    read_window,
)

__all__ = ["Accepted", "Cursors", "Window", "accept_window", "place_chain", "place_rows", "read_window"]
