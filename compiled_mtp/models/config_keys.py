"""JSON files of a checkpoint, read so that an error names the file or the key."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_mtp.errors import fail, shown

FIX = "fix config.json"


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in the JSON file `path`, empty for an optional file that does not exist.

    Raises ValueError for any other file.
    """
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise fail(str(path), "be a readable JSON file", error, "download the file again") from None
    if not isinstance(value, dict):
        raise fail(str(path), "hold a JSON object", type(value).__name__, "download the file again")
    return value


@dataclass(frozen=True)
class Keys:
    """A section of config.json, or of another file with a remedy of its own.

    Its methods raise ValueError, naming the key, for a missing or bad value.
    """

    values: dict[str, Any]
    remedy: str = FIX

    def number(self, key: str, default: float | None = None) -> float:
        """The positive finite number under `key`."""
        value: Any = self.values.get(key, default)
        # Compare types, because a bool is an int. JSON may hold NaN, Infinity and integers of any length.
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise fail(key, "be a positive number", shown(value, repr), self.remedy)
        return float(value)

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        """The integer under `key`, from `least` to `most`."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise fail(key, f"be an integer of at least {least}", shown(value, repr), self.remedy)
        if most is not None and value > most:
            raise fail(key, f"be at most {most}", value, self.remedy)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The bool under `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise fail(key, "be true or false", shown(value, repr), self.remedy)
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under `key`, empty if there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise fail(key, "be an object", repr(value), self.remedy)
        return value or {}
