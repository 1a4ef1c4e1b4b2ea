"""The one form of errors that a caller can cause, and functions that make foreign text safe to print."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

LONGEST_TEXT = 400
# Remedies of pydantic's errors, by the beginning of an error's `type`.
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


class EngineUnavailableError(ValueError):
    """An engine cannot serve a request now: it sleeps, or an update of its weights has failed."""


def shown(value: object, text_of: Callable[[object], str] = str) -> str:
    """Return `value` as text for one line of a terminal.

    Longer text is cut to `LONGEST_TEXT` characters, followed by its whole length; characters that do not
    print (control characters, halves of surrogate pairs) are escaped. Messages pass every value from a
    checkpoint's files or a caller through this function.
    """
    text = _text(value, text_of)
    head = escape(text[:LONGEST_TEXT])
    return head if len(text) <= LONGEST_TEXT else f"{head}... ({len(text)} characters)"


def _text(value: object, text_of: Callable[[object], str]) -> str:
    try:
        return text_of(value)
    except ValueError:  # An integer of more digits than Python writes out.
        return f"a number of more than {LONGEST_TEXT} digits"


def quote(value: object) -> str:
    """Return the repr of `value`, escaped as by `shown`; longer text loses its middle."""
    return _without_middle(escape(_text(value, _REPR.repr)), LONGEST_TEXT)


def escape(text: str, most_characters: int | None = None) -> str:
    """Return `text` with characters that do not print escaped.

    Text of more than `most_characters`, if given, loses its middle first.
    """
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
    """Return an error in our one form, for the caller to raise; `shown` makes its parts safe."""
    return ValueError(f"{shown(name)} must {shown(rule)}, got {shown(got)}; {remedy}")


def rule_of(message: str) -> str:
    """Return the rule in one of pydantic's messages, in a form that follows "must"."""
    rule = message.removeprefix("Value error, ").removeprefix("Input should ")
    # For a wrong type of a path the message names a Python class.
    return rule.partition(" for <class ")[0].replace("Input is not a", "be a", 1)


def remedy_of(kind: str) -> str:
    """Return the remedy of a pydantic error whose `type` is `kind`."""
    return next((remedy for start, remedy in _REMEDIES.items() if kind.startswith(start)), "correct it")


def check(ok: bool, name: str, rule: str, got: object, remedy: str) -> None:
    """Raise the error that `fail` returns unless `ok`."""
    if not ok:
        raise fail(name, rule, got, remedy)


def check_type(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise ValueError unless `value` is None or a `kind`."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {quote(value)}; {remedy}")
