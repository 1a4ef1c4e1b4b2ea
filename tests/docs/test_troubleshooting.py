"""The code raises every error that docs/troubleshooting.md quotes, word for word."""

from __future__ import annotations

import re

import pytest

from tests.docs.error_texts import ROOT, error_texts

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# The first cell of each row of the tables; a remedy may quote a command between backticks.
QUOTED = re.findall(r"^\| `(.+?)` \| ", TEXT, flags=re.MULTILINE)


def test_there_are_errors_in_every_table() -> None:
    assert len(QUOTED) == sum(line.startswith("| `") for line in TEXT.splitlines()) > 30


@pytest.fixture(scope="module")
def texts() -> frozenset[str]:
    return error_texts()


def test_each_is_raised_somewhere(texts: frozenset[str]) -> None:
    assert [quoted for quoted in QUOTED if quoted not in texts] == []


def test_errors_quoted_outside_the_tables_are_raised(texts: frozenset[str]) -> None:
    said = re.findall(r"`(serve needs [^`]+)`|\*`(running uncompiled: [^`]+)`\*", TEXT)
    assert len(said) == 2
    for text in map("".join, said):
        assert any(text in known for known in texts), text


def test_a_text_that_is_not_in_the_code_is_found(texts: frozenset[str]) -> None:
    assert "mtp_step must be even, got …; halve it" not in texts
