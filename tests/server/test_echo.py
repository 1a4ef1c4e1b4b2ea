"""Completions that repeat their prompts: text, token ids and log probabilities of prompt and output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from tests.server.serving import CHECKPOINT, Running, running

TEXT = "def quicksort(items):\n    return"


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """A separate engine that gives the expected tokens and log probabilities."""
    with Engine(EngineConfig(device="cpu")) as engine:
        yield engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len) as server:
        yield server


def post(server: Running, **fields: Any) -> Any:
    body = {"model": "m", "temperature": 0, "max_tokens": 5} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("kind", ["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_log_probabilities_of_prompt_and_output(
    server: Running, alone: Engine, kind: str, max_tokens: int
) -> None:
    tokenizer = alone.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=max(max_tokens, 1), temperature=0, logprobs=2, prompt_logprobs=2)
    (expected,) = alone.generate([ids], params)
    prompt = TEXT if kind == "text" else ids
    answer = post(server, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, return_token_ids=True)
    (choice,) = answer["choices"]
    output = expected.new_token_ids[:max_tokens]
    assert choice["text"] == TEXT + (expected.new_text if max_tokens else "")
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (output, ids)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]
    texts = [tokenizer.token_bytes(token_id).decode() for token_id in ids + output]
    assert found["tokens"] == texts
    assert "".join(texts) == choice["text"]
    assert found["text_offset"] == list(accumulate(map(len, texts[:-1]), initial=0))
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    entries = [*(expected.prompt_logprobs or ()), *(expected.logprobs or ())[:max_tokens]]
    assert found["token_logprobs"][1:] == [entry.logprob for entry in entries]
    for top, entry in zip(found["top_logprobs"][1:], entries, strict=True):
        assert top == {one.bytes.decode(): one.logprob for one in entry.top}


def test_such_requests_skip_cached_prefixes_and_get_the_same_numbers(server: Running) -> None:
    prompt = [5, 6, 7] * 60
    first = post(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    post(server, prompt=prompt)
    again = post(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert again["choices"][0]["logprobs"] == first["choices"][0]["logprobs"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert post(server, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_echo_without_log_probabilities_is_text_alone(server: Running) -> None:
    answer = post(server, prompt=["a b", TEXT], echo=True, n=1)
    plain = post(server, prompt=["a b", TEXT])
    for prompt, echoed, choice in zip(["a b", TEXT], answer["choices"], plain["choices"], strict=True):
        assert echoed["text"] == prompt + choice["text"]
        assert echoed["logprobs"] is None
        assert "prompt_token_ids" not in echoed


def test_several_choices_echo_their_own_prompts(server: Running) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 3, "n": 2, "echo": True, "logprobs": 0}
    answer = post(server, prompt=["a b", "c"], prompt_logprobs=1, **fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"][:3] for choice in answer["choices"]]
    assert texts[0] == texts[1] == "a b"
    for choice in answer["choices"]:
        prompt_len = len(choice["prompt_logprobs"])
        assert len(choice["logprobs"]["tokens"]) == prompt_len + 5
        # logprobs 0 lists the tokens alone, prompt_logprobs 1 the likeliest too.
        assert choice["logprobs"]["top_logprobs"][1:prompt_len] == [{}] * (prompt_len - 1)
        assert all(len(one) in (1, 2) for one in choice["prompt_logprobs"][1:])


def test_no_output_is_for_requests_about_their_prompts(server: Running) -> None:
    answer = post(server, prompt=TEXT, max_tokens=0, prompt_logprobs=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["logprobs"] is None
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    create: Any = client.completions.create
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, got 0"):
        create(model="m", prompt=TEXT, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="echo must be left out of a stream, got True"):
        create(model="m", prompt=TEXT, echo=True, stream=True)
    messages = [{"role": "user", "content": "x"}]
    chat: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="echo must be false, got True"):
        chat(model="m", messages=messages, extra_body={"echo": True})
