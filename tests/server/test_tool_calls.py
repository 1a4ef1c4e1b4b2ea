"""Reasoning and calls are parsed alike however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from compiled_mtp.server.tool_calls import CallArguments, CallStart, Content, Delta, OutputParser, Reasoning

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {"type": "object"},
            "is_brief": {"type": "boolean"},
            "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
}
XML = (
    'I\'ll look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "old" town\n</parameter>\n'
    '<parameter=days>\n3\n</parameter>\n<parameter=options>\n{"unit": "C"}\n</parameter>\n'
    "<parameter=is_brief>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n"
    "</function>\n</tool_call>"
)
XML_CALLS = [
    ("get_weather", {"city": 'Zürich "old" town', "days": 3, "options": {"unit": "C"}, "is_brief": True}),
    ("get_time", {}),
]
JSON = (
    'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"{</tool_call>", '
    '"days": [1, {}]}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": "{\\"x\\": 1}", "name": "second"}\n</tool_call>'
)
JSON_CALLS = [("get_weather", {"city": 'a}"{</tool_call>', "days": [1, {}]}), ("second", {"x": 1})]


def parse(pieces: list[str], **options: Any) -> dict[str, Any]:
    """Return all deltas joined: reasoning, content, and (name, text of the arguments) of each call."""
    parser = OutputParser(**options)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.add(piece)
    deltas += parser.add("", is_last=True)
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.text
    assert parser.num_calls == len(calls)
    return {
        "reasoning": "".join(d.text for d in deltas if isinstance(d, Reasoning)),
        "content": "".join(d.text for d in deltas if isinstance(d, Content)),
        "calls": [tuple(call) for call in calls],
    }


def cuts(text: str) -> list[list[str]]:
    """Return cuts of a text: none, at every single position, by characters, and at random positions."""
    rng = random.Random(0)
    found = [[text], list(text)]
    found += [[text[:at], text[at:]] for at in range(1, len(text))]
    for _ in range(50):
        places = sorted(rng.sample(range(len(text)), min(len(text), 9)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [("xml", XML, "I'll look.", XML_CALLS), ("json", JSON, "Sure.", JSON_CALLS)],
)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_calls_at_every_cut(form: Any, text: str, content: str, calls: Any, is_thinking: bool) -> None:
    thought = "Let me <think> about\n\n<tool_call> it"
    prefix = "\n" + thought + "\n</think>\n\n" if is_thinking else f"\n<think>\n{thought}\n</think>\n\n"
    for pieces in cuts(prefix + text):
        got = parse(pieces, form=form, has_reasoning=True, is_thinking=is_thinking, tools=TOOLS)
        assert got["reasoning"] == thought, pieces
        assert got["content"] == content, pieces
        assert [(name, json.loads(arguments)) for name, arguments in got["calls"]] == calls, pieces


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("xml", "a <tool_call> b", "a <tool_call> b", []),
        ("xml", "a < b and <tool", "a < b and <tool", []),
        ("xml", "text  \n", "text  \n", []),
        ("xml", "<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
        ("xml", "<tool_call><function=f><parameter=x>\nab", "", [("f", '{"x": "ab')]),
        (
            "xml",
            "<tool_call><function=f><parameter=x>a\n\n</parameter></tool_call>",
            "",
            [("f", '{"x": "a\\n"}')],
        ),
        ("xml", "<tool_call><function=f></function> more", " more", [("f", "{}")]),
        (
            "xml",
            "<tool_call><function=f></function><function=g></function></tool_call>",
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("xml", "<tool_call><tool_call><function=f></function></tool_call>", "<tool_call>", [("f", "{}")]),
        ("json", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("json", '<tool_call>{"a": 1}</tool_call> x', '<tool_call>{"a": 1}</tool_call> x', []),
        ("json", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
        ("json", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("json", '<tool_call>{"na', '<tool_call>{"na', []),
        (
            "json",
            '<tool_call>{"name": "</tool_call>", "arguments": {}}',
            '<tool_call>{"name": "</tool_call>", "arguments": {}}',
            [],
        ),
        *(
            # Half of a character, which no answer can hold.
            ("json", text, text, [])
            for text in (
                r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
                r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "f"}</tool_call>',
                r'<tool_call>{"arguments": {}, "name": "\ud800"}</tool_call>',
            )
        ),
    ],
)
def test_broken_calls_lose_nothing(form: Any, text: str, content: str, calls: Any) -> None:
    for pieces in cuts(text):
        got = parse(pieces, form=form)
        assert (got["content"], got["calls"]) == (content, calls), pieces


@pytest.mark.parametrize(
    ("value", "argument", "expected"),
    [
        ("3", "days", 3),
        ("three", "days", "three"),
        ("NaN", "days", "NaN"),
        ("None", "is_brief", None),
        ("3", "when", "3"),
        ("null", "when", None),
        ("nullable", "when", "nullable"),
        ("", "when", ""),
        ("[1", "options", "[1"),
        ("[1]", "unknown", "[1]"),
    ],
)
def test_schemas_decide_which_arguments_are_text(value: str, argument: str, expected: Any) -> None:
    inside = f"<parameter={argument}>\n{value}\n</parameter>"
    text = f"<tool_call>\n<function=get_weather>\n{inside}\n</function>\n</tool_call>"
    ((_, arguments),) = parse([text], form="xml", tools=TOOLS)["calls"]
    assert json.loads(arguments) == {argument: expected}


def test_reasoning_that_never_ends_and_text_without_any() -> None:
    for pieces in cuts("still at it\n"):
        assert parse(pieces, has_reasoning=True, is_thinking=True)["reasoning"] == "still at it\n"
        assert parse(pieces, has_reasoning=True)["content"] == "still at it\n"
    for pieces in cuts("<think>a</think><b>"):
        assert parse(pieces)["content"] == "<think>a</think><b>"


def test_a_text_that_may_be_null_comes_as_it_is_written() -> None:
    parser = OutputParser(form="xml", tools=TOOLS)
    parser.add("<tool_call>\n<function=get_weather>\n<parameter=when>\n")
    assert parser.add("nu") == []
    assert parser.add("mber") == [CallArguments(0, '"'), CallArguments(0, "number")]
    inside = "\n 12 or\nnull\n"
    text = f"<tool_call>\n<function=get_weather>\n<parameter=when>\n{inside}\n</parameter>\n</function>"
    for pieces in cuts(text):
        ((_, arguments),) = parse(pieces, form="xml", tools=TOOLS)["calls"]
        assert json.loads(arguments) == {"when": inside}, pieces
