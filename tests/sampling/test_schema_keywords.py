"""JSON Schema (draft 2020-12) by keyword: a grammar takes exactly the values that validate.

A keyword without a grammar is refused. The cases follow the specification's text; jsonschema validates each.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from compiled_mtp.sampling.grammar import GrammarCompiler
from compiled_mtp.sampling.grammar_source import from_schema
from tests.sampling.grammars import EOS, TOKENIZER, compiler

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
# Keyword: a schema, values that it admits, values that it refuses.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "type": ({"type": ["string", "null"]}, ["a", None], [1, [], {}, True]),
    "type integer": ({"type": "integer"}, [0, -7, 12345], [1.5, "1"]),
    "type number": ({"type": "number"}, [0, -1.25, 1e30], ["1", None]),
    "enum": ({"enum": ["a", 2, None, [1, {"b": 2}]]}, ["a", 2, None, [1, {"b": 2}]], ["b", 3, [1]]),
    "const": ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, None]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4, -30]),
    "maximum": ({"type": "integer", "maximum": 120}, [120, -5, 7], [121, 900]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1.5}, [1.75, 2], [1.5, 1, -8]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 10}, [9, -1], [10, 11]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 14, 77], [1, 13]),
    "multipleOf of fractions": (
        {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
        # Numbers are written with as many digits as the step has: 8.5 is 8.50.
        [0.25, 8.75],
        [0.3, 9.25],
    ),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "größe"], ["", "ü"]),
    "maxLength": ({"type": "string", "maxLength": 3}, ["", "abc", "äöü"], ["abcd"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+[0-9]?$"}, ["a", "cab7"], ["", "d", "a77"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-29", "today"]),
    "items": ({"type": "array", "items": {"type": "boolean"}}, [[], [True, False]], [[1], {}]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False},
        [[], [None], [None, 3]],
        [[3], [None, None], [None, 3, 4]],
    ),
    "minItems": (
        {"type": "array", "items": {"type": "null"}, "minItems": 2},
        [[None] * 2, [None] * 5],
        [[], [None]],
    ),
    "maxItems": ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None] * 2], [[None] * 3]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
        [{}, {"a": None}, {"b": 1}, {"a": None, "b": 1}],
        [{"a": 1}, {"b": "x"}, []],
    ),
    "required": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        [{"b": None}, {"a": None, "b": None}],
        [{}, {"a": None}],
    ),
    "additionalProperties": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "additionalProperties": {"type": "integer"},
        },
        [{"a": None}, {"z": 1}, {"a": None, "z": 1, "y": 2}],
        [{"a": 1}, {"z": None}],
    ),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
            "additionalProperties": False,
        },
        [{}, {"x1": True, "x2": False}],
        [{"x": True}, {"x1": 1}],
    ),
    "minProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
        [{"a": None}],
        [{}],
    ),
    "maxProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
        [{}, {"a": None}],
        [{"a": None, "b": None}],
    ),
    "anyOf": ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5}]}, [None, 5], [4, "x"]),
    "oneOf": ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, [True, "x"], [None, 1]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10]),
    "$ref": (
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}],
        [{"v": 1}, {"v": 1, "next": {"v": "x", "next": None}}],
    ),
    "$ref to the whole": (
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        [[], [[], [[]]]],
        [[1], [[], [], []]],
    ),
    "annotations": (
        {"title": "t", "description": "d", "default": 1, "examples": [2], "type": "integer"},
        [3],
        ["x"],
    ),
}
# Keywords that llguidance does not support, each with a value.
REFUSED: dict[str, Any] = {
    "not": {"type": "null"},
    "if": {"type": "null"},
    "contains": {"type": "null"},
    "uniqueItems": True,
    "propertyNames": {"pattern": "^a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"type": "object"}},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
}


@pytest.fixture(scope="module")
def compiled() -> GrammarCompiler:
    return compiler()


def is_taken(compiled: GrammarCompiler, schema: dict[str, Any], value: Any) -> bool:
    """Return whether the grammar of a schema takes all of a value's JSON."""
    matcher = compiled.compile(from_schema("s", schema))
    tokens = TOKENIZER.encode(json.dumps(value, ensure_ascii=False))
    # If more text could follow the value, an eos token ends it.
    return matcher.accept([*tokens, EOS[0]]) >= len(tokens) and matcher.is_ended


@pytest.mark.parametrize("keyword", CASES)
def test_a_grammar_takes_what_validates_and_nothing_else(compiled: GrammarCompiler, keyword: str) -> None:
    schema, good, bad = CASES[keyword]
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for value in good:
        assert checker.is_valid(value), value
        assert is_taken(compiled, schema, value), value
    for value in bad:
        assert not checker.is_valid(value), value
        assert not is_taken(compiled, schema, value), value


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_has_no_grammar_is_refused_at_its_place(
    compiled: GrammarCompiler, keyword: str
) -> None:
    schema = {"type": "object", "properties": {"deep": {"items": {keyword: REFUSED[keyword]}}}}
    with pytest.raises(ValueError, match=rf"^s\.properties\.deep\.items must be a grammar .*{keyword}"):
        compiled.compile(from_schema("s", schema))
