"""compiled-mtp: decode Qwen3-Next, Qwen3.5 and Qwen3.6 checkpoints with their own MTP head, exactly."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiled_mtp.async_engine import AsyncEngine
    from compiled_mtp.config import EngineConfig
    from compiled_mtp.engine import Engine
    from compiled_mtp.request import RequestOutput, SamplingParams

__all__ = ["AsyncEngine", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]

# torch misses a NumPy that nothing here uses.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

_HOME = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineConfig": "config",
    "RequestOutput": "request",
    "SamplingParams": "request",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that the scheduler and the command line's errors never wait for torch.
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
