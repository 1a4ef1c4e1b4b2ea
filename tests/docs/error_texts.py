"""The texts of the errors that the code raises, read from its source, with … for values of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CONSTRUCTORS = ("check", "fail")


def error_texts() -> frozenset[str]:
    """Return every literal text of at least two words in the package, and the texts made by `check` and
    `fail`."""
    found: set[str] = set()
    for folder in ("compiled_mtp", "ops", "graphs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= set(_texts(ast.parse(path.read_text(encoding="utf-8"))))
    return frozenset(found)


def _texts(tree: ast.AST) -> Iterator[str]:
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            values = dict(_assignments(scope))
            for node in ast.walk(scope):
                if isinstance(scope, ast.Module) and isinstance(node, ast.Constant | ast.JoinedStr):
                    yield _text(node, {})
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _CONSTRUCTORS:
                    taken = node.args[1:] if getattr(node.func, "id", "") == "check" else node.args
                    if len(taken) >= 4:
                        name, rule, _, remedy = (_text(part, values) for part in taken[:4])
                        yield _squeeze(f"{name} must {rule}, got …; {remedy}")


def _assignments(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Return the names to which the scope assigns one value."""
    counts: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            counts.setdefault(node.targets[0].id, []).append(node.value)
    yield from ((name, values[0]) for name, values in counts.items() if len(values) == 1)


def _text(node: ast.expr, values: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Name) and node.id in values:
        return _text(values[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return _squeeze("".join(_text(part, values) for part in node.values))
    return "…"


def _squeeze(text: str) -> str:
    return re.sub("(… ?)*…", "…", text)
