"""The one form of the errors that a caller can cause, and foreign text made safe to print."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

LONGEST_TEXT = 400
# What to do about an error of pydantic's, by how its `type` begins.
_REMEDIES = {
    "greater_than": "raise it",
    "less_than": "lower it",
    "multiple_of": "round it",
    "literal_error": "choose one of them",
    "int": "give a whole number",
    "float": "give a number",
    "finite_number": "give a number",
    "bool": "give true or false",
    "path": "give a path",
}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 60


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
    head = escape(text[:LONGEST_TEXT])
    return head if len(text) <= LONGEST_TEXT else f"{head}... ({len(text)} characters)"


def quote(value: object) -> str:
    """`value` as Python writes it, made safe as by `shown`: of what is longer the middle is left out."""
    return _without_middle(escape(_REPR.repr(value)), LONGEST_TEXT)


def escape(text: str, most_characters: int | None = None) -> str:
    """`text` with everything escaped that does not print; of more than `most_characters`, if given, the
    middle is left out first."""
    if most_characters is not None:
        text = _without_middle(text, most_characters)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def fail(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The one form of our errors, to be raised by the caller; see `shown` for what becomes of `got`."""
    return ValueError(f"{shown(name)} must {shown(rule)}, got {shown(got)}; {remedy}")


def rule_of(message: str) -> str:
    """The rule that a message of pydantic's tells, to stand behind "must"."""
    rule = message.removeprefix("Value error, ").removeprefix("Input should ")
    # Of a wrong type for a path it names a class of Python's.
    return rule.partition(" for <class ")[0].replace("Input is not a", "be a", 1)


def remedy_of(kind: str) -> str:
    """What a caller does about an error of pydantic's of the `type` kind."""
    return next((remedy for start, remedy in _REMEDIES.items() if kind.startswith(start)), "correct it")


def check(ok: bool, name: str, rule: str, got: object, remedy: str) -> None:
    """Raise that error unless `ok`."""
    if not ok:
        raise fail(name, rule, got, remedy)


def check_type(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise ValueError unless `value` is None or a `kind`."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {quote(value)}; {remedy}")
