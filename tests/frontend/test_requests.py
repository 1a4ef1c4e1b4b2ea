"""The request processor's requests: parameters, choices, chats and grammars, without a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.plan import SlotSampling
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.sampling.grammar import Matcher
from compiled_mtp.sampling.parameter_checks import choice_seed
from compiled_mtp.scheduler.inbox import Inbox
from compiled_mtp.scheduler.slot_sampling import slot_sampling
from tests.sampling.grammars import EOS, IM_END, MODEL, TOKENIZER, write_thinking_tokenizer
from tests.scheduling import make_scheduler

MAX_MODEL_LEN = 2048
CONFIG = read_model_config(MODEL)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
TEMPLATE = """
{%- for message in messages -%}
{{ message.content }}{% for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments|items %}{{ name }}={{ value }};{% endfor %}{% endfor %}
{%- endfor %}{% if tools %}[{{ tools[0].function.name }}]{% endif %}
{{- "<think>" if enable_thinking is not defined or enable_thinking else "<think></think>" }}"""


@pytest.fixture(scope="module")
def frontend() -> RequestProcessor:
    return RequestProcessor(MODEL, CONFIG, TOKENIZER, MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> RequestProcessor:
    """A checkpoint whose template opens a reasoning part and shows tools."""
    directory = tmp_path_factory.mktemp("thinker")
    write_thinking_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return RequestProcessor(directory, CONFIG, Tokenizer(directory), MAX_MODEL_LEN)


def make(frontend: RequestProcessor, prompt: str | None = "a", **fields: Any) -> list[Request]:
    messages = fields.pop("messages", None)
    return frontend.make_request(
        "r",
        SamplingParams(**fields),
        prompt=None if messages is not None else prompt,
        prompt_token_ids=None,
        messages=messages,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [9999]}, r"^stop_token_ids must lie in 0\.\.\d+, got 9999; "),
        ({"allowed_token_ids": [9999]}, r"^allowed_token_ids must lie in 0\.\.\d+, got 9999; "),
        ({"logit_bias": {"9999": 1}}, r"^logit_bias must lie in 0\.\.\d+, got 9999; "),
        ({"bad_words": ["word " * 40]}, r"^bad_words must be at most 16 tokens each, got 'word .*; give a"),
        ({"bad_words": [f"w{i}" for i in range(40)]}, r"^bad_words must make at most 64 sequences, got 80; "),
        ({"stop_token_ids": range(63), "min_tokens": 1}, r"^stop_token_ids must hold at most 64 .* got 65; "),
        (
            {"response_format": {"type": "xml"}},
            r"^response_format.type must be text, json_object or json_",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            r"^response_format.json_schema.schema must be a grammar that can be compiled, got: .*; simplify",
        ),
        ({"guided_regex": "("}, r"^guided_regex must be a grammar that can be compiled, got: "),
        ({"guided_choice": []}, r"^guided_choice must be a list of 1 to 4096 strings, got "),
        (
            {"guided_grammar": "start: nothing"},
            r"^guided_grammar must be a grammar that can be compiled, got",
        ),
        ({"tool_choice": "required"}, r"^tools must be a list of 1 to 128 tools where tool_choice asks"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, r"^tool_choice must be none, auto, required or name"),
        ({"chat_template_kwargs": {}}, r"^chat_template_kwargs must come with messages, got {}; "),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}},
            r"^chat_template_kwargs must not hold tools, got \[\]; pass tools as a field of its own",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            r"^messages\[0\].tool_calls\[0\].function.arguments must be a JSON object, got '\[1\]'; ",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    frontend: RequestProcessor, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(frontend, **fields)
    assert str(error.value).isprintable()


def test_without_a_tokenizer_what_needs_one_is_refused() -> None:
    frontend = RequestProcessor(MODEL, CONFIG, None, MAX_MODEL_LEN)

    def ask(**fields: Any) -> Request:
        params = SamplingParams(**fields)
        return frontend.make_request("r", params, prompt=None, prompt_token_ids=[5], messages=None)[0]

    for fields in ({"guided_regex": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(ValueError, match=f"^{next(iter(fields))} must .* has no tokenizer.json"):
            ask(**fields)
    assert ask(allowed_token_ids=[7], logprobs=2).params.allowed_token_ids == (7,)


def test_the_device_is_told_every_parameter(frontend: RequestProcessor) -> None:
    (request,) = make(
        frontend,
        "ab cd",
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias={"7": 2, 9: -3},
        allowed_token_ids=[30, 20, 30],
        min_tokens=4,
        stop_token_ids=[8],
        stop=["<|im_start|>", "x"],
        bad_words=["no"],
        logprobs=3,
        logprobs_mode="processed",
    )
    expected = SlotSampling(
        seed=3,
        temperature=0.5,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        bias=((7, 2.0), (9, -3.0)),
        allowed_ids=(20, 30),
        # Output token 4, counted from 0, is the first that may end the request.
        min_position=request.prompt_len + 4,
        stop_ids=(8, *EOS[:1], 4097, IM_END),
        bad_words=tuple(tuple(TOKENIZER.encode(text)) for text in ("no", " no")),
        prompt_ids=tuple(TOKENIZER.encode("ab cd")),
    )
    assert slot_sampling(request) == expected
    assert slot_sampling(make(frontend, temperature=0.5, seed=3)[0]) == SlotSampling(3, 0.5, 0, 1.0, 0.0)
    # With ignore_eos only the other stop ids are delayed.
    (request,) = make(frontend, ignore_eos=True, min_tokens=1, stop_token_ids=[8])
    assert slot_sampling(request).stop_ids == (8,)


def test_choices_share_an_id_and_have_seeds_and_grammars_of_their_own(frontend: RequestProcessor) -> None:
    choices = make(frontend, n=3, seed=-5, guided_regex="[ab]{2}")
    inbox = Inbox(make_scheduler(), seed=11)
    assert inbox.put(choices) == "r"
    assert [one.key for one in choices] == [("r", 0), ("r", 1), ("r", 2)]
    assert [one.history.seed for one in choices] == [choice_seed(-5, index) for index in range(3)]
    assert choices[0].history.seed == make(frontend, seed=-5)[0].history.seed
    assert len(inbox) == 3
    guides = [one.guide for one in choices]
    assert isinstance(guides[0], Matcher)
    assert len({id(guide) for guide in guides}) == 3
    (a,) = TOKENIZER.encode("a")
    for _ in range(2):
        guides[0].accept([a])
    assert [guide.is_ended for guide in guides if guide] == [True, False, False]
    # The engine's seed and arrival count requests, not choices.
    own = make(frontend, n=2)
    own[0].request_id = own[1].request_id = ""
    inbox.put(own)
    alone = Inbox(make_scheduler(), seed=11)
    single = make(frontend)
    for request in (replace_id(make(frontend)[0], "first"), single[0]):
        alone.put([request])
    assert own[0].history.seed == single[0].history.seed
    assert own[1].history.seed == choice_seed(single[0].history.seed, 1)


@pytest.mark.timeout(20)
def test_a_signal_may_add_and_abort_while_its_thread_does(frontend: RequestProcessor) -> None:
    scheduler = make_scheduler()
    inbox = Inbox(scheduler, seed=11)
    add, names = scheduler.add, iter(["second", "", "third"])
    added: list[Request] = []

    def interrupted(*choices: Request) -> None:
        """Run a signal handler inside `hand_over`, which holds the lock."""
        add(*choices)
        handler()

    def handler() -> None:
        for name in names:
            added.append(replace_id(make(frontend)[0], name))
            inbox.put([added[-1]])
        with suppress(ValueError):  # The second time an abort of the request is already queued.
            inbox.abort("third")

    scheduler.add = interrupted  # type: ignore[method-assign]
    first = make(frontend)
    inbox.put(first)
    inbox.hand_over()
    assert [one.request_id for one in added] == ["second", "request-1", "third"]
    assert len({one.history.seed for one in (*first, *added)}) == 4
    assert len(inbox) == 3
    inbox.hand_over()
    inbox.pass_aborts()
    assert [scheduler.is_live(name) for name in ("r", "second", "request-1", "third")] == [True] * 3 + [False]
    with pytest.raises(ValueError, match="request_id must be unused, got 'second'; choose another"):
        inbox.put([replace_id(make(frontend)[0], "second")])


def test_an_abort_of_a_handlers_request_is_not_taken_for_an_older_one(frontend: RequestProcessor) -> None:
    """The handler adds and aborts an id that its thread is about to take."""
    scheduler = make_scheduler()
    inbox, has_id = Inbox(scheduler, seed=1), scheduler.has_id
    theirs = replace_id(make(frontend)[0], "x")

    def interrupted(request_id: str) -> bool:
        is_taken = has_id(request_id)
        scheduler.has_id = has_id  # type: ignore[method-assign]
        inbox.put([theirs])
        inbox.abort("x")
        return is_taken

    scheduler.has_id = interrupted  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="request_id must be unused, got 'x'"):
        inbox.put([replace_id(make(frontend)[0], "x")])
    inbox.hand_over()
    inbox.pass_aborts()
    assert not scheduler.is_live("x")


def replace_id(request: Request, request_id: str) -> Request:
    request.request_id = request_id
    return request


def test_a_template_gets_tools_its_own_variables_and_arguments_as_objects(thinker: RequestProcessor) -> None:
    call = {"function": {"name": "add", "arguments": '{"x": 5}'}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]

    def text(**fields: Any) -> str:
        tokenizer = thinker.tokenizer
        assert tokenizer is not None
        (request,) = make(thinker, messages=messages, **fields)
        return tokenizer.decode(request.prompt_token_ids)

    assert text(tools=[TOOL]) == "gox=5;[add]<think>"
    assert text(chat_template_kwargs={"enable_thinking": False}) == "gox=5;<think></think>"
    assert messages[1]["tool_calls"] == [call]
    assert call["function"]["arguments"] == '{"x": 5}'


@pytest.mark.parametrize("is_thinking", [True, False])
def test_a_grammar_begins_after_the_reasoning_that_the_template_opened(
    thinker: RequestProcessor, is_thinking: bool
) -> None:
    tokenizer = thinker.tokenizer
    assert tokenizer is not None
    (request,) = make(
        thinker,
        messages=[{"role": "user", "content": "go"}],
        chat_template_kwargs={"enable_thinking": is_thinking},
        guided_choice=["yes", "no"],
    )
    guide = request.guide
    assert guide is not None
    thoughts = tokenizer.encode("I wonder</think>\n\n") if is_thinking else []
    answer = tokenizer.encode("yes")
    assert guide.accept([*thoughts, *answer, *answer]) == len(thoughts) + len(answer)
    assert guide.is_ended
    (request,) = make(thinker, messages=[{"role": "user", "content": "go"}], guided_choice=["yes"])
    assert request.guide is not None
    if not is_thinking:
        request.guide.accept(tokenizer.encode("</think>no"))
        assert request.guide.error is not None


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"guided_regex": "[0-9]{3}"}, "123"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            "<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_every_source_of_a_grammar_takes_what_it_allows(
    frontend: RequestProcessor, fields: dict[str, Any], output: str
) -> None:
    guide = make(frontend, **fields)[0].guide
    assert guide is not None
    ids = TOKENIZER.encode(output)
    assert guide.accept(ids) == len(ids)
    assert guide.error is None
    # If the grammar may end or continue, an eos token ends it.
    guide.accept([IM_END])
    assert guide.is_ended
    assert guide.error is None


def test_nothing_is_forced_without_being_asked(frontend: RequestProcessor) -> None:
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
    ):
        (request,) = make(frontend, **fields)  # type: ignore[arg-type]
        assert request.guide is None
        assert not request.is_two_phase


def test_an_eos_that_the_tokenizer_lacks_is_no_mistake_of_a_grammar() -> None:
    frontend = RequestProcessor(
        MODEL, replace(CONFIG, eos_token_ids=(IM_END, 4159)), TOKENIZER, MAX_MODEL_LEN
    )
    guide = make(frontend, guided_regex="a+")[0].guide
    assert guide is not None
    guide.accept([*TOKENIZER.encode("a"), IM_END])
    assert guide.is_ended


def test_a_family_writes_its_own_calls() -> None:
    frontend = RequestProcessor(MODEL, replace(CONFIG, family="qwen3_next"), TOKENIZER, MAX_MODEL_LEN)
    guide = make(frontend, tools=[TOOL], tool_choice="required")[0].guide
    assert guide is not None
    ids = TOKENIZER.encode('<tool_call>\n{"name": "add", "arguments": {"x": 5}}\n</tool_call>')
    assert guide.accept(ids) == len(ids)
