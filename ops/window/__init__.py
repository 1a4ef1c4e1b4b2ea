"""The rows of a decode round: read from the slots before it, committed to them after it."""

from compiled_mtp.ops.window.reference import (
    MAX_DRAFTS,
    Accepted,
    Cursors,
    History,
    Window,
    accept_window,
    committed_ids,
    place_chain,
    place_rows,
    read_window,
)

__all__ = [
    "MAX_DRAFTS",
    "Accepted",
    "Cursors",
    "History",
    "Window",
    "accept_window",
    "committed_ids",
    "place_chain",
    "place_rows",
    "read_window",
]
