"""Flags from the fields of settings: one flag per field; the settings check the values. Imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import compiled_mtp
from compiled_mtp.terminal.config_file import read_settings
from compiled_mtp.terminal.other_names import remedy_for

EXIT_USAGE = 2
# No negative number.
_FLAG = re.compile(r"--?[A-Za-z]")


# The flags of EngineConfig and SamplingParams that --help shows; --help-all shows all.
COMMON_ENGINE = (
    "model",
    "chat_template",
    "offline",
    "device",
    "kv_dtype",
    "mtp_step",
    "max_batch",
    "max_model_len",
    "max_images",
    "tensor_parallel",
    "graph_cache",
    "num_threads",
)
COMMON_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed")


class Parser(argparse.ArgumentParser):
    """A parser with --version, whose errors are one line with a remedy; flags cannot be abbreviated.

    With `add_fields` it also has --config, and --help shows the common flags alone, --help-all every flag.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, add_help=False)
        self._unknown: list[str] = []
        self._rare: list[Any] = []
        # The fields that are flags, each with the prefix of its variable.
        self._fields: dict[str, str] = {}
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        version = f"compiled-mtp {compiled_mtp.__version__}"
        described = "show the version and exit"
        self.add_argument("--version", action="version", version=version, help=described)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; note unknown flags for `error`."""
        words = list(sys.argv[1:] if args is None else args)
        flags = (w.partition("=")[0] for w in itertools.takewhile("--".__ne__, words) if " " not in w)
        self._unknown = [f for f in flags if _FLAG.match(f) and f not in self._option_string_actions]
        return super().parse_known_args(words, namespace)

    def read(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """Return the flags by name, and after them the environment, the settings of --config.

        Raises ValueError for a file that cannot be used.
        """
        flags = vars(self.parse_args(argv))
        file = flags.pop("config", None)
        return flags if file is None else read_settings(file, self._fields) | flags

    def add_rare_group(self, title: str, description: str | None) -> Any:
        """Return a new group of flags that only --help-all shows."""
        self._rare.append(self.add_argument_group(title, description))
        return self._rare[-1]

    def format_help(self) -> str:
        """Return the help without the rare groups."""
        every = self._action_groups
        self._action_groups = [group for group in every if group not in self._rare]
        try:
            return super().format_help()
        finally:
            self._action_groups = every

    def format_all(self) -> str:
        """Return the whole help, the rare groups last."""
        self._action_groups.sort(key=lambda group: group in self._rare)
        return super().format_help()

    def describe(self, flag: str, text: str) -> None:
        """Replace the help of a flag."""
        self._option_string_actions[flag].help = text

    def note_fields(self, names: Iterable[str], env_prefix: str) -> None:
        """Let --config set these fields."""
        if not self._fields:
            self.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
            self.add_argument(
                "--config",
                type=Path,
                metavar="FILE",
                default=argparse.SUPPRESS,
                help="a TOML or YAML file of settings by their names; flags and the environment win over it",
            )
        self._fields |= dict.fromkeys(names, env_prefix)

    def error(self, message: str) -> NoReturn:
        """End the process with one line; unknown flags come before missing ones, which they may misspell."""
        unknown = "unrecognized arguments: "
        # argparse reads -hf as -h with an argument.
        if self._unknown and ("required" in message or "ignored explicit argument" in message):
            message = unknown + " ".join(self._unknown)
        remedy = None
        if message.startswith(unknown):
            first, *_ = message.removeprefix(unknown).split() or ["-"]
            remedy = remedy_for(first, self._option_string_actions)
        self.exit(EXIT_USAGE, f"error: {message}; {remedy or '--help lists the flags'}\n")


def count(text: str) -> int:
    """Parse a flag's integer, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse a flag's integers, each at least 1, separated by commas."""
    return [count(part) for part in text.split(",")]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function that parses a flag's names of `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            rule = f"must be of {', '.join(known)}, separated by commas"
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        return names

    return parse


class _HelpAll(argparse.Action):
    """Shows every flag and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(self, parser: Any, *_: object) -> None:
        print(parser.format_all(), end="")
        parser.exit()


def add_fields(
    parser: Parser, title: str, model: Any, skip: Collection[str] = (), common: Collection[str] = ()
) -> None:
    """Add flags, one for each field of the pydantic `model` except those in `skip`; those in `common` first.

    A flag that is not given is absent from the result, so that the model sets its default.
    """
    names = [name for name in model.model_fields if name not in skip]
    prefix = model.model_config.get("env_prefix", "")
    parser.note_fields(names, prefix)
    first = next(name for name in names if name in common)
    said = f"each flag is also an environment variable ({prefix}{first.upper()})" if prefix else None
    group, rare = parser.add_argument_group(title, said), parser.add_rare_group(f"more {title}", None)
    for name in names:
        _add_field(group if name in common else rare, name, model.model_fields[name])


def _add_field(group: Any, name: str, info: Any) -> None:
    described = (info.description or "").replace("%", "%%")
    if info.default not in (None, ()) and "default:" not in described:
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
    elif Path in kinds:
        options["metavar"] = "PATH"
    else:
        choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
        options["metavar"] = "|".join(choices) or "X"
    group.add_argument("--" + name.replace("_", "-"), **options)


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
