"""Calls of `read_window` and `accept_window`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from compiled_mtp.ops.features import RECENT_IDS
from compiled_mtp.ops.window import Cursors, History, accept_window, read_window
from op_cases import BLOCK_SIZE, INT32, INT64, MAX_BLOCKS, SHAPES, SLOTS, WINDOW, LaunchCase, tensor


def window(device: torch.device, is_forced: bool = False, has_lookup: bool = False) -> None:
    """Read the rows of one request and accept them; is_forced: with ids in the place of samples; has_lookup:
    the text is kept."""
    empty = functools.partial(tensor, device, dtype=INT64)
    index = empty(1, dtype=INT32)
    cursors = Cursors(empty(SLOTS), empty(SLOTS), empty(SLOTS))
    sizes = (WINDOW - 1, BLOCK_SIZE, MAX_BLOCKS * BLOCK_SIZE)
    read_window(index, cursors, empty(SLOTS, WINDOW - 1), empty(SLOTS, MAX_BLOCKS, dtype=INT32), *sizes)
    table = empty(1, MAX_BLOCKS, dtype=INT32)
    outcome = torch.empty(WINDOW, dtype=torch.uint8, device=device)
    counts = empty(SLOTS, SHAPES["27b"].vocab, dtype=INT32)
    history = History(empty(SLOTS, dtype=INT32), counts, empty(SLOTS, RECENT_IDS))
    rows = (empty(WINDOW), empty(WINDOW), outcome, index, empty(1), table)
    forced = empty(SLOTS, sizes[-1], dtype=INT32) if is_forced else None
    text = empty(SLOTS, sizes[-1], dtype=INT32) if has_lookup else None
    matched = empty(SLOTS, dtype=INT32) if has_lookup else None
    accept_window(*rows, cursors, history, *sizes, forced_ids=forced, token_ids=text, matched=matched)


def launches(capability: int) -> Iterator[LaunchCase]:
    yield LaunchCase("round", window)
    yield LaunchCase("forced", functools.partial(window, is_forced=True))
    yield LaunchCase("lookup", functools.partial(window, has_lookup=True))
