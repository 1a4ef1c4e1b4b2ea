"""Keywords of a JSON schema have values of the types that JSON Schema gives them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiled_mtp.errors import quote
from compiled_mtp.sampling.grammar_source import Schema, children


def check_types(place: str, schema: Schema) -> None:
    """Raise ValueError, naming the place, for a keyword that a tool call's rules read, in `schema` or inside
    it, whose value has another type. What others say is checked where a schema is compiled.
    """
    for keyword, (is_met, rule) in _RULES.items():
        if keyword in schema and not is_met(schema[keyword]):
            raise ValueError(
                f"{place}.{keyword} must {rule}, got {quote(schema[keyword])}; write it as JSON Schema does"
            )
    for below, child in children(schema):
        check_types(place + below, child)


def _holds_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _lists_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def _lists_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


_OBJECT = (_holds_schemas, "be an object of schemas")
_SCHEMAS = (_lists_schemas, "be a list of schemas, one at least")
_LENGTH = (_is_length, "be a whole number from 0 to 2**31 - 1")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "properties": _OBJECT,
    "$defs": _OBJECT,
    "definitions": _OBJECT,
    "required": (_lists_text, "be a list of names"),
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "enum": (lambda value: isinstance(value, list) and bool(value), "be a list of values, one at least"),
    "type": (lambda value: isinstance(value, str) or _lists_text(value), "be a type or a list of types"),
    "pattern": (lambda value: isinstance(value, str), "be a regex"),
    "minLength": _LENGTH,
    "maxLength": _LENGTH,
}
