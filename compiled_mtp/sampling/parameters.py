"""How a parameter of a call in the XML form is written and read back: as text, or as JSON. No torch.

One rule for the grammar and for who reads its text: a schema is a list of alternatives; a string stands as it
is, and so does a listed one; every other value is JSON. A text is JSON where an alternative that is no string
admits its value, else it is the string. What only strings may be is never read as JSON.
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
"""Keywords that allow and forbid nothing."""

_WORDS = ("true", "false", "null")
_NUMBER_START = re.compile(r"-?(?:\d[\d.eE+-]*)?")


class Parameter:
    """How the texts of one parameter are read.

    is_string: always as text; is_json: always as JSON, since no alternative is text. Neither: by the value.
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
        """Whether a whole text is the JSON of a value that is no string as it stands."""
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return any(same(one, value) for one in self._listed) or any(
            admits(one, value) for one in self._others
        )

    def may_become_json(self, start: str) -> bool:
        """Whether a text that begins with `start` may be JSON; where not, it can be told as it comes."""
        text = start.lstrip()
        if not text or text[0] in '{["':
            return True
        text = text.rstrip()
        return any(word.startswith(text) for word in _WORDS) or _NUMBER_START.fullmatch(text) is not None


def parameter_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of one declared parameter, alone: definitions it may refer to come with it."""
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
    """A schema of several types as several schemas; one of them may be raw text."""
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
    """Whether a schema lists its values."""
    return "enum" in schema or "const" in schema


def listed(schema: Schema) -> list[Any]:
    """Return the values that a schema lists and does not forbid by its other keywords."""
    return [one for one in schema.get("enum", [schema.get("const")]) if admits(schema, one)]


def is_raw(schema: Schema) -> bool:
    """Whether a value is written as it is: its schema says string, or says nothing at all."""
    if is_listed(schema):
        return any(isinstance(one, str) for one in schema.get("enum", [schema.get("const")]))
    return schema.get("type") == "string" or set(schema) <= NOTES


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
