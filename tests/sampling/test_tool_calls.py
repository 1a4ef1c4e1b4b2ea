"""Forced tool calls: what the grammar allows parses back, in each family's form, and validates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from compiled_mtp.models.family import FAMILIES
from compiled_mtp.sampling.grammar import GrammarCompiler, MaskFiller
from compiled_mtp.sampling.grammar_source import GrammarSource
from compiled_mtp.sampling.tool_calls import CALL_FORMS, CallForm, from_tools
from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, OutputParser
from tests.sampling.grammars import NUM_IDS, TOKENIZER, TOKENIZER_JSON, compiler, decode, text_of

Call = tuple[str, dict[str, Any]]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "code": {"type": ["string", "integer"], "pattern": "^[a-z]{2}$", "minimum": 10, "maximum": 99},
        "tag": {"type": "string", "pattern": "^[0-9]x{1,3}$"},
    },
    "required": ["city", "hours"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def compiled() -> GrammarCompiler:
    return compiler()


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    return MaskFiller(num_threads=1)


def source_of(tool_choice: Any, form: CallForm, tools: Any = TOOLS) -> GrammarSource:
    source = from_tools(tools, tool_choice, form, added_tokens=())
    assert source is not None
    return source


def parse_json(text: str) -> list[Call]:
    bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    assert "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies) == text
    calls = [json.loads(body) for body in bodies]
    return [(call["name"], call["arguments"]) for call in calls]


def parse_xml(text: str, tools: Any = TOOLS) -> list[Call]:
    """Parse as the service does."""
    schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in tools}
    parser = OutputParser(form="xml", tools=schemas)
    calls: list[tuple[str, list[str]]] = []
    for delta in [*parser.add(text), *parser.add("", is_last=True)]:
        if isinstance(delta, CallStart):
            calls.append((delta.name, []))
        elif isinstance(delta, CallArguments):
            calls[-1][1].append(delta.text)
        else:
            assert isinstance(delta, Content)
            assert not delta.text.strip()
    return [(name, json.loads("".join(pieces))) for name, pieces in calls]


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_forced_calls_parse_back_and_validate(
    compiled: GrammarCompiler, filler: MaskFiller, form: CallForm, tool_choice: Any
) -> None:
    source, ended = source_of(tool_choice, form), 0
    for seed in range(15):
        matcher = compiled.compile(source)
        tokens = decode(matcher, filler, (form, seed), step=3 * (seed % 2), limit=1500)
        assert matcher.error is None
        if not matcher.is_ended:
            continue
        ended += 1
        calls = (parse_json if form == "json" else parse_xml)(text_of(tokens))
        for name, arguments in calls:
            assert name in ("get_weather", "get_time")
            jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"maxProperties": 0})
        assert calls
        if tool_choice == NAMED:
            assert [name for name, _ in calls] == ["get_weather"]
    assert ended >= 14


def takes(compiled: GrammarCompiler, source: GrammarSource, text: str) -> bool:
    matcher = compiled.compile(source)
    tokens = TOKENIZER.encode(text) + list(TOKENIZER.eos_token_ids)
    return matcher.accept(tokens) >= len(tokens) - 1 and matcher.is_ended


def test_the_form_is_the_templates_own(compiled: GrammarCompiler) -> None:
    values = "<parameter=city>\nBonn\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n"
    xml = f"<tool_call>\n<function=get_weather>\n{values}</function>\n</tool_call>"
    body = '{"name": "get_weather", "arguments": {"city": "Bonn", "hours": [1, 2]}}'
    plain = f"<tool_call>\n{body}\n</tool_call>"
    forms: list[tuple[CallForm, str, str]] = [("xml", xml, plain), ("json", plain, xml)]
    for form, text, other in forms:
        for tool_choice in ("required", NAMED):
            source = source_of(tool_choice, form)
            assert takes(compiled, source, text)
            assert not takes(compiled, source, other)
            assert takes(compiled, source, f"{text}\n{text}") is (tool_choice == "required")
    assert not takes(compiled, source_of("required", "xml"), xml.replace("Bonn", "Bonn" * 9))
    assert not takes(compiled, source_of("required", "xml"), xml.replace("hours", "our"))
    assert takes(compiled, source_of("required", "xml"), xml.replace("Bonn", ""))


def test_text_as_it_is_holds_anything_but_its_end(compiled: GrammarCompiler) -> None:
    tools = [{"type": "function", "function": {"name": "say", "parameters": {"properties": {"x": {}}}}}]
    source = source_of("required", "xml", tools)
    for value in ("", "two\nlines\n\n", '"<b>" < </parameter\n</param', "if a<b:\n\treturn", "{not json"):
        text = f"<tool_call>\n<function=say>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert takes(compiled, source, text)
    for value in ("a</parameter>b", "a\n</parameter>\nb"):
        assert not takes(compiled, source, text.replace("{not json", value))


def test_markers_that_are_tokens_are_written_as_those() -> None:
    """<tool_call> is one added token in released tokenizers, and text in a grammar does not match it."""
    tokenizer = json.loads(TOKENIZER_JSON)
    for number, text in enumerate(("<tool_call>", "</tool_call>")):
        added = {**tokenizer["added_tokens"][0], "id": 4099 + number, "content": text, "special": False}
        tokenizer["added_tokens"].append(added)
    source = from_tools(TOOLS, "required", "json", {"<tool_call>", "</tool_call>"})
    assert source is not None
    matcher = GrammarCompiler(json.dumps(tokenizer), NUM_IDS, (4096, 4098)).compile(source)
    body = TOKENIZER.encode('\n{"name": "get_time", "arguments": {}}\n')
    assert matcher.accept([4099, *body, 4100, 4098]) == len(body) + 3
    assert matcher.is_ended


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_nothing_is_forced_unless_asked(tool_choice: Any) -> None:
    assert from_tools(TOOLS, tool_choice, "json", ()) is None


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("tools", "tool_choice", "message"),
    [
        ([], "required", "tools must be a list of 1 to 128 tools"),
        ([3], "required", r"tools\[0\].function.name must be 1 to 64 letters"),
        (tool(name="a b"), "required", r"tools\[0\].function.name must be 1 to 64 letters"),
        (tool() + tool(), "required", r"tools\[1\].function.name must be unique"),
        (TOOLS, "always", "tool_choice must be none, auto, required or name a function"),
        (TOOLS, {"function": {"name": "nope"}}, "tool_choice must be none, auto, .*known are get_weather"),
        (tool(parameters=[1]), "required", r"tools\[0\].function.parameters must be an object"),
        (
            tool(parameters={"type": "array"}),
            "required",
            r"tools\[0\].function.parameters.type must be object",
        ),
        (
            tool(parameters={"properties": {"a>": {}}}),
            "required",
            r"tools\[0\].function.parameters.properties must have names without",
        ),
        (
            tool(parameters={"properties": {"a": {"type": "string", "format": "zip"}}}),
            "required",
            r"tools\[0\].function.parameters.properties.a.format must be one of date, .* got 'zip'; leave",
        ),
        (
            tool(parameters={"properties": {"a": {"type": "string", "nullable": "yes"}}}),
            "required",
            r"tools\[0\].function.parameters.properties.a.nullable must be true or false",
        ),
        (
            tool(parameters={"properties": {"a": {"type": "string", "b\nc": 1}}}),
            "required",
            r"tools\[0\].function.parameters.properties.a must not use b\\nc where",
        ),
        (
            tool(parameters={"properties": None}),
            "required",
            r"tools\[0\].function.parameters.properties must be an object of schemas, got None; write",
        ),
        (
            tool(parameters={"properties": {"a": {}}, "required": "a"}),
            "required",
            r"tools\[0\].function.parameters.required must be a list of names, got 'a'; write",
        ),
        (
            tool(parameters={"properties": {"a\nb": {"items": {"minLength": True}}}}),
            "required",
            r"tools\[0\].function.parameters.properties.a\\nb.items.minLength must be a whole number",
        ),
        (
            TOOLS,
            {"function": {"name": ["get_time"]}},
            "tool_choice must be none, auto, .*known are get_weather",
        ),
    ],
)
def test_bad_tools_are_refused_by_their_place(tools: Any, tool_choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        from_tools(tools, tool_choice, "xml", ())


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of a JSON value and of every value inside it."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from paths(one, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_tool_with_any_value_anywhere_is_a_grammar_or_one_line(form: CallForm) -> None:
    """Replaces every part of a tool by values of every type."""
    others: list[Any] = [
        None,
        True,
        -1,
        1.5,
        "a\nb",
        "\ud800",
        [],
        [5],
        [[]],
        {},
        {"x": 5},
        {"$ref": "#/$defs/y"},
    ]
    parameters = WEATHER | {"$defs": WEATHER["$defs"] | {"y": True}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    problems = []
    for path in paths(tools):
        for other in others:
            for choice in ("required", NAMED):
                try:
                    from_tools(replaced(tools, path, other), choice, form, ())
                except ValueError as error:
                    problems.append(str(error))
    assert len(problems) > 500
    assert [problem for problem in problems if not problem.isprintable()] == []


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_schema_that_cannot_be_compiled_is_named_in_its_tool(
    compiled: GrammarCompiler, form: CallForm
) -> None:
    bad = tool(parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(ValueError, match=r"^tools\[0\].function.parameters.properties.a must .*uniqueItems"):
        compiled.compile(source_of("required", form, bad))


def test_every_family_has_a_form() -> None:
    assert CALL_FORMS.keys() == FAMILIES.keys()


# A string's schema, texts that it admits, texts that it refuses.
STRINGS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "alternatives": ({"pattern": "^a|b$"}, ["a", "ax", "b", "xb", "ab"], ["xa", "bx", "x"]),
    "one of them free": ({"pattern": "^a$|b"}, ["a", "xbx"], ["ax", "xa"]),
    "alternatives in a group": ({"pattern": "^(a|b)$"}, ["a", "b"], ["ax", "xb", ""]),
    "anchors in a group": ({"pattern": "(^a|b$)"}, ["ax", "xb"], ["xa", "bx"]),
    "two groups": ({"pattern": "(a)|(^b)"}, ["xax", "bx"], ["xb"]),
    "a backslash at the end": ({"pattern": r"^a\\$"}, ["a\\"], ["a", "a\\\\", "a$"]),
    "a dollar sign at the end": ({"pattern": r"^a\$"}, ["a$", "a$b"], ["a", "ba$"]),
    "a class of marks": ({"pattern": "^[]|$^(]+$"}, ["]|$^("], ["a", "]a"]),
    "an end alone": ({"pattern": "b$"}, ["b", "ab"], ["ba"]),
    "nothing": ({"pattern": "^$"}, [""], ["a"]),
    "pattern and length": (
        {"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    "date": ({"format": "date"}, ["2024-02-29", "2023-12-31"], ["2024-2-29", "2024-04-31", "2024-13-01"]),
    "time": ({"format": "time"}, ["12:30:00Z", "23:59:60.5+01:00"], ["24:00:00Z", "12:30Z", "12:30:00"]),
    "date-time": ({"format": "date-time"}, ["2024-02-29T12:30:00Z"], ["2024-02-29 12:30:00Z", "2024-02-29"]),
    "duration": ({"format": "duration"}, ["P1Y2M3D", "PT36H", "P4W", "P1DT12H"], ["P", "PT", "1D", "P1W2D"]),
    "email": ({"format": "email"}, ["a.b@example.com", "x@[127.0.0.1]"], ["a@", "@b", "a b@c", "a..b@c"]),
    "hostname": ({"format": "hostname"}, ["a", "a-b.example"], ["-a", "a-.b", "a..b", "ü"]),
    "ipv4": ({"format": "ipv4"}, ["127.0.0.1", "255.249.19.0"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": ({"format": "ipv6"}, ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "::"], ["1:2", "1::2::3", "g::"]),
    "uuid": (
        {"format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"],
    ),
    "uri": (
        {"format": "uri"},
        ["https://a.b:80/c?d=e#f", "mailto:x@y.z", "http://[::1]/"],
        ["a b:c", "//x", "x"],
    ),
    "unknown": ({"format": "unknown"}, ["x", ""], []),
    "format and pattern": ({"format": "date", "pattern": "^2024"}, ["2024-02-29"], ["2023-02-28", "2024"]),
    "format and length": ({"format": "hostname", "maxLength": 3}, ["a.b"], ["ab.c"]),
}


def call_of(form: CallForm, value: Any) -> str:
    if form == "json":
        body = json.dumps({"name": "f", "arguments": {"x": value}}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"


def x_tool(schema: dict[str, Any]) -> list[Any]:
    return tool(name="f", parameters={"properties": {"x": schema}, "required": ["x"]})


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.parametrize("case", STRINGS)
def test_strings_are_the_same_in_both_forms(compiled: GrammarCompiler, form: CallForm, case: str) -> None:
    schema, good, bad = STRINGS[case]
    source = source_of("required", form, x_tool({"type": "string", **schema}))
    for value in good:
        assert takes(compiled, source, call_of(form, value)), value
    for value in bad:
        assert not takes(compiled, source, call_of(form, value)), value


@pytest.mark.parametrize("form", ["json", "xml"])
def test_nullable_is_a_type_beside_others(compiled: GrammarCompiler, form: CallForm) -> None:
    inner = {"type": "object", "properties": {"y": {"type": "integer", "nullable": True}}, "required": ["y"]}
    cases: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
        ({"type": "string", "nullable": True, "format": "date"}, ["2024-02-29", None], [3]),
        ({"type": "integer", "nullable": True, "maximum": 9}, [3, None], [10]),
        ({"type": "integer", "nullable": False}, [3], [None]),
        ({"type": ["integer", "null"], "nullable": True}, [3, None], ["a"]),
        (inner, [{"y": None}, {"y": 4}], [{"y": "a"}]),
        ({"type": "array", "items": {"type": "boolean", "nullable": True}}, [[True, None]], [[3]]),
        ({"anyOf": [{"type": "boolean", "nullable": True}, {"type": "integer"}]}, [True, 3, None], [[]]),
    ]
    for schema, good, bad in cases:
        source = source_of("required", form, x_tool(schema))
        for value in good:
            assert takes(compiled, source, call_of(form, value)), (schema, value)
        for value in bad:
            assert not takes(compiled, source, call_of(form, value)), (schema, value)


@pytest.mark.parametrize("form", ["json", "xml"])
def test_one_call_alone_without_parallel_calls(compiled: GrammarCompiler, form: CallForm) -> None:
    text = call_of(form, "a")
    tools = x_tool({"type": "string"})
    for is_parallel in (True, False):
        source = from_tools(tools, "required", form, (), parallel_tool_calls=is_parallel)
        assert source is not None
        assert takes(compiled, source, text)
        assert takes(compiled, source, f"{text}\n{text}") is is_parallel


# A schema of strings and other values, and values that read back as they were written.
MIXED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"anyOf": [{"enum": ["a", "b"]}, {"type": "integer"}]}, ["a", 9]),
    ({"type": ["integer", "string"], "pattern": "^[0-9]{2}$"}, [25393356, 25]),
    ({"oneOf": [{"type": "boolean"}, {"type": "string", "pattern": "^x"}]}, [False, "xfalse"]),
    ({"enum": ["x", ["a"]]}, ["x", ["a"]]),
    ({"enum": ["a", 3, None, "3", True]}, ["a", 3, None, True]),
    ({"type": "string", "nullable": True}, [None, "nul", "none", "3", "true"]),
    ({"anyOf": [{"type": "string", "nullable": True}, {"type": "integer"}]}, [None, "a", 4, "4.5"]),
    ({"type": ["string", "number"], "multipleOf": 0.1}, [0.3, 2, "0.35"]),
    ({"type": ["string", "integer"], "minimum": 10}, [10, "9", "", " ", "1e", "-"]),
    ({"type": "string"}, ["3", "null", "true", '{"a": 1}', '"q"']),
    ({"description": "any"}, ["3", "null"]),
    ({"const": "3"}, ["3"]),
    ({"enum": ["3", "null"]}, ["3", "null"]),
    ({"$ref": "#/$defs/text"}, ["3", "null"]),
    ({"anyOf": [{"$ref": "#/$defs/point"}, {"$ref": "#/$defs/text"}]}, [{"x": 1}, '{"x": "1"}', "{x", "[1]"]),
    ({"type": ["array", "string"], "items": {"type": "integer"}, "maxItems": 2}, [[1, 2], "[1, 2, 3]", "[1"]),
]
DEFINITIONS = {
    "text": {"type": "string"},
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
}


@pytest.mark.parametrize(("schema", "values"), MIXED)
def test_a_value_is_read_back_as_the_grammar_allowed_it(
    compiled: GrammarCompiler, schema: dict[str, Any], values: list[Any]
) -> None:
    tools = x_tool(schema)
    tools[0]["function"]["parameters"]["$defs"] = DEFINITIONS
    source = source_of("required", "xml", tools)
    for value in values:
        text = call_of("xml", value)
        assert takes(compiled, source, text), value
        ((_, arguments),) = parse_xml(text, tools)
        assert json.dumps(arguments) == json.dumps({"x": value})


def test_listed_values_obey_the_type_beside_them(compiled: GrammarCompiler) -> None:
    source = source_of(
        "required", "xml", x_tool({"type": "string", "enum": ["a", 3, "long"], "maxLength": 2})
    )
    assert takes(compiled, source, call_of("xml", "a"))
    assert not takes(compiled, source, call_of("xml", 3))
    assert not takes(compiled, source, call_of("xml", "long"))
    with pytest.raises(ValueError, match=r"^tools\[0\].function.parameters.properties.x must list a value"):
        source_of("required", "xml", x_tool({"enum": ["long"], "maxLength": 2}))


def test_schemas_that_say_nothing_right_are_read(filler: MaskFiller) -> None:
    """Without a forced call a tool's schema is not checked, and its wrong keywords are ignored."""
    loop = {"anyOf": [{"$ref": "#/$defs/y"}] * 2}
    for schema, text, expected in (
        ({"type": 5, "enum": 3}, "3", "3"),
        ({"type": ["integer", "string"], "minimum": "a", "required": True}, "3", 3),
        ({"type": ["string", "null"], "nullable": 1, "anyOf": []}, "null", None),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/y"}]}, "[1]", "[1]"),
        ({"type": ["string", "number"]}, "9" * 5000, "9" * 5000),
        ({"type": ["string", "number"], "multipleOf": 2}, "1" + "0" * 400, "1" + "0" * 400),
    ):
        tools = [
            {"function": {"name": "f", "parameters": {"properties": {"x": schema}, "$defs": {"y": loop}}}}
        ]
        assert parse_xml(call_of("xml", text), tools) == [("f", {"x": expected})]
    for parameters in (
        {"properties": [1]},
        {"properties": {"x": 3}},
        {"properties": {"x": True}},
        {"$defs": 3},
    ):
        tools = [{"function": {"name": "f", "parameters": parameters}}]
        assert parse_xml(call_of("xml", "3"), tools) == [("f", {"x": "3"})]
