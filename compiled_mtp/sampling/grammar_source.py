"""Grammars of a request's output, as text: JSON schemas, regexes, choices, Lark. No torch.

A source is text in llguidance's Lark dialect and, for each JSON schema in it, the request's field that holds
the schema, so that an error names the field. Tool calls: tool_calls.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_mtp.errors import escape
from compiled_mtp.sampling.regex_size import check_repeats

# Whitespace is at most one space after a comma or a colon: this allows both common styles of JSON, and a
# model cannot emit spaces without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAX_DEPTH = 64
MAX_TEXT_BYTES = 128 * 1024
MAX_CHOICES = 4096
# Matches a string, a comment or a regex; only a regex sets the group.
_LARK_REGEX = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/((?:[^/\\\n]|\\.)+)/')

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The grammar that a request's `field` asks for: Lark `rules` for `body`, or the caller's for `start`.

    schemas: each JSON schema in it as (field, schema). can_lead: whether `lark` can put text before `body`.
    """

    field: str
    rules: str
    schemas: tuple[tuple[str, Schema], ...] = ()
    can_lead: bool = True

    def lark(self, lead: str = "") -> str:
        """Return the whole grammar; after reasoning the output may have the text `lead` before the body."""
        if not self.can_lead:
            return self.rules
        if not lead:
            return f"start: body\n{self.rules}"
        return f"start: LEAD? body\nLEAD: {json.dumps(lead)}\n{self.rules}"


def from_response_format(response_format: Any) -> GrammarSource | None:
    """Return the grammar of OpenAI's response_format, None for type text. Raises ValueError."""
    name = "response_format"
    value = _mapping(name, response_format)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return from_schema(name, {"type": "object"})
    if kind == "json_schema":
        inner = _mapping(f"{name}.json_schema", value.get("json_schema"))
        return from_schema(f"{name}.json_schema.schema", inner.get("schema"))
    raise ValueError(
        f"{name}.type must be text, json_object or json_schema, got {kind!r}; "
        "use guided_regex, guided_choice or guided_grammar for others"
    )


def from_schema(field: str, schema: Any) -> GrammarSource:
    """Return the grammar of the JSON texts that a schema allows. Raises ValueError with the field's name."""
    checked = check_schema(field, schema)
    return GrammarSource(field, f"body: {json_rule(checked)}\n", ((field, checked),))


def from_regex(regex: Any) -> GrammarSource:
    """Return the grammar of the texts that a regex (Rust's syntax) matches as a whole. Raises ValueError."""
    field = "guided_regex"
    text = _text(field, regex)
    check_repeats(field, text)
    return GrammarSource(field, f"body: {regex_terminal(text)}\n")


def from_choice(choices: Any) -> GrammarSource:
    """Return the grammar of exactly the given strings. Raises ValueError."""
    field = "guided_choice"
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(
            f"{field} must be a list of 1 to {MAX_CHOICES} strings, got {_short(choices)}; list the texts"
        )
    quoted = [
        json.dumps(_text(f"{field}[{index}]", one), ensure_ascii=False) for index, one in enumerate(choices)
    ]
    rules = f"body: {' | '.join(quoted)}\n"
    check_size(field, rules)
    return GrammarSource(field, rules)


def from_lark(grammar: Any) -> GrammarSource:
    """Return a caller's own Lark grammar, whose first rule is `start`. Raises ValueError."""
    field = "guided_grammar"
    text = _text(field, grammar)
    for regex in _LARK_REGEX.findall(text):
        if regex:
            check_repeats(field, regex)
    return GrammarSource(field, text, can_lead=False)


def json_rule(schema: Schema) -> str:
    """Return the right side of a Lark rule for a schema that `check_schema` has passed."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"


def regex_terminal(regex: str) -> str:
    """Return `regex` as a Lark regex between slashes; `.` does not match a line end."""
    # Lark ends a regex at the first slash that is not escaped, and reads line by line.
    escaped, is_escaped = [], False
    for character in regex:
        escaped.append(
            "\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character
        )
        is_escaped = character == "\\" and not is_escaped
    return f"/{''.join(escaped)}/"


def check_schema(field: str, schema: Any) -> Schema:
    """Return `schema`, checked to be a JSON object of bounded size and depth; True becomes {}, any value.

    Does not check the keywords' values: the compiler does. Raises ValueError.
    """
    if schema is True:
        schema = {}
    value = _mapping(field, schema)
    if "x-guidance" in value:
        raise ValueError(f"{field} must not hold x-guidance, got {_short(value['x-guidance'])}; leave it out")
    _check_depth(field, value)
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field} must be JSON, got an error: {error}; use JSON's own types") from None
    check_size(field, text)
    _check_patterns(field, value)
    return value


def _check_patterns(field: str, schema: Schema) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        check_repeats(f"{field}.pattern", pattern)
    if isinstance(named := schema.get("patternProperties"), Mapping):
        for pattern in named:
            check_repeats(f"{field}.patternProperties", pattern)
    for inner, child in children(schema):
        _check_patterns(field + inner, child)


def check_size(field: str, text: str) -> None:
    """Raise ValueError if a text of the request is too large to compile in bounded time."""
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_TEXT_BYTES:
        raise ValueError(f"{field} must be at most {MAX_TEXT_BYTES} bytes, got {size}; ask for less at once")


def children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield (field relative to `schema`, schema) for each schema directly inside `schema`."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(named := schema.get(key), Mapping):
            inner = ((name, one) for name, one in named.items() if isinstance(one, Mapping))
            yield from ((f".{key}.{escape(name, 64)}", one) for name, one in inner)
    for key in ("items", "additionalProperties"):
        if isinstance(one := schema.get(key), Mapping):
            yield f".{key}", one
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(several := schema.get(key), list):
            yield from ((f".{key}[{i}]", one) for i, one in enumerate(several) if isinstance(one, Mapping))


def _check_depth(field: str, schema: Schema) -> None:
    # A loop: a value too deep for the parser is too deep for recursion too.
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, Mapping) else one for one in level)
        level = [value for values in inner for value in values if isinstance(value, (Mapping, list, tuple))]
        if not level:
            return
    raise ValueError(f"{field} must nest at most {MAX_DEPTH} deep, got more; use $defs and $ref")


def _mapping(field: str, value: Any) -> Schema:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{field} must be an object, got {_short(value)}; see OpenAI's reference for its fields"
        )
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be text that is not empty, got {_short(value)}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{field} must be Unicode text, got half a surrogate pair; fix its encoding"
        ) from None
    check_size(field, value)
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
