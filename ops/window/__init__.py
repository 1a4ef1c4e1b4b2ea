"""The rows of a decode round: read from the slots before it, committed to them after it."""

from compiled_mtp.ops.window.op import accept_window, read_window
from compiled_mtp.ops.window.reference import place_chain, place_rows

__all__ = ["accept_window", "place_chain", "place_rows", "read_window"]
