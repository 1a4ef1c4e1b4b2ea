"""The environment variables of settings: their prefixes, and which of them are set."""

from __future__ import annotations

import os
from collections.abc import Collection

ENV_PREFIX = "COMPILED_MTP_"
# Variables with this prefix belong to the service; EngineConfig does not refuse them as unknown.
SERVER_ENV_PREFIX = "COMPILED_MTP_SERVER_"


def unknown_variables(prefix: str, known: Collection[str]) -> list[str]:
    """Return the environment variables that begin with `prefix` and name none of `known`."""
    names = {k: k.lower().removeprefix(prefix.lower()) for k in os.environ}
    return sorted(k for k, name in names.items() if name != k.lower() and name not in known)


def is_in_environment(prefix: str, name: str) -> bool:
    """Return whether the variable of the setting `name` is set; an empty one counts as not set."""
    wanted = f"{prefix}{name}".lower()
    return any(value and key.lower() == wanted for key, value in os.environ.items())
