"""The size of a regex with its repeats written out, and the bound on it. No torch.

The time of a mask grows with the lexer's state, which holds a term for each position of the regex that the
text so far may have reached. One count adds few terms: n characters of `.{0,9000}` reach one position. A
count inside a repeat or after another count may reach all of its positions at once, so the size of such
counts is bounded. The size depends on the regex alone: with a bound on the work or time of a mask, drafts and
other requests would decide which requests end in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_REPEATED = 1000

_TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\(\?P?<[a-zA-Z_]\w*>|\(\?[a-zA-Z\-]*[:)]|\{\d*,?\d*\}|.",
    re.DOTALL,
)
_IGNORES_SPACE = re.compile(r"\(\?[a-zA-Z]*x")
_SPACE = re.compile(r"(?<!\\)(?:\s|#[^\n]*)")


class _Part(NamedTuple):
    """size: characters with every count written out; length: of each match, None if matches differ in length;
    counted: size of what bounded counts repeat; single: the most that one count adds to `counted`."""

    size: int = 0
    length: int | None = 0
    counted: int = 0
    single: int = 0


def repeated_size(regex: str) -> int:
    """Return the characters of `regex`'s repeats written out, less its largest count of one match length."""
    texts = [regex, _SPACE.sub("", regex)] if _IGNORES_SPACE.search(regex) else [regex]
    return max(part.counted - part.single for part in map(_measure, texts))


def check_repeats(field: str, regex: str) -> None:
    """Raise ValueError for a regex whose nested or adjoining repeats would slow the masks of whole rounds."""
    if (size := repeated_size(regex)) > MAX_REPEATED:
        raise ValueError(
            f"{field} must have nested and adjoining repeats of at most {MAX_REPEATED} characters written "
            f"out, got {min(size, 10**12)}; write inner counts as * or +, or lower them"
        )


def _measure(regex: str) -> _Part:
    """Measure a regex in one pass with a stack: recursion would fail where the compiler refuses the depth."""
    # For every open group: its alternatives so far, and the parts of the current alternative.
    groups: list[tuple[list[_Part], list[_Part]]] = [([], [])]
    tokens = iter(_TOKEN.findall(regex))
    for token in tokens:
        alternatives, parts = groups[-1]
        if token[0] == "(" and not (token.startswith("(?") and token.endswith(")")):
            groups.append(([], []))
        elif token == ")" and len(groups) > 1:
            groups.pop()
            groups[-1][1].append(_either([*alternatives, _joined(parts)]))
        elif token == "|":
            alternatives.append(_joined(parts))
            parts.clear()
        elif token in "?*+" or (token[0] == "{" and token != "{"):
            if parts:
                parts.append(_repeated(parts.pop(), token))
        else:
            if token == "[":
                _skip_class(tokens)
            if token[0] != "(":
                parts.append(_Part(1, 1))
    while len(groups) > 1:
        alternatives, parts = groups.pop()
        groups[-1][1].append(_either([*alternatives, _joined(parts)]))
    return _either([*groups[0][0], _joined(groups[0][1])])


def _skip_class(tokens: Iterator[str]) -> None:
    """Skip to the end of a class; a bracket at its beginning is one of its characters."""
    depth, is_first = 1, True
    for token in tokens:
        if token == "]" and not is_first:
            depth -= 1
            if not depth:
                return
        depth += token == "["
        is_first = token == "[" or (is_first and token == "^")


def _joined(parts: list[_Part]) -> _Part:
    return _Part(
        sum(part.size for part in parts),
        None if any(part.length is None for part in parts) else sum(part.length or 0 for part in parts),
        sum(part.counted for part in parts),
        max((part.single for part in parts), default=0),
    )


def _either(alternatives: list[_Part]) -> _Part:
    lengths = {part.length for part in alternatives}
    counted = sum(part.counted for part in alternatives)
    # Alternatives that begin alike share their positions.
    add = sum if counted else max
    return _Part(
        add(part.size for part in alternatives),
        lengths.pop() if len(lengths) == 1 else None,
        counted,
        sum(part.single for part in alternatives),
    )


def _repeated(body: _Part, token: str) -> _Part:
    least, _, most = token.strip("{}").partition(",") if token[0] == "{" else ("0", ",", "")
    turns = max(int(most or least or 0) if most or "," not in token else int(least or 0), 1)
    if token == "?":
        return body._replace(length=0 if body.length == 0 else None)
    is_exact = token[0] == "{" and ("," not in token or least == most)
    length = body.length * turns if is_exact and body.length is not None else None
    if turns == 1:
        return body._replace(length=length)
    size = turns * max(body.size, 1)
    return _Part(size, length, size, size if body.length is not None else 0)
