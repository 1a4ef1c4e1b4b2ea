"""Settings of an engine and of torchrun; only this folder reads the environment."""

from __future__ import annotations

from compiled_mtp.config.engine_config import EngineConfig, as_config
from compiled_mtp.config.torchrun import Torchrun

__all__ = ["EngineConfig", "Torchrun", "as_config"]
