"""Anthropic's own client against the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server import anthropic as module
from tests.server.forced_calls import CALLS, check_forced_calls
from tests.server.serving import Running, ScriptedEngine, make_family, running

MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "d",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module", params=["xml", "json"])
def scripted(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, ScriptedEngine, str]]:
    model = make_family(tmp_path_factory.mktemp("family") / request.param, request.param)
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model, api_key="secret") as server:
        yield server, engine, request.param


def client_of(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=60)


@pytest.mark.parametrize("by_character", [False, True])
def test_tools_and_thinking(scripted: Any, by_character: bool) -> None:
    server, engine, form = scripted
    engine.say(CALLS[form].removeprefix("<think>\n"), by_character=by_character)
    client = client_of(server)
    fields: Any = {
        "model": "m",
        "max_tokens": 400,
        "messages": MESSAGES,
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thought, text, call = whole.content
    assert (thought.thinking, text.text) == ("Where?", "Looking é.")  # type: ignore[union-attr]
    assert (call.name, call.input) == ("get_weather", {"city": "Zürich", "days": 3})  # type: ignore[union-attr]
    assert whole.stop_reason == "tool_use"
    assert whole.usage.output_tokens == len(engine.script)
    assert whole.usage.input_tokens == len(engine.seen[-1][0])
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    strip = {"id", "signature"}
    assert [b.model_dump(exclude=strip) for b in final.content] == [
        b.model_dump(exclude=strip) for b in whole.content
    ]
    assert final.stop_reason == "tool_use"
    # The next turn, with the part of this answer that the client keeps.
    engine.say("Rain.")
    history = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in final.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "wet"},  # type: ignore[union-attr]
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    again = client.messages.create(**fields | {"messages": history, "thinking": {"type": "disabled"}})
    assert again.content[0].text == "Rain."  # type: ignore[union-attr]
    assert again.stop_reason == "end_turn"
    prompt = engine.tokenizer.decode(engine.seen[-1][0])
    assert "city=Zürich" in prompt
    assert "wet" in prompt
    assert "Be brief." in prompt


def test_stops_and_lengths(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("one two three")
    client = client_of(server)
    fields: Any = {"model": "alias", "messages": MESSAGES}
    short = client.messages.create(max_tokens=2, **fields)
    assert short.stop_reason == "max_tokens"
    engine.chunk = len(engine.script)
    cut = client.messages.create(max_tokens=50, stop_sequences=["zzz", "three"], **fields)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "three")
    assert cut.content[0].text == "one two "  # type: ignore[union-attr]
    both = client.messages.create(max_tokens=50, stop_sequences=["ree", "three"], **fields)
    assert (both.stop_sequence, both.content) == ("three", cut.content)
    count = client.messages.count_tokens(**fields)
    assert count.input_tokens == len(engine.seen[-1][0])


@pytest.mark.parametrize("value", ["1e999", '"\\ud800"'])
def test_arguments_that_are_no_json_stay_text(scripted: Any, value: str) -> None:
    server, engine, form = scripted
    engine.say(
        {
            "xml": "<tool_call>\n<function=get_weather>\n<parameter=days>\n"
            f"{value}\n</parameter>\n</function>\n</tool_call>",
            "json": f'<tool_call>\n{{"name": "get_weather", "arguments": {{"days": {value}}}}}\n</tool_call>',
        }[form]
    )
    answer = client_of(server).messages.create(model="m", max_tokens=99, messages=MESSAGES, tools=[WEATHER])
    assert answer.content[0].input == {"incomplete": f'{{"days": {value}}}'}  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_priority_and_salt_reach_the_engine(scripted: Any, stream: bool) -> None:
    server, engine, _ = scripted
    engine.say("yes")
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "stream": stream}
    for fields, expected in (({"priority": -3, "cache_salt": "mine"}, (-3, "mine")), ({}, (0, None))):
        answer = httpx.post(f"{server.url}/v1/messages", json=body | fields, headers={"x-api-key": "secret"})
        assert answer.status_code == 200, answer.text
        assert (engine.priorities[-1], engine.seen[-1][1].cache_salt) == expected


def test_a_quiet_stream_pings(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, engine, _ = scripted
    monkeypatch.setattr(module, "_PING_S", 0.02)
    engine.say("one two")
    engine.step_s = 0.1
    try:
        body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "stream": True}
        text = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "secret"}).text
    finally:
        engine.step_s = 0.0
    assert text.count("event: ping") > 2
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
        ({"what": 1}, 400, "invalid_request_error"),
        ({"priority": "high"}, 400, "invalid_request_error"),
        ({"cache_salt": "x" * 257}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
    ],
)
def test_errors_in_its_form(scripted: Any, fields: Any, status: int, kind: str) -> None:
    server, _, _ = scripted
    body = {"model": "m", "max_tokens": 4, "messages": MESSAGES} | fields
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert next(iter(fields)) in answer.json()["error"]["message"]
    assert answer.headers["request-id"].startswith("req_")


def test_keys_and_errors_of_a_running_request(scripted: Any) -> None:
    server, engine, _ = scripted
    wrong = anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="m", max_tokens=2, messages=MESSAGES)
    engine.say("some text")
    engine.error = "a row was not finite"
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="not finite"),
            client_of(server).messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream,
        ):
            list(stream)
    finally:
        engine.error = None


def test_the_asynchronous_client(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("one two three")

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            asked = [client.messages.create(model="m", max_tokens=99, messages=MESSAGES) for _ in range(4)]
            return [answer.content[0].text for answer in await asyncio.gather(*asked)]  # type: ignore[union-attr]

    assert asyncio.run(ask()) == ["one two three"] * 4


def test_only_one_call_without_parallel_calls(scripted: Any) -> None:
    server, engine, form = scripted
    call = "<tool_call>" + CALLS[form].partition("<tool_call>")[2]
    engine.say(call)
    for choice, is_parallel in (
        ({"type": "any"}, True),
        ({"type": "any", "disable_parallel_tool_use": False}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, False),
    ):
        fields: Any = {"model": "m", "max_tokens": 400, "messages": MESSAGES, "tools": [WEATHER]}
        whole = client_of(server).messages.create(**fields, tool_choice=choice)
        assert [block.type for block in whole.content] == ["tool_use"]
        check_forced_calls(engine, form, call, is_parallel)
