"""Flags from the fields of settings: one for each, which the settings themselves check. No torch."""

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
    """A parser with --version, whose errors are one line that says what to do; flags are written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._unknown: list[str] = []
        version = f"compiled-mtp {compiled_mtp.__version__}"
        self.add_argument("--version", action="version", version=version)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; see `error`."""
        words = list(sys.argv[1:] if args is None else args)
        flags = (w.partition("=")[0] for w in itertools.takewhile("--".__ne__, words) if " " not in w)
        self._unknown = [f for f in flags if f.startswith("--") and f not in self._option_string_actions]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process. argparse tells of a missing flag first, which may be an unknown one misspelt."""
        if "required" in message and self._unknown:
            message = f"unrecognized arguments: {' '.join(self._unknown)}"
        self.exit(EXIT_USAGE, f"error: {message}; --help lists the flags\n")


def add_fields(parser: Parser, title: str, model: Any, skip: Collection[str] = ()) -> None:
    """Add a group of flags, one for each field of the pydantic `model` but those in `skip`.

    A flag that is not given is absent from the result, so that defaults stay with the model.
    """
    group = parser.add_argument_group(title)
    for name, info in model.model_fields.items():
        if name in skip:
            continue
        described = (info.description or "").replace("%", "%%")
        if info.default not in (None, (), "auto") and "default:" not in described:
            # As it would be written behind the flag.
            default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
            described += f" (default: {default})"
        # The models check the values: strings are all they need, but for containers.
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
    """Add --output, the one name of what a command writes, and --out, its older one."""
    parser.add_argument("--output", "--out", **options)


def given(flags: dict[str, Any], model: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """The fields of `model` that were given as flags, but those in `skip`."""
    return {name: flags[name] for name in model.model_fields if name in flags and name not in skip}


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def _json_or_text(text: str) -> Any:
    return _json_value(text) if text.startswith("{") else text


_json_value.__name__ = _json_or_text.__name__ = "JSON"  # As argparse names it in its errors.
