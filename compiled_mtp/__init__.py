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

    __version__: str

__all__ = ["AsyncEngine", "Engine", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

# torch warns about a missing NumPy, which this package does not use.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

_HOME = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineConfig": "config",
    "RequestOutput": "request",
    "SamplingParams": "request",
}


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("compiled-mtp")
    except PackageNotFoundError:  # A source tree that is not installed.
        return "0+uninstalled"


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Import lazily, so that the scheduler and errors of the command line do not load torch.
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name == "__version__":
        return _installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
