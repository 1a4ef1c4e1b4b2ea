"""Flags from the fields of settings: one flag per field; the settings check the values. Imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Collection
from typing import Any, NoReturn, get_args, get_origin

import compiled_mtp

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """A parser with --version, whose errors are one line with a remedy; flags cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._unknown: list[str] = []
        version = f"compiled-mtp {compiled_mtp.__version__}"
        self.add_argument("--version", action="version", version=version)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; note unknown flags for `error`."""
        words = list(sys.argv[1:] if args is None else args)
        flags = (w.partition("=")[0] for w in itertools.takewhile("--".__ne__, words) if " " not in w)
        self._unknown = [f for f in flags if f.startswith("--") and f not in self._option_string_actions]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with one line; unknown flags come before missing ones, which they may misspell."""
        if "required" in message and self._unknown:
            message = f"unrecognized arguments: {' '.join(self._unknown)}"
        self.exit(EXIT_USAGE, f"error: {message}; --help lists the flags\n")


def add_fields(parser: Parser, title: str, model: Any, skip: Collection[str] = ()) -> None:
    """Add a group of flags, one for each field of the pydantic `model` except those in `skip`.

    A flag that is not given is absent from the result, so that the model sets its default.
    """
    group = parser.add_argument_group(title)
    for name, info in model.model_fields.items():
        if name in skip:
            continue
        described = (info.description or "").replace("%", "%%")
        if info.default not in (None, (), "auto") and "default:" not in described:
            # In the form in which a user writes it after the flag.
            default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
            described += f" (default: {default})"
        # The models read and check strings; only containers need a type here.
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": described}
        kinds = {get_origin(kind) or kind for kind in (info.annotation, *get_args(info.annotation))}
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        elif tuple in kinds:
            options |= {"action": "append", "metavar": "X", "help": f"{described}; repeat the flag for more"}
        elif dict in kinds and str in kinds:
            options |= {"type": _json_or_text, "metavar": "NAME|JSON"}
        elif dict in kinds or list in kinds:
            options |= {"type": _json_value, "metavar": "JSON"}
        else:
            choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
            options["metavar"] = "|".join(choices) or "X"
        group.add_argument("--" + name.replace("_", "-"), **options)


def add_output(parser: Parser, **options: Any) -> None:
    """Add --output, the flag for the file or directory that a command writes, and its older name --out."""
    parser.add_argument("--output", "--out", **options)


def given(flags: dict[str, Any], model: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of `model` that were given as flags, except those in `skip`."""
    return {name: flags[name] for name in model.model_fields if name in flags and name not in skip}


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def _json_or_text(text: str) -> Any:
    return _json_value(text) if text.startswith("{") else text


# argparse puts this name into its errors.
_json_value.__name__ = _json_or_text.__name__ = "JSON"
