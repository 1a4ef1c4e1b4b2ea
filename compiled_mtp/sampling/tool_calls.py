"""The grammar of tool calls in the form that a model family writes them. No torch.

json, Qwen3-Next:  <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
xml, Qwen3.5:      <tool_call>\\n<function=f>\\n<parameter=x>\\nVALUE\\n</parameter>\\n</function>\\n
                   </tool_call>
In the xml form a string is VALUE itself and cannot contain "</parameter>"; every other value is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from compiled_mtp.errors import escape
from compiled_mtp.sampling.call_arguments import (
    NOTES,
    alternatives,
    is_listed,
    is_raw,
    listed,
    parameter_schema,
)
from compiled_mtp.sampling.grammar_source import (
    GrammarSource,
    Schema,
    check_schema,
    check_size,
    json_rule,
    regex_terminal,
)
from compiled_mtp.sampling.schema_types import check_types, with_null_types
from compiled_mtp.sampling.string_schemas import string_regexes

CallForm: TypeAlias = Literal["json", "xml"]

CALL_FORMS: dict[str, CallForm] = {
    "qwen3_next": "json",
    "qwen3_5": "xml",
    "qwen3_5_moe": "xml",
}
"""The form of each model family's calls."""

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A parameter's name is written inside <parameter=...>.
_PARAMETER = re.compile(r"[^<>\s]{1,128}")
_BEGIN, _END = "<tool_call>", "</tool_call>"
_VALUE_END = json.dumps("\n</parameter>")
# Text of any length in segments that begin at each "<". One lazy segment up to the end would do, but its
# masks take ten times as long at the beginning of each line (7 ms for 248,320 ids).
_RAW_TEXT_RULES = r"""
SEGMENT: /[^<]+/ | (/<[^<]*/ & ~/<\/parameter(>(?s:.*))?/)
LAST: SEGMENT & /(?s:.*)\n/
"""
# Keywords that the grammar of raw text supports.
_OF_STRINGS = {"type", "enum", "const", "pattern", "format", "minLength", "maxLength"}
# Keywords that do not restrict a string.
_OF_OTHERS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}


def from_tools(
    tools: Any,
    tool_choice: Any,
    form: CallForm,
    added_tokens: Collection[str],
    *,
    parallel_tool_calls: bool = True,
) -> GrammarSource | None:
    """Return the grammar that `tool_choice` (none, auto, required, or a function by name) asks for.

    None for auto and none, which force nothing. required: one call or more, exactly one without
    parallel_tool_calls; a function by name: exactly one call. Only line ends may separate calls. Arguments
    come in the schema's order, and only arguments that the tool declares. added_tokens: texts of the
    tokenizer's added tokens; <tool_call> and </tool_call> are single tokens if they are among them. Raises
    ValueError with the field's name.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    declared = _declared(tools)
    if tool_choice == "required":
        names, repeat = list(declared), ' ("\\n" call)*' if parallel_tool_calls else ""
    else:
        names, repeat = [_chosen(tool_choice, declared)], ""
    begin, end = (one if one in added_tokens else json.dumps(one) for one in (_BEGIN, _END))
    lines = [
        f"body: call{repeat}",
        f'call: {begin} "\\n" ({" | ".join(f"tool_{i}" for i in range(len(names)))}) "\\n" {end}',
    ]
    schemas: list[tuple[str, Schema]] = []
    rules: Callable[[str, str, str, Schema], list[str]] = _json_call if form == "json" else _xml_call
    for index, name in enumerate(names):
        field, schema = declared[name]
        lines += rules(f"tool_{index}", name, field, schema)
        schemas.append((field, schema))
    text = "\n".join(lines) + ("\n" if form == "json" else _RAW_TEXT_RULES)
    check_size("tools", text)
    return GrammarSource("tools", text, tuple(schemas))


def _declared(tools: Any) -> dict[str, tuple[str, Schema]]:
    """Return name -> (field, schema of the arguments) of every tool."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(
            f"tools must be a list of 1 to {MAX_TOOLS} tools where tool_choice asks for a call; add one"
        )
    found: dict[str, tuple[str, Schema]] = {}
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{field}.name must be 1 to 64 letters, digits, - or _, got {name!r:.80}; rename it"
            )
        if name in found:
            raise ValueError(f"{field}.name must be unique, got {name!r} twice; rename one")
        assert isinstance(function, Mapping)
        field = f"{field}.parameters"
        schema = check_schema(field, function.get("parameters") or {"additionalProperties": False})
        check_types(field, schema)
        schema = with_null_types(schema)
        if schema.get("type", "object") != "object":
            raise ValueError(f"{field}.type must be object, got {schema['type']!r:.80}; arguments have names")
        closed = {"additionalProperties": False} if schema.get("properties") else {}
        found[name] = (field, {"type": "object", **closed, **schema})
    return found


def _chosen(tool_choice: Any, declared: Collection[str]) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in declared:
        raise ValueError(
            "tool_choice must be none, auto, required or name a function of tools, got "
            f"{ascii(tool_choice)[:80]}; known are {', '.join(declared)[:200]}"
        )
    return name


def _json_call(rule: str, name: str, field: str, schema: Schema) -> list[str]:
    head = json.dumps(f'{{"name": "{name}", "arguments": ')
    return [f'{rule}: {head} {rule}_arguments "}}"', f"{rule}_arguments: {json_rule(schema)}"]


def _xml_call(rule: str, name: str, field: str, schema: Schema) -> list[str]:
    required = schema.get("required", [])
    properties = schema.get("properties") or {}
    lines, parts = [], [json.dumps(f"<function={name}>\n")]
    for index, key in enumerate([*properties, *(key for key in required if key not in properties)]):
        if not isinstance(key, str) or not _PARAMETER.fullmatch(key):
            raise ValueError(
                f"{field}.properties must have names without <, > and spaces, got {key!r:.80}; rename it"
            )
        part = f"{rule}_{index}"
        parts.append(part if key in required else f"{part}?")
        head = json.dumps(f"<parameter={key}>\n")
        lines += [f'{part}: {head} {part}_value "\\n"']
        lines += _xml_value(
            f"{part}_value", f"{field}.properties.{escape(key, 64)}", parameter_schema(schema, key)
        )
    return [f'{rule}: {" ".join(parts)} "</function>"', *lines]


def _xml_value(rule: str, field: str, schema: Schema) -> list[str]:
    """Return the rules of a value and the "</parameter>" after it."""
    several = alternatives(schema)
    names = [f"{rule}_{index}" for index in range(len(several))]
    lines = [f"{rule}: {' | '.join(names)}"]
    for name, one in zip(names, several, strict=True):
        if is_raw(one):
            lines.append(_raw_value(name, field, one))
        else:
            lines += [f"{name}: {name}_json {_VALUE_END}", f"{name}_json: {json_rule(one)}"]
    return lines


def _raw_value(rule: str, field: str, schema: Schema) -> str:
    if unknown := set(schema) - NOTES - _OF_STRINGS - _OF_OTHERS:
        names = escape(", ".join(sorted(unknown)), 80)
        raise ValueError(
            f"{field} must not use {names} where tool_choice asks for a call; "
            "write it as a pattern or leave it out"
        )
    if is_listed(schema):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in listed(schema)]
        if not texts:
            raise ValueError(
                f"{field} must list a value that its type and lengths admit; correct one of them"
            )
        return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {_VALUE_END}"
    regexes = string_regexes(field, schema)
    if not regexes:
        return f'{rule}: SEGMENT* LAST "</parameter>"'
    return f"{rule}[suffix={_VALUE_END}]: {' & '.join(map(regex_terminal, regexes))}"
