"""Whether a schema admits a JSON value, as far as reading a parameter needs it. Pure Python.

Ignores `pattern` and `format`: Python's regexes backtrack, and a caller's regex may never end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isfinite
from typing import Any, TypeGuard

from compiled_mtp.sampling.grammar_source import Schema
from compiled_mtp.sampling.schema_types import well_typed

# A schema that refers to itself may need any number of steps.
_MAX_STEPS = 10_000
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "null": (type(None),),
    "boolean": (bool,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def admits(schema: Schema, value: Any) -> bool:
    """Return whether `schema`, which includes the definitions that it refers to, admits a JSON value.

    Ignores unknown keywords and keywords of a wrong type; refuses a value that takes too many steps.
    """
    roots = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema.get(key), Mapping)}
    try:
        return _admits(schema, value, roots, iter(range(_MAX_STEPS)))
    except (RecursionError, StopIteration, OverflowError):
        return False


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _admits(schema: Any, value: Any, roots: Schema, steps: Iterator[int]) -> bool:
    next(steps)
    if not isinstance(schema, Mapping):
        return schema is not False
    schema = well_typed(schema)

    def inside(one: Any, inner: Any = value) -> bool:
        return _admits(one, inner, roots, steps)

    if "$ref" in schema and not inside(_referred(schema["$ref"], roots)):
        return False
    if schema.get("nullable") and value is None and "type" in schema:
        return True
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_of(kind, value) for kind in kinds):
        return False
    if "enum" in schema and not any(same(one, value) for one in schema["enum"]):
        return False
    if "const" in schema and not same(schema["const"], value):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(map(inside, schema[key])):
            return False
    several = schema.get("allOf")
    if isinstance(several, list) and not all(map(inside, several)):
        return False
    if isinstance(value, str):
        return _fits(schema, len(value), "minLength", "maxLength")
    if isinstance(value, list):
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        rest = schema.get("items", True)
        return _fits(schema, len(value), "minItems", "maxItems") and all(
            inside(first[index] if index < len(first) else rest, one) for index, one in enumerate(value)
        )
    if isinstance(value, dict):
        return _admits_object(schema, value, inside)
    return isinstance(value, bool) or value is None or _fits_number(schema, value)


def _admits_object(schema: Schema, value: dict[str, Any], inside: Any) -> bool:
    properties = schema.get("properties", {})
    rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return (
        _fits(schema, len(value), "minProperties", "maxProperties")
        and all(name in value for name in schema.get("required", ()))
        and all(inside(properties.get(name, rest), one) for name, one in value.items())
    )


def _fits_number(schema: Schema, value: int | float) -> bool:
    above, below, step = (schema.get(f"{k}") for k in ("exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
    return (
        _fits(schema, value, "minimum", "maximum")
        and not (_is_number(above) and value <= above)
        and not (_is_number(below) and value >= below)
        and not (_is_number(step) and step > 0 and not _is_multiple(value, step))
    )


def _is_multiple(value: int | float, step: int | float) -> bool:
    # Compare the decimal texts: in floating point 0.3 is not a multiple of 0.1.
    return isfinite(value) and (Fraction(str(value)) / Fraction(str(step))).denominator == 1


def _fits(schema: Schema, size: int | float, least: str, most: str) -> bool:
    low, high = schema.get(least), schema.get(most)
    return not (_is_number(low) and size < low) and not (_is_number(high) and size > high)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_of(kind: str, value: Any) -> bool:
    if kind == "integer":
        return _is_number(value) and (isinstance(value, int) or value.is_integer())
    is_right = isinstance(value, _TYPES.get(kind, ()))
    return is_right and (kind == "boolean" or not isinstance(value, bool))


def _referred(reference: Any, roots: Schema) -> Any:
    """Return the schema that a reference names, True (any value) if it names none."""
    parts = reference.split("/") if isinstance(reference, str) else []
    if len(parts) == 3 and parts[0] == "#" and parts[1] in roots:
        return roots[parts[1]].get(parts[2], True)
    return True
