"""Regexes whose masks would slow all requests of a round are refused by their text alone."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_mtp.sampling.grammar_source import from_lark, from_regex, from_schema
from compiled_mtp.sampling.regex_size import MAX_REPEATED, repeated_size
from compiled_mtp.sampling.string_schemas import FORMATS
from compiled_mtp.sampling.tool_calls import from_tools

# A mask of each takes 0.1 s or more with 4,096 tokens.
SLOW = (
    r"([a-z]{0,50}e[a-z ]{0,50}){30}",
    r"((.{0,40}a){1,20}.{0,40}b){1,20}",
    r"(([a-z]{0,50}e[a-z ]{0,50}){5}){6}",
    r"[a-z]{0,50}e[a-z ]{0,50}" * 30,
    r"([a-z]{0,50}e[a-z ]{0,50}){9}" * 3,
    r"(?:x|([a-z]{0,50}e[a-z ]{0,50}){30,})",
    "(?x)( [a-z]{0,50} e # a comment\n [a-z\\ ]{0,50} ) {30}",
    r"([]a-z]{0,50}e[^]()[:alpha:]]{0,50}){30}",
)
ORDINARY = (
    r"^[a-z]{1,30}([-_ ][a-z0-9 ]{1,30}){0,12}$",
    r"^[^@\s]{1,64}@[a-z0-9.-]{1,255}\.[a-z]{2,24}$",
    r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+-]\d{2}:\d{2})?)?$",
    r"^https?://([a-z0-9-]{1,63}\.){1,8}[a-z]{2,63}(:[0-9]{1,5})?(/[^ ]{0,2000})?$",
    r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
    r"^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12};){0,500}$",
    r"^[A-Z][a-z]{0,30}: (?s:.{0,9000})$",
    r"^\+?[0-9]{1,3}([ -][0-9]{2,4}){2,5}$",
    r"^(red|green|blue)(, (red|green|blue)){0,99}$",
    r"(\w+\s?){1,50}",
    *FORMATS.values(),
)


@pytest.mark.parametrize("regex", SLOW)
def test_slow_ones_are_refused_in_their_place(regex: str) -> None:
    assert repeated_size(regex) > MAX_REPEATED
    rule = f" must have .* at most {MAX_REPEATED} characters written out, got {repeated_size(regex)}; write"
    with pytest.raises(ValueError, match=f"^guided_regex{rule}"):
        from_regex(regex)
    schema: dict[str, Any] = {"type": "string", "pattern": regex}
    nested = {"properties": {"a": {"items": schema}}}
    with pytest.raises(ValueError, match=f"^s.properties.a.items.pattern{rule}"):
        from_schema("s", nested)
    with pytest.raises(ValueError, match=f"^s.patternProperties{rule}"):
        from_schema("s", {"patternProperties": {regex: {}}})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    field = r"tools\[0\].function.parameters.properties.x.pattern"
    with pytest.raises(ValueError, match=f"^{field}{rule}"):
        from_tools(tools, "required", "xml", ())
    if "\n" not in regex:
        with pytest.raises(ValueError, match=f"^guided_grammar{rule}"):
            from_lark(f'start: "/" A // a /\nA: /{regex}/\n')


@pytest.mark.parametrize("regex", ORDINARY)
def test_ordinary_ones_pass(regex: str) -> None:
    assert repeated_size(regex) <= MAX_REPEATED
    from_regex(regex)


def test_what_is_no_regex_is_measured_too() -> None:
    for text in (
        "(" * 60_000,
        ")" * 60_000,
        "[" * 60_000,
        "{,}" * 9,
        "a{99999999999}",
        "|*",
        "\\",
        "(?",
        "{2}",
    ):
        assert repeated_size(text) <= MAX_REPEATED
