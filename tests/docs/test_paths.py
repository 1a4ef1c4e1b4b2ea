"""Every file that a page names exists, and defines the names that the page says it defines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.error_texts import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = (ROOT, ROOT / "compiled_mtp")
PATH = re.compile(r"`((?:\w+/)+\w+\.(?:py|json|jsonl|txt))`")
# As in: a `Family` in `models/family.py`; a field of `Admit` (`plan.py`).
DEFINED = re.compile(r"`(\w+)`,? (?:\(|in )`((?:\w+/)*\w+\.py)`")


def find(name: str) -> Path | None:
    return next((place / name for place in PLACES if (place / name).is_file()), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_names_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in PATH.findall(text) if find(name) is None] == []
    for name, path in DEFINED.findall(text):
        file = find(path)
        assert file is not None, path
        source = file.read_text(encoding="utf-8")
        assert re.search(rf"^\s*(class|def) {name}\b|^{name}\b.* = ", source, re.MULTILINE), (name, path)
