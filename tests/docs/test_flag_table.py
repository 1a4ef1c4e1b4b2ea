"""docs/command-line.md lists every flag of every command, as --help-all describes it.

After a change of flags paste the rows that the failed test prints.
"""

from __future__ import annotations

import argparse

from compiled_mtp.cli.completion import read_flags
from compiled_mtp.cli.main import COMMANDS
from tests.docs.error_texts import ROOT
from tests.docs.test_tables import rows_of

PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
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


def test_every_flag_has_its_row() -> None:
    expected = flag_rows()
    lines = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    table = PAGE.partition("## Every flag")[2]
    assert [row for row in rows_of(table) if row[0].startswith("`--")] == expected, f"the rows are:\n{lines}"
    assert {command for row in expected for command in row[2].split(", ")} <= COMMANDS.keys()
