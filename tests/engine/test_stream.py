"""One request as an iterator, with others running; `generate` of chats and generators; `with` an engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.frontend.prompts import as_prompts, match_params
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of, run_to_end

VOCAB = 512
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stream")
    write_checkpoint(directory, tokenizer=True, hidden_size=64, num_value_heads=1, intermediate_size=64)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, mtp_step=3, max_batch=4)


def tokens_of(outputs: list[RequestOutput] | Iterator[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_a_stream_gives_the_output_of_generate_in_parts(engine: Engine) -> None:
    (whole,) = engine.generate(["return"], PARAMS)
    outputs = list(engine.stream("return", PARAMS))
    assert tokens_of(outputs) == whole.new_token_ids
    assert "".join(output.new_text for output in outputs) == whole.new_text
    assert len(outputs) > 2
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "length"
    assert not engine.has_unfinished_requests()
    chat = list(engine.stream(messages=CHAT, params=PARAMS))
    assert tokens_of(chat) == tokens_of(engine.stream("hello", PARAMS))
    ids = prompt_of(20, 1, VOCAB)
    assert tokens_of(engine.stream(prompt_token_ids=ids, params=PARAMS)) == tokens_of(
        engine.generate([ids], PARAMS)
    )


def test_streams_of_several_choices_end_with_the_last(engine: Engine) -> None:
    params = PARAMS.model_copy(update={"n": 3})
    outputs = list(engine.stream("return", params))
    for index, whole in enumerate(engine.generate(["return"], params)):
        assert tokens_of([one for one in outputs if one.index == index]) == whole.new_token_ids


def test_streams_and_steps_take_turns_and_take_only_their_own_outputs(engine: Engine) -> None:
    names = ["return", "def", "quick"]
    expected = [output.new_token_ids for output in engine.generate(names, PARAMS)]
    one, other = engine.stream(names[0], PARAMS), engine.stream(names[1], PARAMS)
    mine = engine.add_request(names[2], PARAMS)
    got: list[list[int]] = [[], [], []]
    for turn in range(4):
        got[turn % 2] += next(one if turn % 2 == 0 else other).new_token_ids
        outputs = engine.step()
        assert {output.request_id for output in outputs} <= {mine}
        got[2] += tokens_of(outputs)
    # Outputs that the streams have not taken yet do not keep the loop of steps going.
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert {output.request_id for output in outputs} <= {mine}
        got[2] += tokens_of(outputs)
    got[0] += tokens_of(one)
    got[1] += tokens_of(other)
    assert got == expected


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_random_turns(checkpoint: Path, engine: Engine, seed: int) -> None:
    """Streams that begin, go on and are closed, requests, steps and calls of generate, in any order."""
    rng = random.Random(seed)
    prompts = [prompt_of(6 + index, index, VOCAB) for index in range(6)]
    expected = [output.new_token_ids for output in engine.generate(prompts, PARAMS)]
    mixed = make_engine(checkpoint, mtp_step=rng.choice([0, 3]), max_batch=3)
    streams: dict[int, tuple[int, Generator[RequestOutput, None, None], list[int]]] = {}
    mine: dict[str, tuple[int, list[int]]] = {}

    def take_step() -> None:
        for output in mixed.step():
            mine[output.request_id][1].extend(output.new_token_ids)

    for turn in range(60):
        which = rng.randrange(6)
        match rng.choice(["begin", "next", "next", "next", "leave", "add", "step", "step", "generate"]):
            case "begin":
                stream = mixed.stream(prompt_token_ids=prompts[which], params=PARAMS)
                streams[turn] = which, stream, []
            case "next" if streams:
                _, stream, tokens = rng.choice(list(streams.values()))
                tokens += tokens_of([output for output in [next(stream, None)] if output is not None])
            case "leave" if streams:
                streams.pop(rng.choice(list(streams)))[1].close()
            case "add":
                mine[mixed.add_request(prompt_token_ids=prompts[which], params=PARAMS)] = which, []
            case "step":
                take_step()
            case "generate" if turn % 3 == 0:
                assert tokens_of(mixed.generate([prompts[which]], PARAMS)) == expected[which]
    while mixed.has_unfinished_requests():
        take_step()
    for which, stream, tokens in streams.values():
        assert tokens + tokens_of(stream) == expected[which]
    assert all(tokens == expected[which] for which, tokens in mine.values())
    mixed.step()
    assert (mixed.stats().blocks_used, mixed._inbox.streams) == (0, {})


def test_a_closed_stream_ends_its_request_with_the_next_step(engine: Engine) -> None:
    stream = engine.stream("return", PARAMS)
    next(stream)
    stream.close()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert engine.stats().blocks_used == 0
    assert engine._inbox.streams == {}
    unused = engine.stream("return", PARAMS)
    assert not engine.has_unfinished_requests()
    del unused


def test_a_refused_stream_leaves_no_request(engine: Engine) -> None:
    for arguments in ({}, {"prompt": "x", "messages": CHAT}, {"prompt": ""}):
        with pytest.raises(ValueError, match=r"^(prompt|prompt, prompt_token_ids and messages) must"):
            next(engine.stream(**arguments))  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_the_id_of_an_ended_stream_may_be_used_again(engine: Engine) -> None:
    *_, last = engine.stream("return", PARAMS)
    engine.add_request("return", PARAMS, request_id=last.request_id)
    tokens = run_to_end(engine)
    assert tokens == {last.request_id: tokens_of(engine.stream("return", PARAMS))}


def test_the_id_of_an_open_stream_is_refused_after_its_request_has_ended(engine: Engine) -> None:
    stream = engine.stream("return", PARAMS)
    name = next(stream).request_id
    while engine.scheduler.is_live(name):
        engine.step()
    with pytest.raises(ValueError, match=f"^request_id must be unused, got '{name}'"):
        engine.add_request("return", PARAMS, request_id=name)
    stream.close()
    with pytest.raises(ValueError, match="must be unused"):
        engine.add_request("return", PARAMS, request_id=name)
    engine.step()
    engine.add_request("return", PARAMS, request_id=name)
    assert len(run_to_end(engine)[name]) == PARAMS.max_tokens


def test_a_second_thread_that_streams_gets_an_error(engine: Engine) -> None:
    caught: list[Exception] = []

    def intrude() -> None:
        try:
            next(engine.stream("def", PARAMS))
        except ValueError as error:
            caught.append(error)

    engine._turn.take()
    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    engine._turn.leave()
    assert "must be stepped, asked to generate and closed by one thread at a time" in str(caught[0])
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


def test_generate_takes_generators_and_messages(engine: Engine) -> None:
    names = ["return", "def"]
    expected = [output.new_token_ids for output in engine.generate(names, PARAMS)]
    params = (PARAMS for _ in names)
    assert [o.new_token_ids for o in engine.generate((name for name in names), params)] == expected
    (one,) = engine.generate(messages=CHAT, params=PARAMS)
    two = engine.generate(messages=[CHAT, CHAT], params=PARAMS)
    (text,) = engine.generate(["hello"], PARAMS)
    assert [o.new_token_ids for o in (one, *two)] == [text.new_token_ids] * 3
    for arguments, message in (
        ({}, "prompts and messages must be given exactly once, got neither; choose one"),
        ({"prompts": [], "messages": CHAT}, "prompts and messages must be given exactly once, got both"),
        ({"prompts": 5}, "prompts must be a list or a generator, got 5; put the prompts into a list"),
        # Iterating over a chat message would give its keys as prompts.
        (
            {"prompts": {"prompt": "a"}},
            "prompts must be a list or a generator, got {'prompt': 'a'}; put the prompts into a list",
        ),
        (
            {"prompts": CHAT},
            r"prompts\[0\]: prompt must be text, ids or a chat, got .*; give a chat as messa",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(**arguments)  # type: ignore[arg-type]
    assert engine.generate([]) == []


def test_generate_reports_how_many_requests_have_ended(engine: Engine) -> None:
    seen: list[tuple[str, int, int]] = []
    engine._progress = lambda *what: seen.append(what)
    params = [PARAMS.model_copy(update={"max_tokens": n}) for n in (2, 6, 10)]
    engine.generate(["return"] * 3, params)
    engine._progress = None
    assert seen == [("requests", 1, 3), ("requests", 2, 3), ("requests", 3, 3)]


def test_with_closes_an_engine(checkpoint: Path) -> None:
    with Engine(str(checkpoint)) as engine:
        assert engine.config.model == checkpoint
        assert len(engine.generate(["return"], PARAMS)[0].new_token_ids) == 12
    with pytest.raises(ValueError, match="engine must be open, got one that was closed"):
        engine.add_request("x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"messages": "hi"}, "messages must be a chat or a list of chats, got 'hi'; give"),
        ({"messages": ["hi", "yo"]}, "messages must be a chat or a list of chats, got 'hi'; give"),
        ({"messages": [[1, 2]]}, r"messages must be a chat or a list of chats, got \[1, 2\]; give"),
        ({"prompts": ["x"], "params": {"temperature": 0}}, "params must be SamplingParams or a list, got"),
        ({"prompts": ["x"], "params": [{"temperature": 0}]}, "params must be a SamplingParams, got"),
    ],
)
def test_wrong_chats_and_parameters_are_refused(call: dict[str, Any], message: str) -> None:
    def prepare() -> None:
        match_params(as_prompts(call.get("prompts"), call.get("messages")), call.get("params"))

    with pytest.raises(ValueError, match=f"^{message}"):
        prepare()
