"""Values of callers in the texts of errors: short, on one line, and with nothing that a terminal obeys."""

from __future__ import annotations

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 60
_MOST_CHARACTERS = 400


def quote(value: object) -> str:
    """Return `value` as Python writes it, in at most 400 characters: of what is longer the middle is out."""
    return _cut(escape(_REPR.repr(value)), _MOST_CHARACTERS)


def escape(text: str, most_characters: int | None = None) -> str:
    """Return `text` with everything escaped that is not printable, cut to `most_characters` if given."""
    if most_characters is not None:
        text = _cut(text, most_characters)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
