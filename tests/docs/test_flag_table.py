"""docs/command-line.md lists every flag of every command, as --help-all describes it.

`python -m tests.docs.test_flag_table` writes the table.
"""

from __future__ import annotations

import argparse

from compiled_mtp.cli.completion import read_flags
from tests.docs.error_texts import ROOT

PATH = ROOT / "docs" / "command-line.md"
PAGE = PATH.read_text(encoding="utf-8")
HEADING = "| flag | what it sets | commands |\n|---|---|---|\n"
# Flags that every command has.
EVERYWHERE = ("--help", "--help-all", "--version", "--config")


def flag_rows() -> list[list[str]]:
    """Return the rows of the table: flag, description, and the commands that have it."""
    commands: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for command, flags in read_flags().items():
        for flag, (text, _) in flags.items():
            if flag.startswith("--") and flag not in EVERYWHERE and text != argparse.SUPPRESS:
                commands.setdefault(flag, []).append(command)
                texts.setdefault(flag, text.replace("|", "\\|"))
    negated = {flag for flag in commands if f"--{flag.removeprefix('--no-')}" in commands and "--no-" in flag}
    return [
        [f"`{flag}`", texts[flag], ", ".join(commands[flag])] for flag in sorted(commands.keys() - negated)
    ]


def table() -> str:
    """Return the lines of the table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in flag_rows())


def test_every_flag_has_its_row() -> None:
    assert PAGE.partition(HEADING)[2] == table(), "run `python -m tests.docs.test_flag_table`"


if __name__ == "__main__":
    before, heading, _ = PAGE.partition(HEADING)
    PATH.write_text(before + heading + table(), encoding="utf-8")
