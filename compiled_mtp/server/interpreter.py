"""Settings of the whole interpreter under which one thread steps an engine beside others."""

from __future__ import annotations

import gc
import sys

# How long one thread may run while another waits: Python's default, 5 ms, is as long as a fast model's step.
_SWITCH_INTERVAL_S = 0.0005


def settle_interpreter() -> None:
    """Shorten the stepping thread's waits for other threads and for garbage collection.

    Called after the model is loaded; changes the whole interpreter.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # A collection that visits all loaded objects would stop every stream for a tenth of a second.
    gc.collect()
    gc.freeze()
