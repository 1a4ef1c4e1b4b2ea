"""How a tool call in the XML form writes an argument, and how to read it back: raw text or JSON. No torch.

The grammar and the parser share one rule. A schema is a list of alternatives. Strings, in an enum too, are
written raw; every other value is written as JSON. The parser reads a text as JSON if an alternative that is
not a string admits the value, else as a string. A parameter of strings alone is never read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from compiled_mtp.sampling.grammar_source import Schema
from compiled_mtp.sampling.schema_types import well_typed, with_null_types
from compiled_mtp.sampling.schema_values import admits, same

NOTES = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions"}
"""Keywords that do not restrict values."""

_WORDS = ("true", "false", "null")
_NUMBER_START = re.compile(r"-?(?:\d[\d.eE+-]*)?")


class Parameter:
    """Decides how to read the texts of one parameter.

    is_string: always as text. is_json: always as JSON, because no alternative is text. If both are False, the
    value decides (`admits_json`).
    """

    def __init__(self, parameters: Schema, name: str) -> None:
        schema = parameter_schema(with_null_types(well_typed(parameters)), name)
        self._others: list[Schema] = []
        self._listed: list[Any] = []
        several = alternatives(well_typed(schema))
        for one in several:
            if not is_raw(one):
                self._others.append(one)
            elif is_listed(one):
                self._listed += [value for value in listed(one) if not isinstance(value, str)]
        self.is_string = not self._others and not self._listed
        self.is_json = len(self._others) == len(several)

    def admits_json(self, text: str) -> bool:
        """Return whether a whole text is the JSON of a value that an alternative other than text admits."""
        try:
            value = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return False
        return any(same(one, value) for one in self._listed) or any(
            admits(one, value) for one in self._others
        )

    def may_become_json(self, start: str) -> bool:
        """Return whether a text that begins with `start` may be JSON; if not, the text can be streamed."""
        text = start.lstrip()
        if not text or text[0] in '{["':
            return True
        text = text.rstrip()
        return any(word.startswith(text) for word in _WORDS) or _NUMBER_START.fullmatch(text) is not None


def parameter_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of one declared parameter with the definitions to which it may refer."""
    found = (schema.get("properties") or {}).get(name, {})
    inner = found if isinstance(found, Mapping) else {}
    root = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for _ in range(8):
        target = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(inner.get("$ref", "")))
        if target is None or len(inner) > 1 or target[2] not in root.get(target[1], {}):
            break
        referred = root[target[1]][target[2]]
        inner = referred if isinstance(referred, Mapping) else {}
    return {**root, **inner}


def alternatives(schema: Schema) -> list[Schema]:
    """Split a schema of several types into schemas of one type each; raw text may be one of them."""
    several = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(several, list):
        root = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
        inner = [parameter_schema({**root, "properties": {"x": one}}, "x") for one in several]
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", *NOTES)}
        return [typed for one in inner for typed in _by_type({**rest, **one})]
    return _by_type(schema)


def _by_type(schema: Schema) -> list[Schema]:
    kinds = schema.get("type")
    if isinstance(kinds, list) and "string" in kinds and not is_listed(schema):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def is_listed(schema: Schema) -> bool:
    """Return whether a schema lists its values, by enum or const."""
    return "enum" in schema or "const" in schema


def listed(schema: Schema) -> list[Any]:
    """Return the values that a schema lists and its other keywords admit."""
    return [one for one in schema.get("enum", [schema.get("const")]) if admits(schema, one)]


def is_raw(schema: Schema) -> bool:
    """Return whether a value may be written raw: its schema lists or is a string, or restricts nothing."""
    if is_listed(schema):
        return any(isinstance(one, str) for one in schema.get("enum", [schema.get("const")]))
    return schema.get("type") == "string" or set(schema) <= NOTES


def refuse_constant(constant: str) -> None:
    """Raise ValueError for NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
