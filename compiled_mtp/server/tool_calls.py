"""Splits a model's text, while it streams, into reasoning, answer and tool calls. Pure Python.

Calls have two forms: Qwen3.5 and 3.6 write XML, Qwen3-Next writes JSON. Text that may still become a tag is
held back, so that the same text gives the same answer however it is cut; only the deltas are cut elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compiled_mtp.sampling.call_arguments import Parameter, refuse_constant

CallForm = Literal["xml", "json"]

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_JSON_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool `name` begins; `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Reasoning | Content | CallStart | CallArguments


class OutputParser:
    """Splits the text of one answer into deltas.

    form None leaves calls in the text, has_reasoning False leaves `<think>` in it. is_thinking: the prompt
    has already opened the reasoning. tools: the schemas of the arguments by the tools' names, which say which
    arguments of the XML form are strings.
    """

    def __init__(
        self,
        *,
        form: CallForm | None = None,
        has_reasoning: bool = False,
        is_thinking: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._splitter = _ReasoningSplitter(is_thinking) if has_reasoning else None
        kinds: dict[CallForm, Callable[[], _Calls]] = {
            "xml": lambda: _XmlCalls(tools or {}),
            "json": _JsonCalls,
        }
        self._calls = kinds[form]() if form is not None else None

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        return self._calls.num_calls if self._calls is not None else 0

    def add(self, text: str, is_last: bool = False) -> list[Delta]:
        """Take more text, or ""; return the deltas that it completes, with is_last also held-back text."""
        deltas: list[Delta] = []
        if self._splitter is not None:
            thought, text = self._splitter.add(text, is_last)
            if thought:
                deltas.append(Reasoning(thought))
        if self._calls is not None:
            deltas += self._calls.add(text, is_last)
        elif text:
            deltas.append(Content(text))
        return deltas


class _ReasoningSplitter:
    """Splits `<think>` ... `</think>` at the beginning from the answer; drops line breaks around the tags."""

    def __init__(self, is_thinking: bool) -> None:
        self._text = ""
        self._phase = "opened" if is_thinking else "start"

    def add(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return more of the reasoning and more of the answer."""
        if self._phase == "answer":
            return "", text
        self._text += text
        if self._phase == "start":
            stripped = self._text.lstrip()
            if stripped.startswith(_THINK):
                self._phase, self._text = "opened", stripped.removeprefix(_THINK)
            elif is_last or not _THINK.startswith(stripped):
                self._phase = "answer"
                return "", self._take(len(self._text))
            else:
                return "", ""
        if self._phase == "opened":
            self._text = self._text.lstrip("\n")
            self._phase = "reasoning" if self._text else "opened"
        thought = ""
        if self._phase == "reasoning":
            end = self._text.find(_THINK_END)
            if end < 0:
                held = 0 if is_last else _tail_length(self._text, _THINK_END)
                kept = self._text[: len(self._text) - held]
                return self._take(len(kept) if is_last else len(kept.rstrip("\n"))), ""
            thought = self._text[:end].rstrip("\n")
            self._text = self._text[end + len(_THINK_END) :]
            self._phase = "closed"
        if self._phase == "closed":
            self._text = self._text.lstrip("\n")
            if self._text:
                self._phase = "answer"
                return thought, self._take(len(self._text))
        return thought, ""

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class _Calls:
    """Splits calls from the text around them; a subclass for each form reads the inside of a call.

    White space before a call is not part of the answer.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""
        self._is_in_call = False
        self._opening = ""

    def add(self, text: str, is_last: bool) -> Iterator[Delta]:
        """Yield the deltas that `text` completes."""
        self._text += text
        found: list[Delta] | None = []
        while found is not None:
            yield from found
            found = self._advance_call() if self._is_in_call else self._advance_text()
        if is_last and not self._is_in_call:
            yield from self._content(self._take(len(self._text)))
        elif is_last:
            yield from self._end_call()

    def _advance_text(self) -> list[Delta] | None:
        """Take answer text up to a call; return None if more text is needed."""
        start = self._text.find(_CALL)
        if start >= 0:
            taken = self._take(start + len(_CALL))
            before = taken[:start].rstrip()
            self._opening = taken[len(before) :]
            self._is_in_call = True
            self._begin_call()
            return self._content(before)
        safe = self._text[: len(self._text) - _tail_length(self._text, _CALL)].rstrip()
        return self._content(self._take(len(safe))) or None

    def _reject_call(self) -> list[Delta]:
        """Return the tag of what is not a call after all as answer text, as it was written."""
        self._is_in_call = False
        text, self._opening = self._opening, ""
        # Only the tag: a real call may follow in the text after it.
        return self._content(text)

    def _content(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def _start(self, name: str) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, name)

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _begin_call(self) -> None:
        """Prepare for the inside of a call; called after `<tool_call>`."""

    def _advance_call(self) -> list[Delta] | None:
        """Take text inside a call; return its deltas, or None if more text is needed."""
        raise NotImplementedError

    def _end_call(self) -> list[Delta]:
        """Return the last deltas of a text that ended inside a call; its arguments stay incomplete."""
        raise NotImplementedError


class _XmlCalls(_Calls):
    """<tool_call> <function=NAME> <parameter=ARGUMENT> VALUE </parameter> </function> </tool_call>."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._tools = tools
        self._phase = "opened"
        self._parameters: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._parameter = Parameter({}, "")
        self._searched = 0
        self._is_at_start = False

    def _begin_call(self) -> None:
        self._phase = "opened"

    def _advance_call(self) -> list[Delta] | None:
        return {
            "opened": self._open_function,
            "function": self._open_parameter,
            "string": self._read_string,
            "value": self._read_value,
            "closed": self._close_call,
        }[self._phase]()

    def _end_call(self) -> list[Delta]:
        if self._phase == "opened":
            return self._content(self._opening + self._take(len(self._text)))
        if self._phase == "string":
            return [self._arguments(_escaped(self._take(len(self._text))))] if self._text else []
        return []

    def _open_function(self) -> list[Delta] | None:
        stripped = self._text.lstrip()
        if not stripped.startswith(_FUNCTION):
            return None if _FUNCTION.startswith(stripped) else self._reject_call()
        end = stripped.find(">")
        if end < 0:
            return None
        name = stripped[len(_FUNCTION) : end].strip()
        self._text = stripped[end + 1 :]
        self._phase, self._num_arguments = "function", 0
        self._parameters = self._tools.get(name, {})
        return [self._start(name)]

    def _open_parameter(self) -> list[Delta] | None:
        """Read up to the next parameter or the end of the function; other text before it is dropped."""
        found = [(self._text.find(tag), tag) for tag in (_PARAMETER, _FUNCTION_END, _CALL_END)]
        at, tag = min(((at, tag) for at, tag in found if at >= 0), default=(-1, ""))
        if at < 0:
            return None
        if tag != _PARAMETER:
            self._take(at if tag == _CALL_END else at + len(tag))
            self._phase = "closed"
            return [self._arguments("}" if self._num_arguments else "{}")]
        end = self._text.find(">", at)
        if end < 0:
            return None
        name = self._text[at + len(_PARAMETER) : end].strip()
        self._take(end + 1)
        self._parameter = Parameter(self._parameters, name)
        is_string = self._parameter.is_string
        # One line break after the tag belongs to the form, not to the value.
        self._phase, self._is_at_start = ("string" if is_string else "value"), True
        self._searched = 0
        head = ("{" if not self._num_arguments else ", ") + json.dumps(name, ensure_ascii=False) + ": "
        self._num_arguments += 1
        return [self._arguments(head + '"' if is_string else head)]

    def _read_string(self) -> list[Delta] | None:
        if self._is_at_start:
            if not self._text:
                return None
            self._text, self._is_at_start = self._text.removeprefix("\n"), False
        end = self._text.find(_PARAMETER_END)
        if end < 0:
            safe = self._text[: len(self._text) - _tail_length(self._text, _PARAMETER_END)].removesuffix("\n")
            return [self._arguments(_escaped(self._take(len(safe))))] if safe else None
        value = self._take(end).removesuffix("\n")
        self._take(len(_PARAMETER_END))
        self._phase = "function"
        return [self._arguments(_escaped(value) + '"')]

    def _read_value(self) -> list[Delta] | None:
        end = self._text.find(_PARAMETER_END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._text) - len(_PARAMETER_END))
            start = self._text[: len(self._text) - _tail_length(self._text, _PARAMETER_END)]
            if self._parameter.is_json or self._parameter.may_become_json(start):
                return None
            self._phase = "string"
            return [self._arguments('"')]
        value = self._take(end).removeprefix("\n").removesuffix("\n")
        self._take(len(_PARAMETER_END))
        self._phase = "function"
        if self._parameter.is_json:
            return [self._arguments(_to_json(value))]
        is_json = self._parameter.admits_json(value)
        return [self._arguments(value.strip() if is_json else json.dumps(value, ensure_ascii=False))]

    def _close_call(self) -> list[Delta] | None:
        stripped = self._text.lstrip()
        if stripped.startswith(_CALL_END):
            self._text, self._is_in_call = stripped.removeprefix(_CALL_END), False
            return []
        if stripped.startswith(_FUNCTION):
            self._opening, self._phase = "", "opened"
            return []
        if _CALL_END.startswith(stripped) or _FUNCTION.startswith(stripped):
            return None
        # The model left out the end tag.
        self._is_in_call = False
        return []


class _JsonCalls(_Calls):
    """<tool_call> {"name": NAME, "arguments": {...}} </tool_call>."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = "head"
        self._depth = 0
        self._is_string = self._is_escaped = False

    def _begin_call(self) -> None:
        self._phase, self._depth = "head", 0
        self._is_string = self._is_escaped = False

    def _advance_call(self) -> list[Delta] | None:
        return {"head": self._read_head, "arguments": self._read_arguments, "tail": self._read_tail}[
            self._phase
        ]()

    def _end_call(self) -> list[Delta]:
        if self._phase == "head":
            return self._read_whole(self._take(len(self._text)), "")
        return []

    def _read_head(self) -> list[Delta] | None:
        stripped = self._text.lstrip()
        if stripped and not stripped.startswith("{"):
            return self._reject_call()
        head = _JSON_HEAD.match(self._text)
        # An end tag in the name ends the call, as it does if the text is cut behind the tag.
        if head is not None and _CALL_END not in head.group():
            try:
                name = json.loads(head.group(1))
                # Raises UnicodeEncodeError, a ValueError, for lone surrogates, which an answer cannot hold.
                name.encode()
            except ValueError:
                return self._reject_call()
            self._take(head.end())
            self._phase = "arguments"
            return [self._start(name)]
        # The keys have another order, or arguments is a string: read the call when it is complete.
        end = self._text.find(_CALL_END)
        if end < 0:
            return None
        body = self._take(end)
        self._take(len(_CALL_END))
        self._is_in_call = False
        return self._read_whole(body, _CALL_END)

    def _read_arguments(self) -> list[Delta] | None:
        for at, character in enumerate(self._text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._phase = "tail"
                    return [self._arguments(self._take(at + 1))]
        return [self._arguments(self._take(len(self._text)))] if self._text else None

    def _read_tail(self) -> list[Delta] | None:
        stripped = self._text.lstrip().removeprefix("}").lstrip()
        if stripped.startswith(_CALL_END):
            self._text, self._is_in_call = stripped.removeprefix(_CALL_END), False
            return []
        if _CALL_END.startswith(stripped):
            return None
        # The model left out the end tag.
        self._text, self._is_in_call = stripped, False
        return []

    def _read_whole(self, body: str, closing: str) -> list[Delta]:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            if not isinstance(name, str) or not isinstance(json.loads(text), dict):
                raise TypeError("no call")
            (name + text).encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self._content(self._opening + body + closing)
        return [self._start(name), self._arguments(text)]


def _tail_length(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`, shorter than `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _to_json(value: str) -> str:
    """Return `value` as JSON; text that is not JSON becomes a string. Templates write Python's None."""
    python = {"True": "true", "False": "false", "None": "null"}
    text = python.get(value.strip(), value.strip())
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text
