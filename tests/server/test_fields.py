"""Every field of the clients' request schemas: read, ineffective, ignored, or refused by its name."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.anthropic_models import (
    AnthropicTool,
    InputMessage,
    MessagesBody,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from compiled_mtp.server.fields import Body, Unread
from compiled_mtp.server.openai_models import ChatBody, CompletionBody, ContentPart, Message, StreamOptions
from compiled_mtp.server.responses_models import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningConfig,
    ReasoningItem,
    ResponsesBody,
    SearchTool,
    TextConfig,
    TextFormat,
)
from tests.server.serving import Running, ScriptedEngine, make_family, running

CLIENT = httpx.Client(timeout=30)
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
}
SCHEMAS: dict[str, Any] = {
    "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/chat/completions": chat_params.CompletionCreateParamsNonStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
    "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
}
# The meaning of each field that a client leaves out, from the APIs' references.
DEFAULTS: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "metadata": {},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": "medium",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "stream": False,
    "suffix": "",
    "temperature": 1,
    "thinking": {"type": "disabled"},
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "user": "u",
    "verbosity": "medium",
    "max_tokens": 16,
    "stop": [],
    "stop_sequences": [],
    "system": "",
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "diagnostics": {"previous_message_id": None},
    "mcp_servers": [],
    "output_config": {"effort": "high"},
    "speed": "standard",
    "user_profile_id": "u",
    "workspace_id": "w",
    "background": False,
    "include": ["reasoning.encrypted_content"],
    "max_tool_calls": 3,
    "reasoning": {},
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "truncation": "disabled",
    "instructions": "",
}
# Values of fields that have an effect whenever they are set.
ASKING: dict[str, Any] = {
    "audio": {"voice": "v", "format": "mp3"},
    "moderation": {"model": "x"},
    "web_search_options": {},
    "container": "c",
    "inference_geo": "us",
    "billing_policy": {"type": "billing_policy"},
    "compaction": {"type": "auto"},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "x"}],
    "thread": {"id": "t"},
    "betas": ["x"],
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "soonest"},
    "conversation": "c",
    "image": {"context_compression": "enabled"},
}
OPENAI = (CompletionBody, ChatBody, Message, ContentPart, StreamOptions)
ANTHROPIC = (MessagesBody, AnthropicTool, InputMessage, TextBlock, ToolUseBlock, ToolResultBlock)
RESPONSES = (
    ResponsesBody,
    MessageItem,
    CallItem,
    CallOutputItem,
    ReasoningItem,
    FunctionTool,
    SearchTool,
    TextFormat,
    TextConfig,
    ReasoningConfig,
)
# Fields that are read and have no default.
NEEDED = {"model", "prompt", "messages", "input"}
UNSET = {"seed", "logprobs", "max_completion_tokens", "max_output_tokens", "previous_response_id"}


def unread_fields(body: type[Body]) -> dict[str, tuple[Any, ...]]:
    """Return the fields of `body` that no handler reads, each with its allowed values, () for any."""
    return {
        name: mark.values
        for name, field in body.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unread)
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ScriptedEngine]]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("one two three")
    with running(engine, model) as found:
        yield found, engine


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_family(tmp_path_factory.mktemp("strict") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("one two three")
    with running(engine, model, strict_fields=True) as found:
        yield found


def schema_fields(path: str) -> list[str]:
    names = set(typing.get_type_hints(SCHEMAS[path]))
    if path == "/v1/messages":
        names |= set(typing.get_type_hints(beta_params.MessageCreateParamsNonStreaming))
    return sorted(names)


def default_of(path: str, name: str) -> Any:
    value = DEFAULTS[name]
    if path == "/v1/responses" and name == "context_management":
        return []
    if "messages" in path:
        value = {"tool_choice": {"type": "auto"}, "service_tier": "auto"}.get(name, value)
    return value


EVERY = [(path, name) for path in SCHEMAS for name in schema_fields(path)]


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return CLIENT.post(f"{server.url}{path}", json=body)


def text_of(answer: httpx.Response) -> Any:
    found = answer.json()
    if "output" in found:
        return [item["content"] for item in found["output"]]
    return found.get("choices") or found.get("content") or found.get("input_tokens")


@pytest.mark.parametrize(("path", "name"), EVERY)
def test_every_field_of_the_schemas(served: Any, strict: Running, path: str, name: str) -> None:
    server, _ = served
    plain = text_of(post(server, path, BODIES[path]))
    if name not in NEEDED | {"max_tokens"}:
        nothing = post(server, path, BODIES[path] | {name: None})
        assert (nothing.status_code, text_of(nothing)) == (200, plain)
        assert post(strict, path, BODIES[path] | {name: None}).status_code == 200
    if name in ASKING:
        answer = post(server, path, BODIES[path] | {name: ASKING[name]})
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]
    elif name not in NEEDED | UNSET:
        answer = post(server, path, BODIES[path] | {name: default_of(path, name)})
        assert answer.status_code == 200, answer.text
        assert text_of(answer) == plain
    elif (path, name) == ("/v1/responses", "prompt"):
        answer = post(server, path, BODIES[path] | {name: {"id": "x"}})
        assert answer.json()["error"]["message"].startswith("prompt must be left out")
    else:
        assert name in BODIES[path] or name in UNSET


@pytest.mark.parametrize(
    "body", [CompletionBody, ChatBody, ResponsesBody, MessagesBody, Message, TextBlock, StreamOptions]
)
def test_strict_fields_refuse_all_unread_fields(strict: Running, body: type[Body]) -> None:
    paths = {CompletionBody: "/v1/completions", ResponsesBody: "/v1/responses"}
    paths |= dict.fromkeys((MessagesBody, TextBlock), "/v1/messages")
    path = paths.get(body, "/v1/chat/completions")
    found = unread_fields(body)
    assert found
    for name, values in found.items():
        one = {name: values[0] if values else "x"}
        fields = BODIES[path] | one
        param = name
        if body is Message:
            fields, param = BODIES[path] | {"messages": [MESSAGES[0] | one]}, f"messages.0.{name}"
        elif body is TextBlock:
            fields = BODIES[path] | {"system": [{"type": "text", "text": "x"} | one]}
            param = f"system.0.{name}"
        elif body is StreamOptions:
            fields, param = BODIES[path] | {"stream_options": one}, f"stream_options.{name}"
        answer = post(strict, path, fields)
        assert answer.status_code == 400, name
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{param} must be left out with strict_fields, got "), message


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/chat/completions", {"echo": True}, "echo must be false, got True; put the prompt before"),
        ("/v1/completions", {"best_of": 2}, "best_of must be 1, got 2; use n and logprobs"),
        ("/v1/completions", {"best_of": True}, "best_of must be 1, got True"),
        ("/v1/completions", {"suffix": "x"}, "suffix must be"),
        ("/v1/completions", {"use_beam_search": True}, "use_beam_search must be false"),
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities must be"),
        ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message must be false"),
        ("/v1/chat/completions", {"skip_special_tokens": False}, "skip_special_tokens must be true"),
        ("/v1/chat/completions", {"thinking_budget": 5}, "thinking_budget must be a field"),
        ("/v1/chat/completions", {"guided_json": {}}, "guided_json must be a field"),
        ("/v1/messages", {"speed": "fast"}, "speed must be"),
        (
            "/v1/messages",
            {"output_config": {"effort": "high", "what": 1}},
            "output_config.what must be a field",
        ),
    ],
)
def test_unread_fields_that_would_have_an_effect_are_refused(
    served: Any, path: str, fields: Any, says: str
) -> None:
    answer = post(served[0], path, BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(says), answer.text


PART: Any = {"type": "text", "text": "x"}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


@pytest.mark.parametrize(
    ("path", "block", "name", "value"),
    [
        ("/v1/chat/completions", PART, "prompt_cache_breakpoint", {"mode": "explicit"}),
        ("/v1/chat/completions", PART | {"type": "output_text"}, "annotations", []),
        ("/v1/messages", RESULT, "is_error", True),
    ],
)
def test_the_parts_of_a_message_have_known_fields(
    served: Any, strict: Running, path: str, block: Any, name: str, value: Any
) -> None:
    def answer(server: Running, fields: Any) -> Any:
        body = BODIES[path] | {"messages": [{"role": "user", "content": [block | fields]}]}
        return post(server, path, body)

    for server in (served[0], strict):
        assert answer(server, {name: None}).status_code == 200
        unknown = answer(server, {"what": 1})
        assert unknown.status_code == 400
        assert "messages.0.content.0.what must be a field" in unknown.json()["error"]["message"]
    assert answer(served[0], {name: value}).status_code == 200
    refused = answer(strict, {name: value})
    assert refused.status_code == 400
    says = f"messages.0.content.0.{name} must be left out with strict_fields"
    assert refused.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize("part", [{"type": "input_audio", "input_audio": {}}, {"type": "refusal"}])
def test_parts_without_text_are_refused_by_their_type(served: Any, part: Any) -> None:
    path = "/v1/chat/completions"
    answer = post(served[0], path, BODIES[path] | {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    says = f"messages.0.content.0.type must be text or image_url, got '{part['type']}'; other media are"
    assert answer.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize("names", [["1_0"], [" 5"], ["+5"], ["\u0665"], ["5", "05"], ["9" * 5000]])
def test_a_bias_has_one_name_for_each_id(served: Any, names: list[str]) -> None:
    body = BODIES["/v1/completions"] | {"logit_bias": dict.fromkeys(names, 1)}
    answer = post(served[0], "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("logit_bias must ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("guided_regex", "[ab]+", "[ab]+"),
        ("guided_choice", ["a", "b"], ("a", "b")),
        ("guided_grammar", 'start: "a"', 'start: "a"'),
        ("bad_words", ["a"], ("a",)),
        ("allowed_token_ids", [5, 6], (5, 6)),
        ("logprobs_mode", "processed", "processed"),
    ],
)
def test_the_engines_names_reach_it(served: Any, path: str, name: str, value: Any, taken: Any) -> None:
    server, engine = served
    answer = post(server, path, BODIES[path] | {name: value})
    assert answer.status_code == 200, answer.text
    assert getattr(engine.seen[-1][1], name) == taken


def test_their_sizes_are_limited(served: Any) -> None:
    for fields, name in (
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": ["a" * 70_000]}, "guided_choice"),
        ({"guided_grammar": "a" * 70_000}, "guided_grammar"),
        ({"bad_words": ["a" * 300]}, "bad_words"),
        ({"bad_words": [str(i) for i in range(100)]}, "bad_words"),
    ):
        answer = post(served[0], "/v1/completions", BODIES["/v1/completions"] | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


def test_the_unmodified_clients_send_what_agents_do(served: Any) -> None:
    server, engine = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    create: Any = client.chat.completions.create
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    history = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hi", "id": "msg_1", "reasoning": "Polite."},
        {"role": "user", "content": "Bye"},
    ]
    answer = create(
        model="m",
        messages=history,
        reasoning_effort="low",
        verbosity="low",
        service_tier="auto",
        store=True,
        metadata={"a": "b"},
        user="u",
        modalities=["text"],
    )
    assert answer.choices[0].message.content == "one two three"
    assert "Hello" in engine.tokenizer.decode(engine.seen[-1][0])
    old: Any = client.completions.create
    assert old(model="m", prompt="x", echo=False, best_of=1).choices[0].text == "one two three"
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    said = other.beta.messages.create(
        model="m",
        max_tokens=9,
        messages=MESSAGES,
        tools=[TOOL],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        betas=["context-management-2025-06-27"],
        metadata={"user_id": "u"},
    )
    assert said.content[0].text == "one two three"  # type: ignore[union-attr]


def test_the_reasoning_of_a_turn_has_two_names(served: Any) -> None:
    from compiled_mtp.server.openai import to_template

    for name in ("reasoning", "reasoning_content"):
        (plain,) = to_template([Message(role="assistant", content="Hi", **{name: "Polite."})])
        assert plain == {"role": "assistant", "content": "Hi", "reasoning_content": "Polite."}


def test_anthropics_output_format_is_a_schema_of_the_engine(served: Any) -> None:
    server, engine = served
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    path = "/v1/messages"
    assert post(server, path, BODIES[path] | {"output_config": config}).status_code == 200
    found = engine.seen[-1][1].response_format
    assert found["type"] == "json_schema"
    assert found["json_schema"]["schema"] == schema


def test_the_docs_list_every_field_that_is_not_read() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for body in (*OPENAI, *ANTHROPIC, *RESPONSES):
        for name in unread_fields(body):
            assert f"`{name}`" in text, f"{body.__name__}.{name}"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"stop_sequences": ["x" * 300]}, "stop_sequences"),
    ],
)
def test_an_error_names_the_field_that_was_sent(served: Any, path: str, fields: Any, param: str) -> None:
    answer = post(served[0], path, BODIES[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param} must "), error
    assert error.get("param", param) == param


def test_anthropics_errors_name_its_own_form_of_an_answer(served: Any) -> None:
    server, engine = served
    path, config = "/v1/messages", {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    forced = {"tools": [TOOL], "tool_choice": {"type": "any"}, "output_config": config}
    answer = post(server, path, BODIES[path] | forced)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("output_config.format must be left out where tool_ch")

    def refuse(*_: Any, **__: Any) -> str:
        raise ValueError("response_format.json_schema.schema must be a grammar, got: what; simplify it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "add_request", refuse)
        answer = post(server, path, BODIES[path] | {"output_config": config})
    assert answer.status_code == 400
    says = "output_config.format.schema must be a grammar, got: what; simplify it"
    assert answer.json()["error"]["message"] == says


def test_no_stream_begins_with_empty_speculation(served: Any) -> None:
    server, _ = served
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    whole = client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
    with client.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream:
        sums = [event.usage for event in stream if event.type == "message_delta"]
        final = stream.get_final_message()
    assert whole.usage.speculation["rounds"] > 0  # type: ignore[attr-defined]
    assert [one.speculation for one in sums] == [whole.usage.speculation]  # type: ignore[attr-defined]
    # The client ignores unknown fields of message_delta, so a value from message_start would stay.
    assert "speculation" not in (final.usage.model_extra or {})
