"""OpenAI's client against /v1/responses: its events, tools, stored answers, structured output and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.response_store import ResponseStore
from compiled_mtp.server.responses import to_template, with_instructions
from compiled_mtp.server.responses_models import CallItem, MessageItem, ReasoningItem
from tests.server.forced_calls import CALLS, check_forced_calls
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, make_family, running

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "d",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "strict": True,
}


@pytest.fixture(scope="module", params=["xml", "json"])
def scripted(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, ScriptedEngine, str]]:
    model = make_family(tmp_path_factory.mktemp("family") / request.param, request.param)
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model) as server:
        yield server, engine, request.param


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ScriptedEngine]]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model, max_stored_bytes=20_000) as server:
        engine.say("one two three")
        yield server, engine


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0])


@pytest.mark.parametrize("by_character", [False, True])
def test_reasoning_text_and_calls(scripted: Any, by_character: bool) -> None:
    server, engine, form = scripted
    engine.say(CALLS[form].removeprefix("<think>\n"), by_character=by_character)
    client = client_of(server)
    fields: Any = {
        "model": "m",
        "input": "Weather?",
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "reasoning": {"effort": "high"},
        "metadata": {"a": "b"},
    }
    whole = client.responses.create(**fields)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought, text, call = whole.output
    assert thought.content[0].text == "Where?"  # type: ignore[union-attr, index]
    assert whole.output_text == text.content[0].text == "Looking é."  # type: ignore[union-attr]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Zürich", "days": 3}')  # type: ignore[union-attr]
    assert (whole.status, whole.error, whole.metadata) == ("completed", None, {"a": "b"})
    assert "Be brief." in prompt_of(engine)
    usage = whole.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(engine.seen[-1][0]), len(engine.script))
    if not by_character:
        end = engine.script.index(engine.tokenizer.added_ids["</think>"])
        assert usage.output_tokens_details.reasoning_tokens == end + 1
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    # The object that the stream ends with; the client's own copy has more fields.
    ended = client.responses.retrieve(final.id)
    assert ended.output_text == final.output_text
    drop: Any = {"id", "call_id"}

    def plain(answer: Any) -> list[Any]:
        return [item.model_dump(exclude=drop) for item in answer.output]

    assert plain(ended) == plain(whole)
    # The next turn, of the stored answer and of the items that the client has: both render one prompt.
    engine.say("Rain.")
    fields["reasoning"] = {"effort": "none"}
    result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "wet"}  # type: ignore[union-attr]
    again = client.responses.create(**fields | {"input": [result], "previous_response_id": final.id})
    assert again.output_text == "Rain."
    stored = prompt_of(engine)
    assert "Weather?" in stored
    assert "city=Zürich" in stored
    assert "wet" in stored
    history = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in ended.output), result]
    client.responses.create(**fields | {"input": history, "store": False})
    assert prompt_of(engine) == stored


def test_events_of_each_item(served: Any) -> None:
    server, engine = served
    engine.say("Why.\n</think>\n\nText.")
    client = client_of(server)
    kinds = {
        None: ["content_part", "reasoning_text", "content_part"],
        "auto": ["reasoning_summary_part", "reasoning_summary_text", "reasoning_summary_part"],
    }
    for summary, (part, text, _) in kinds.items():
        reasoning: Any = {"effort": "low", "summary": summary}
        stream = client.responses.create(model="m", input="x", reasoning=reasoning, stream=True)
        events = list(stream)
        found = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        assert found == list(
            dict.fromkeys(
                [
                    "created",
                    "in_progress",
                    "output_item.added",
                    f"{part}.added",
                    f"{text}.delta",
                    f"{text}.done",
                    f"{part}.done",
                    "output_item.done",
                    "content_part.added",
                    "output_text.delta",
                    "output_text.done",
                    "content_part.done",
                    "completed",
                ]
            )
        )
        item = events[-1].response.output[0]  # type: ignore[union-attr]
        assert ((item.summary if summary else item.content) or [])[0].text == "Why."  # type: ignore[union-attr]
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == "Text."
    engine.say("one two three")


def test_stored_answers(served: Any) -> None:
    server, engine = served
    client = client_of(server)
    first = client.responses.create(model="m", input="first")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(model="m", input="second", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="response_id must be a stored answer, got 'resp_"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    # The answer that continues a deleted one keeps the whole conversation.
    client.responses.create(model="m", input="third", previous_response_id=second.id)
    assert [word for word in ("first", "second", "third") if word not in prompt_of(engine)] == []
    unkept = client.responses.create(model="m", input="x", store=False)
    assert unkept.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id must be a stored answer") as error:
        client.responses.create(model="m", input="x", previous_response_id=unkept.id)
    assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
    large = client.responses.create(model="m", input="long words " * 40, metadata={"k": "v" * 30_000})
    assert large.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="stream must be false"):
        client.responses.retrieve(second.id, stream=True)  # type: ignore[call-overload]


def test_the_store_is_bounded() -> None:
    store = ResponseStore(1000)

    def add(name: str, size: int, previous: str | None = None) -> bool:
        return store.add({"id": name}, ["x" * size], store.find(previous) if previous else None)  # type: ignore[list-item]

    assert add("a", 300)
    assert add("b", 300)
    assert add("c", 300, "a")
    # `b` leaves: `a` was used later.
    assert add("d", 200)
    assert [name for name in "abcd" if store.find(name)] == ["a", "c", "d"]
    stored = store.find("c")
    assert stored is not None
    assert [len(one) for one in stored.conversation()] == [300, 300]
    before = store.num_bytes
    assert store.remove("a")
    assert store.num_bytes == before
    assert store.remove("c")
    assert store.num_bytes == before - 2 * (before - len('[{"id": "d"}, [""]]') - 200) // 2
    assert not store.remove("c")
    assert not add("e", 2000)
    assert (store.num_bytes, store.find("d")) == (0, None)


def test_an_answer_that_left_meanwhile_counts_with_the_one_that_continues_it() -> None:
    store = ResponseStore(1000)
    store.add({"id": "a"}, ["x" * 300], None)  # type: ignore[list-item]
    first, alone = store.find("a"), store.num_bytes
    store.add({"id": "b"}, ["x" * 300], first)  # type: ignore[list-item]
    second, both = store.find("b"), store.num_bytes
    store.remove("a")
    store.remove("b")
    assert store.num_bytes == 0
    # A request that has found `b` before ends only now.
    store.add({"id": "c"}, ["x" * 300], second)  # type: ignore[list-item]
    assert store.num_bytes == both + alone
    store.remove("c")
    assert store.num_bytes == 0


def test_structured_output_and_lengths(served: Any) -> None:
    server, engine = served
    client = client_of(server)

    class Answer(pydantic.BaseModel):
        number: int

    engine.say('{"number": 3}')
    parsed = client.responses.parse(model="m", input="x", text_format=Answer)
    assert parsed.output_parsed == Answer(number=3)
    form = engine.seen[-1][1].response_format
    assert form["json_schema"]["schema"]["properties"]["number"]["type"] == "integer"
    client.responses.create(model="m", input="x", text={"format": {"type": "json_object"}})
    assert engine.seen[-1][1].response_format == {"type": "json_object"}
    engine.say("one two three")
    cut = client.responses.create(model="m", input="x", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    stream = client.responses.create(model="m", input="x", max_output_tokens=2, stream=True)
    assert list(stream)[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("choice", "is_parallel"), [("required", True), ({"type": "function", "name": "get_weather"}, False)]
)
def test_forced_calls(scripted: Any, choice: Any, is_parallel: bool) -> None:
    server, engine, form = scripted
    call = CALLS[form][CALLS[form].index("<tool_call>") :]
    engine.say(call)
    # A forced call has no text, whose form would be another grammar.
    text: Any = {"format": {"type": "json_object"}}
    answer = client_of(server).responses.create(
        model="m", input="x", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=is_parallel, text=text
    )
    assert engine.seen[-1][1].response_format is None
    assert [item.type for item in answer.output] == ["function_call"]
    check_forced_calls(engine, form, call, is_parallel)


def test_namespaces_are_part_of_a_functions_name(scripted: Any) -> None:
    server, engine, form = scripted
    call = CALLS[form][CALLS[form].index("<tool_call>") :]
    engine.say(call.replace("get_weather", "sky.get_weather"))
    tools: Any = [
        {"type": "namespace", "name": "sky", "description": "d", "tools": [WEATHER]},
        {"type": "web_search", "external_web_access": True},
    ]
    client = client_of(server)
    answer = client.responses.create(
        model="m", input="x", tools=tools, extra_body={"client_metadata": {"a": "b"}}
    )
    (item,) = answer.output
    assert (item.namespace, item.name) == ("sky", "get_weather")  # type: ignore[union-attr]
    assert '"name": "sky.get_weather"' in prompt_of(engine)
    assert "web_search" not in prompt_of(engine)
    assert [tool.type for tool in answer.tools] == ["namespace", "web_search"]
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}  # type: ignore[union-attr]
    history: Any = [{"role": "user", "content": "x"}, item.to_dict(), result]
    client.responses.create(model="m", input=history, tools=tools)
    sent = prompt_of(engine)
    assert "<tool_call>sky.get_weather" in sent
    client.responses.create(model="m", input=[result], tools=tools, previous_response_id=answer.id)
    assert prompt_of(engine) == sent


def test_a_failure_ends_the_stream_by_name(served: Any) -> None:
    server, engine = served
    engine.error = "logits must be finite"
    try:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="logits must be finite"):
            client.responses.create(model="m", input="x")
        last = list(client.responses.create(model="m", input="x", stream=True))[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert "logits must be finite" in last.response.error.message
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)
    finally:
        engine.error = None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "must"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "must be an item of type message, "),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "must be"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
            "must have a field image_url",
        ),
        ({"input": [{"role": "user", "content": "x", "what": 1}]}, "input.0.what", "must be a field of this"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input.0.arguments",
            "must be the text of a JSON object",
        ),
        ({"tools": [{"type": "mcp"}]}, "tools.0", "must be a tool of type function, namespace, web_search, "),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "must be given"),
        ({"tool_choice": "required"}, "tool_choice", "must be auto or none without tools"),
        (
            {"conversation": "c"},
            "conversation",
            "must be left out, got 'c'; continue an answer with previous",
        ),
        ({"background": True}, "background", "must be false"),
        ({"include": ["message.output_text.logprobs"]}, "include", "must not hold message.output_text.log"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"stop": ["x" * 999]}, "stop", "must have at most"),
        (
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning.effort",
            "must be left out with chat_template_kwargs",
        ),
        ({"input": "x " * 2000}, "prompt", "must be shorter than max_model_len"),
    ],
)
def test_mistakes_are_named(served: Any, fields: Any, param: str, says: str) -> None:
    answer = httpx.post(f"{served[0].url}/v1/responses", json={"model": "m", "input": "x"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"].startswith(f"{param} {says}"), error


def test_items_of_one_turn_become_one_message() -> None:
    call = CallItem(type="function_call", call_id="c", name="f", arguments="{}")
    messages = to_template(
        [
            MessageItem(role="developer", content="a"),
            MessageItem(role="user", content="b"),
            ReasoningItem(type="reasoning", summary=[{"type": "summary_text", "text": "c"}]),  # type: ignore[list-item]
            MessageItem(role="assistant", content="d"),
            call,
            call,
            MessageItem(role="assistant", content="e"),
        ]
    )
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "assistant"]
    assert messages[2]["reasoning_content"] == "c"
    assert (messages[2]["content"], len(messages[2]["tool_calls"])) == ("d", 2)
    assert with_instructions("i", messages)[0] == {"role": "system", "content": "i\n\na"}
    assert with_instructions(None, messages[1:]) == messages[1:]


def test_the_tokens_are_the_engines_own() -> None:
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len) as server:
        client = client_of(server)
        answer = client.responses.create(
            model="m", input="def f(", max_output_tokens=12, extra_body={"seed": 7, "top_k": 20}
        )
        chat = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "def f("}],
            max_completion_tokens=12,
            seed=7,
            extra_body={"top_k": 20},
        )
        form: Any = {"format": {"type": "json_schema", "name": "x"}}
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema must ") as error:
            client.responses.create(model="m", input="x", text=form)
    assert error.value.param == "text.format.schema"
    assert answer.output_text == chat.choices[0].message.content
    assert answer.output_text
