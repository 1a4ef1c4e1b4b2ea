"""The one form of the errors that a caller can cause, and foreign text made safe to print."""

from __future__ import annotations

from collections.abc import Callable

LONGEST_TEXT = 400


def shown(value: object, text_of: Callable[[object], str] = str) -> str:
    """`value` as text for one line of a terminal: at most `LONGEST_TEXT` characters of it, with the number of
    all where some are left out, and what does not print (control characters, halves of surrogate pairs)
    escaped.

    Whatever comes from a checkpoint's files or from a caller goes through here on its way into a message.
    """
    try:
        text = text_of(value)
    except ValueError:  # An integer of more digits than Python writes out.
        text = f"a number of more than {LONGEST_TEXT} digits"
    head = "".join(c if c.isprintable() else _escaped(c) for c in text[:LONGEST_TEXT])
    return head if len(text) <= LONGEST_TEXT else f"{head}... ({len(text)} characters)"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def fail(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The one form of our errors, to be raised by the caller; see `shown` for what becomes of `got`."""
    return ValueError(f"{shown(name)} must {shown(rule)}, got {shown(got)}; {remedy}")


def check(ok: bool, name: str, rule: str, got: object, remedy: str) -> None:
    """Raise that error unless `ok`."""
    if not ok:
        raise fail(name, rule, got, remedy)
