"""Checks that a JSON schema's keywords have values of the types that JSON Schema asks for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiled_mtp.errors import quote
from compiled_mtp.sampling.grammar_source import Schema, children


def check_types(field: str, schema: Schema) -> None:
    """Raise ValueError, with the field's name, for a keyword whose value has a wrong type.

    Checks only keywords that the grammar of tool calls reads, in `schema` and in the schemas inside it; the
    compiler checks the others.
    """
    for keyword, (is_met, rule) in _RULES.items():
        if keyword in schema and not is_met(schema[keyword]):
            raise ValueError(
                f"{field}.{keyword} must {rule}, got {quote(schema[keyword])}; write it as JSON Schema does"
            )
    for inner, child in children(schema):
        check_types(field + inner, child)


def well_typed(schema: Schema) -> Schema:
    """Return a schema without its own keywords that `check_types` would refuse."""
    return {key: one for key, one in schema.items() if key not in _RULES or _RULES[key][0](one)}


def with_null_types(schema: Schema) -> Schema:
    """Return a schema in which null is one of the types where OpenAPI's `nullable` is true."""
    wider: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            wider[key] = {name: _with_null_type(one) for name, one in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            wider[key] = [_with_null_type(one) for one in value]
        elif key in ("items", "additionalProperties"):
            wider[key] = _with_null_type(value)
        elif key != "nullable":
            wider[key] = value
    kinds = wider.get("type")
    if schema.get("nullable") and isinstance(kinds, (str, list)):
        several = [kinds] if isinstance(kinds, str) else list(kinds)
        wider["type"] = [*several, *(["null"] if "null" not in several else [])]
    return wider


def _with_null_type(schema: Any) -> Any:
    return with_null_types(schema) if isinstance(schema, Mapping) else schema


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
    "format": (lambda value: isinstance(value, str), "be a name"),
    "nullable": (lambda value: isinstance(value, bool), "be true or false"),
    "minLength": _LENGTH,
    "maxLength": _LENGTH,
}
