"""OpenAI's own client against the server: the default checkpoint, and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.sampling.logprobs import TokenLogprob, TopLogprob
from tests.server.forced_calls import CALLS, check_forced_calls
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, make_family, running

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def add("}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """A separate engine that gives the expected tokens."""
    engine = Engine(EngineConfig(device="cpu", seed=None))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len) as server:
        yield server


@pytest.fixture(scope="module", params=["xml", "json"])
def scripted(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, ScriptedEngine, str]]:
    model = make_family(tmp_path_factory.mktemp("family") / request.param, request.param)
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model) as server:
        yield server, engine, request.param


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_completions_are_the_engines_own(real: Running, alone: Engine) -> None:
    client = client_of(real)
    for fields in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 11},
        {"seed": 3, "top_p": 0.8, "stop": ["return"]},
    ):
        expected = alone.generate(["def quicksort("], SamplingParams(max_tokens=20, **fields))[0]
        whole = client.completions.create(
            model="m",
            prompt="def quicksort(",
            max_tokens=20,
            extra_body={"return_token_ids": True, "cache_salt": "mine"},
            **fields,
        )
        assert whole.choices[0].token_ids == expected.new_token_ids  # type: ignore[attr-defined]
        assert whole.choices[0].text == expected.new_text
        assert whole.choices[0].finish_reason == expected.finish_reason
        chunks = list(
            client.completions.create(
                model="alias",
                prompt="def quicksort(",
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True, "include_round": True},
                **fields,
            )
        )
        ids = [i for chunk in chunks for c in chunk.choices for i in getattr(c, "token_ids", [])]
        assert ids == expected.new_token_ids
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == expected.new_text
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == len(ids) == whole.usage.completion_tokens  # type: ignore[union-attr]
        speculation = usage.speculation  # type: ignore[attr-defined]
        rounds = [chunk.round for chunk in chunks if hasattr(chunk, "round")]  # type: ignore[attr-defined]
        assert sum(one["drafted"] for one in rounds) == speculation["drafted_tokens"] > 0
        assert sum(one["accepted"] for one in rounds) == speculation["accepted_tokens"]


def test_choices_and_prompts_have_seeds_of_their_own(real: Running, alone: Engine) -> None:
    prompts = ["import os", "class Stack"]
    got = client_of(real).completions.create(model="m", prompt=prompts, n=3, seed=5, max_tokens=12)
    expected = alone.generate(prompts, SamplingParams(max_tokens=12, seed=5, n=3))
    assert [c.text for c in got.choices] == [one.new_text for one in expected]
    assert [c.index for c in got.choices] == list(range(6))
    assert len({c.text for c in got.choices}) > 2
    ids = alone.tokenizer.encode("import os")  # type: ignore[union-attr]
    by_ids = client_of(real).completions.create(model="m", prompt=[ids, ids], seed=5, max_tokens=12)
    assert [c.text for c in by_ids.choices] == [expected[0].new_text] * 2


def test_chat_is_the_engines_own(real: Running, alone: Engine) -> None:
    request_id = alone.add_request(
        messages=[{**m, "role": m["role"]} for m in MESSAGES], params=SamplingParams(max_tokens=24, seed=1)
    )
    text = ""
    while alone.has_unfinished_requests():
        text += "".join(one.new_text for one in alone.step() if one.request_id == request_id)
    client = client_of(real)
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    whole = client.chat.completions.create(
        model="m", messages=developer, max_completion_tokens=24, seed=1, user="u", store=False, metadata={}
    )
    assert whole.choices[0].message.content == text
    chunks = list(
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=24, seed=1, stream=True, n=2)
    )
    assert "".join(c.delta.content or "" for k in chunks for c in k.choices if c.index == 0) == text
    assert {c.finish_reason for k in chunks for c in k.choices if c.finish_reason} <= {"stop", "length"}


@pytest.mark.parametrize("by_character", [False, True])
@pytest.mark.parametrize("chunk", [1, 3])
def test_tools_and_reasoning(scripted: Any, by_character: bool, chunk: int) -> None:
    server, engine, form = scripted
    engine.say(CALLS[form], by_character=by_character, chunk=chunk)
    client = client_of(server)
    create: Any = client.chat.completions.create
    whole = create(model="m", messages=MESSAGES, tools=[WEATHER], parallel_tool_calls=True)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.reasoning_content == "Where?"
    assert message.content == "Looking é."
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich", "days": 3}
    chunks = list(create(model="m", messages=MESSAGES, tools=[WEATHER], tool_choice="auto", stream=True))
    deltas = [k.choices[0].delta for k in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Where?"
    assert "".join(d.content or "" for d in deltas) == "Looking é."
    calls = [c for d in deltas for c in d.tool_calls or []]
    assert [c.function.name for c in calls if c.id] == ["get_weather"]
    assert json.loads("".join(c.function.arguments for c in calls)) == {"city": "Zürich", "days": 3}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # The next turn, with the part of this answer that the client keeps.
    history = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    engine.say("Rain.")
    again = create(model="m", messages=history, tools=[WEATHER])
    assert again.choices[0].message.content == "Rain."
    text = engine.tokenizer.decode(engine.seen[-1][0])
    assert "get_weather" in text
    assert "city=Zürich" in text


def test_choices_list_the_drafts_of_their_rounds_if_asked(real: Running) -> None:
    client = client_of(real)
    fields: Any = {"model": "m", "max_tokens": 40, "temperature": 0.5, "seed": 4}
    asking = {"extra_body": {"include_drafts": True, "return_token_ids": True}}
    for create, prompt, text_of in (
        (client.completions.create, {"prompt": "def add("}, lambda c: c.text),
        (client.chat.completions.create, {"messages": MESSAGES}, lambda c: c.delta.content or ""),
    ):
        whole: Any = create(**fields, **prompt, **asking)
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = list(create(**fields, **prompt, **asking, **options))
        choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
        tokens = [token for choice in choices for token in getattr(choice, "tokens", ())]
        rounds = [one for choice in choices for one in getattr(choice, "rounds", ())]
        # A chunk holds the tokens of its rounds.
        assert max(len(getattr(choice, "rounds", ())) for choice in choices) == 1
        assert (whole.choices[0].tokens, whole.choices[0].rounds) == (tokens, rounds)
        assert [token["id"] for token in tokens] == whole.choices[0].token_ids
        text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
        assert text == "".join(text_of(choice) for choice in choices)
        at = 1
        for one in rounds:
            kept = one["accepted"]
            assert one["drafts"][:kept] == tokens[at : at + kept]
            at += kept + 1
        speculation = last.usage.speculation
        assert speculation["rounds"] == len(rounds) > 0
        assert speculation["drafted_tokens"] == sum(len(one["drafts"]) for one in rounds)
        assert speculation["accepted_tokens"] == sum(one["accepted"] for one in rounds)
        silent: Any = list(create(**fields, **prompt, stream=True))
        assert not any({"tokens", "rounds"} & set(c.model_extra) for k in silent for c in k.choices)
        # The last token of a round that a limit cuts is no bonus token.
        assert len(tokens) <= at <= len(tokens) + 1


def test_a_special_token_is_listed_by_its_name(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("ab<|im_end|>")
    body = {"model": "m", "messages": MESSAGES, "include_drafts": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()["choices"][0]
    assert answer["message"]["content"] == "ab"
    assert [token["token"] for token in answer["tokens"]][-1] == "<|im_end|>"
    assert answer["tokens"][-1]["bytes"] == []


def test_an_event_of_text_alone_equals_the_general_form(scripted: Any) -> None:
    server, engine, _ = scripted
    text = 'a "b" \\ \x00\n\t\u2028 Zürich \U0001f600 {"text": null}'
    engine.say(text, by_character=True)
    for path, asked, key in (
        ("completions", {"prompt": "x", "max_tokens": 200}, "text"),
        ("chat/completions", {"messages": MESSAGES}, "delta"),
    ):
        body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}} | asked
        found = []
        # An event with its round's drafts is made in the general way.
        for fields in ({}, {"include_round": True}):
            lines = httpx.post(f"{server.url}/v1/{path}", json=body | fields, timeout=30).text.split("\n\n")
            found.append([json.loads(line.removeprefix("data: ")) for line in lines[:-2]])
        for events in found:
            # OpenAI: every other chunk has the field too, as null.
            assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
            for event in events:
                for name in ("id", "created", "round"):
                    event.pop(name, None)
            # Rounds that completed no character.
            events[:] = [e for e in events if not (c := e["choices"]) or c[0][key] or c[0]["finish_reason"]]
        assert found[0] == found[1]
        choices = [event["choices"][0] for event in found[0] if event["choices"]]
        said = [one[key] if key == "text" else one["delta"].get("content", "") for one in choices]
        assert len(said) > len(text) / 2
        assert "".join(said) == text


def test_every_cut_in_two(scripted: Any) -> None:
    server, engine, form = scripted
    engine.say(CALLS[form], by_character=True)
    whole = engine.script
    create: Any = client_of(server).chat.completions.create
    for chunk in range(1, len(whole), 7):
        engine.chunk = chunk
        got = create(model="m", messages=MESSAGES, tools=[WEATHER]).choices[0].message
        assert (got.reasoning_content, got.content) == ("Where?", "Looking é.")
        assert json.loads(got.tool_calls[0].function.arguments) == {"city": "Zürich", "days": 3}


def test_without_tools_the_text_is_not_parsed(scripted: Any) -> None:
    server, engine, form = scripted
    engine.say(CALLS[form])
    create: Any = client_of(server).chat.completions.create
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = create(model="m", messages=MESSAGES, **fields).choices[0]
        assert choice.message.content == CALLS[form].partition("</think>\n\n")[2]
        assert choice.finish_reason == "stop"
        assert "get_weather" not in engine.tokenizer.decode(engine.seen[-1][0])


def test_the_template_gets_the_thinking_option(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("I think.\n</think>\n\nYes.")
    create: Any = client_of(server).chat.completions.create
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    message = create(model="m", messages=MESSAGES, extra_body=kwargs).choices[0].message
    assert (message.reasoning_content, message.content) == ("I think.", "Yes.")


def test_logprobs_are_mapped(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("ab cé")
    engine.logprobs = lambda ids: [
        TokenLogprob(i, b"", -0.5, 1, (TopLogprob(i, b"", -0.5), TopLogprob(97, b"", -1.0)), 0.9) for i in ids
    ]
    try:
        client = client_of(server)
        chat = client.chat.completions.create(model="m", messages=MESSAGES)
        content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert b"".join(bytes(e.bytes or []) for e in content or []).decode() == "ab cé"
        assert {len(e.top_logprobs) for e in content or []} == {2}
        create: Any = client.completions.create
        chunks = list(create(model="m", prompt="x", max_tokens=50, stream=True, logprobs=2))
        found = [c.logprobs for k in chunks for c in k.choices if c.logprobs]
        assert [t for one in found for t in one.tokens or []] == [e.token for e in content or []]
        offsets = [o for one in found for o in one.text_offset or []]
        assert offsets == sorted(offsets)
    finally:
        engine.logprobs = None


def test_a_cut_token_has_its_offset_in_the_whole_answer(real: Running) -> None:
    """A token that a stop cuts has more text than the answer keeps of it."""
    create: Any = client_of(real).completions.create
    fields = {"model": "m", "prompt": "def f(", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    tokens = create(**fields).choices[0].logprobs.tokens
    at = next(index for index, token in enumerate(tokens) if index and len(token) > 1)
    fields["stop"] = tokens[at][-1]
    whole = create(**fields).choices[0].logprobs.text_offset
    parts = [chunk.choices[0].logprobs for chunk in create(**fields, stream=True)]
    assert [offset for part in parts if part is not None for offset in part.text_offset] == whole


def test_penalties_bias_and_logprobs_reach_the_engine(real: Running) -> None:
    create: Any = client_of(real).chat.completions.create
    fixed = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = create(**fixed, logprobs=True, top_logprobs=2).choices[0]
    entries = plain.logprobs.content
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy
    forced = create(**fixed, logit_bias={"5": 100}, presence_penalty=0.5).choices[0]
    assert forced.message.content != plain.message.content
    assert (
        create(**fixed, response_format={"type": "text"}).choices[0].message.content == plain.message.content
    )
    answer = create(**fixed | {"max_tokens": 200}, response_format={"type": "json_object"}).choices[0]
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)


def test_log_probabilities_of_a_prompt_are_as_vllm_has_them(real: Running, alone: Engine) -> None:
    prompts = ["def quicksort(items):", "a b"]
    expected = alone.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=2))
    client = client_of(real)
    extra: Any = {"extra_body": {"prompt_logprobs": 2}, "model": "m", "max_tokens": 1, "n": 2}
    whole: Any = client.completions.create(prompt=prompts, **extra)
    for index, choice in enumerate(whole.choices):
        first, *others = choice.prompt_logprobs
        assert first is None
        entries = expected[index // 2].prompt_logprobs
        assert entries is not None
        for entry, other in zip(entries, others, strict=True):
            assert len(other) in (2, 3)
            own = other[str(entry.token_id)]
            assert (own["logprob"], own["rank"]) == (entry.logprob, entry.rank)
            assert own["decoded_token"].encode() == entry.bytes
            top = [other[str(one.token_id)] for one in entry.top]
            assert [(one["rank"], one["logprob"]) for one in top] == list(
                enumerate([one.logprob for one in entry.top], start=1)
            )
    chat: Any = client.chat.completions.create(messages=MESSAGES, **extra)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    silent: Any = client.completions.create(model="m", prompt="a", max_tokens=1)
    assert "prompt_logprobs" not in silent.choices[0].model_extra
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be left out of a stream, got 2"):
        client.completions.create(prompt="a", stream=True, **extra)


def test_what_the_engine_refuses_is_its_own_message(real: Running) -> None:
    create: Any = client_of(real).chat.completions.create
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    for fields, param in (
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": wrong}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            create(model="m", messages=MESSAGES, max_tokens=2, **fields)
        assert param in str(error.value)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens"),
        ({"guided_json": {}}, 400, "guided_json"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content.0",
        ),
        ({"tools": [WEATHER]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"n": 1000}, 400, "n"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, 400, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field(real: Running, fields: Any, status: int, param: str, stream: bool) -> None:
    body = {"model": "m", "messages": MESSAGES, "stream": stream} | fields
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}
    assert " must " in error["message"]


def test_errors_of_a_running_request(scripted: Any) -> None:
    server, engine, _ = scripted
    engine.say("some text", chunk=99)
    engine.error, chunks = "a row was not finite", list[Any]()
    try:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="not finite"):
            client.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.APIError, match="not finite"):
            chunks.extend(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        # The tokens that the round drew before the row.
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "some text"
    finally:
        engine.error = None


def test_parameters_that_leave_no_token_are_the_clients_mistake(real: Running, alone: Engine) -> None:
    """min_tokens forbids the eos ids, the grammar all ids but those of `a`, and the bias the ids of `a`."""
    eos = sorted(alone.tokenizer.eos_token_ids)  # type: ignore[union-attr]
    for fields in (
        {"guided_regex": "a", "min_tokens": 2, "stop_token_ids": alone.tokenizer.encode("a")},  # type: ignore[union-attr]
        {"allowed_token_ids": eos, "min_tokens": 2},
        {"guided_regex": "a", "allowed_token_ids": eos},
        {"guided_regex": "a", "bad_words": ["a"]},
    ):
        for path, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
            body = {"model": "m", "max_tokens": 9} | prompt | fields
            answer = httpx.post(f"{real.url}/v1/{path}", json=body, timeout=30)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "parameters_failed")
            assert "must leave a token to draw" in error["message"]
            stream = httpx.post(f"{real.url}/v1/{path}", json=body | {"stream": True}, timeout=30).text
            last = json.loads(stream.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["type"] == "invalid_request_error"


def test_a_chat_template_of_the_callers(tmp_path: Path) -> None:
    model, template = make_family(tmp_path / "m", "xml"), tmp_path / "own.jinja"
    template.write_text("{{- 'own ' ~ messages[0].content -}}")
    engine = ScriptedEngine(Tokenizer(model))
    with running(engine, model, chat_template=template) as server:
        client_of(server).chat.completions.create(model="m", messages=MESSAGES)
        tools: Any = [WEATHER]
        with pytest.raises(openai.BadRequestError, match="the checkpoint's chat template takes no tools"):
            client_of(server).chat.completions.create(model="m", messages=MESSAGES, tools=tools)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == f"own {MESSAGES[0]['content']}"


def test_models_tokenize_and_the_rest(real: Running, alone: Engine) -> None:
    client = client_of(real)
    assert [one.id for one in client.models.list()] == ["m", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none/such")
    ids = alone.tokenizer.encode("def f(): pass")  # type: ignore[union-attr]
    answer = httpx.post(f"{real.url}/tokenize", json={"prompt": "def f(): pass"}).json()
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    chat = httpx.post(f"{real.url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == alone.tokenizer.encode(alone.tokenizer.apply_chat_template(MESSAGES))  # type: ignore[union-attr]
    assert httpx.get(f"{real.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{real.url}/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{real.url}/v1/completions").status_code == 405


def test_metrics_count(scripted: Any) -> None:
    server, engine, _ = scripted

    def value(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = value("compiled_mtp_output_tokens_total")
    engine.say("one two three four five six seven", chunk=4)
    client_of(server).chat.completions.create(model="m", messages=MESSAGES)
    assert value("compiled_mtp_output_tokens_total") - before == len(engine.script)
    assert value('compiled_mtp_requests_finished_total{reason="stop"}') > 0
    assert value('compiled_mtp_responses_total{path="/v1/chat/completions",status="200"}') > 0
    assert value('compiled_mtp_accepted_tokens_total{index="3"}') > 0
    assert value("compiled_mtp_time_to_first_token_seconds_count") > 0
    assert value("compiled_mtp_inter_token_latency_seconds_count") > 0
    assert value("compiled_mtp_engine_blocks_total") == 64
    assert value('compiled_mtp_rounds_total{depth="3",why="best"}') == 5


def test_only_one_call_without_parallel_calls(scripted: Any) -> None:
    """The engine gets a grammar of one call, which takes no second call."""
    server, engine, form = scripted
    call = "<tool_call>" + CALLS[form].partition("<tool_call>")[2]
    engine.say(call)
    create: Any = client_of(server).chat.completions.create
    fields: Any = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    asked = ({}, {"extra_body": {"parallel_tool_calls": None}}, {"parallel_tool_calls": False})
    for options, is_parallel in zip(asked, (True, True, False), strict=True):
        assert len(create(**fields, **options).choices[0].message.tool_calls) == 1
        check_forced_calls(engine, form, call, is_parallel)
