"""--config FILE: settings by their names, in TOML or YAML. Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from compiled_mtp.config.environment import is_in_environment
from compiled_mtp.errors import check, fail, shown
from compiled_mtp.terminal.other_names import remedy_for


def read_settings(file: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a file, except null ones and those that the environment sets.

    known: the settings' names, each with the prefix of its variable, "" for none. Names may be written with
    hyphens, as flags are. Raises ValueError for a file that cannot be read and for an unknown name.
    """
    found = {}
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        rule = "name settings of this command only"
        flags = ["--" + one.replace("_", "-") for one in known]
        remedy = remedy_for("--" + name.replace("_", "-"), flags) or f"known are {', '.join(sorted(known))}"
        check(name in known, "config", rule, f"{key!r} in {file}", remedy)
        check(name not in found, "config", "name a setting once", f"{key!r} again in {file}", "drop one")
        found[name] = value
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (known[name] and is_in_environment(known[name], name))
    }


def _read(file: Path) -> Mapping[Any, Any]:
    readers: Mapping[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
    }
    check(file.suffix in readers, "config", f"end in {_either(readers)}", file, "rename it")
    try:
        found = readers[file.suffix](file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = f"{file}: {shown(error)}"
        raise fail("config", f"be a file of {file.suffix[1:].upper()}", got, "correct it") from None
    remedy = "write one name and its value per line"
    check(isinstance(found, Mapping), "config", "hold names and values", file, remedy)
    return found


def _read_yaml(text: str) -> Any:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise ValueError("YAML needs the package PyYAML, which is not installed") from None
    try:
        tree, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    # PyYAML keeps the last of equal keys.
    keys = [key.value for key, _ in tree.value] if isinstance(found, dict) else []
    if again := [key for place, key in enumerate(keys) if key in keys[:place]]:
        raise ValueError(f"{again[0]} twice")
    return found


def _either(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"
