"""No body breaks the service: malformed bodies, and bodies made by schemathesis from the document."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.server.serving import Running, ScriptedEngine, make_family, running

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_family(tmp_path_factory.mktemp("family") / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("one two three")
    with running(engine, model) as found:
        yield found


def good_body(path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m"} if path != "/tokenize" else {}
    if path == "/v1/completions":
        return body | {"prompt": "x", "max_tokens": 3}
    if path == "/v1/responses":
        return body | {"input": "x", "max_output_tokens": 3}
    body |= {"messages": [{"role": "user", "content": "x"}]}
    return body if path in ("/tokenize", "/v1/messages/count_tokens") else body | {"max_tokens": 3}


def malformed(rng: random.Random, path: str) -> bytes:
    """Return a body that no API takes."""
    body = good_body(path)
    text = json.dumps(body).encode()
    main = next(name for name in ("prompt", "input", "messages") if name in body)
    wrong: list[Any] = [
        True, 3, {}, [[]], [None], {"a": [1]}, [{"role": 1}], [{"role": "user", "content": 7}], [[1, "a"]]
    ]  # fmt: skip
    choice = rng.randrange(9)
    if choice == 0:  # cut off
        return text[: rng.randrange(1, len(text))]
    if choice == 1:  # broken UTF-8, inside a string
        return text.replace(b'"x"', b'"\xff' + bytes([rng.randrange(128, 256)]) + b'"')
    if choice == 2:  # deep
        depth = rng.choice((300, 5000, 100_000))
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        inside = opening * depth + b"1" + closing * depth
        return text.replace(b'"x"', inside) if rng.random() < 0.5 else inside
    if choice == 3:  # huge numbers
        number = rng.choice(("9" * 50, "9" * 5000, "-" + "9" * 20, "1e999", "-1e400"))
        return json.dumps(body | {"max_tokens": 0, "n": 0, "zzz": 0}).replace(": 0", f": {number}").encode()
    if choice == 4:  # required fields of wrong types
        return json.dumps(body | {main: rng.choice(wrong)}).encode()
    if choice == 5:  # unknown names
        return json.dumps(body | {"".join(rng.choices("abz_\u00e9\n", k=9)) + "!": 1}).encode()
    if choice == 6:  # bytes replaced by some that JSON never holds
        at = rng.randrange(len(text))
        return text[:at] + bytes([rng.choice((0, 1, 0x1F, 0xC0, 0xFF))]) + text[at + 1 :]
    if choice == 7:  # half of a surrogate pair
        return text.replace(b'"x"', b'"\\ud8' + f"{rng.randrange(256):02x}".encode() + b'"')
    return rng.choice((b"", b"null", b"[]", b'"x"', b"1", b"NaN", b"{}}", text + text, b"{'model': 'm'}"))


@pytest.mark.parametrize("num_bodies", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_malformed_bodies(server: Running, num_bodies: int) -> None:
    rng = random.Random(0)
    memory = 0
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}) as client:
        for index in range(num_bodies):
            path = PATHS[index % len(PATHS)]
            body = malformed(rng, path)
            answer = client.post(path, content=body)
            assert 400 <= answer.status_code < 500, (path, body[:200], answer.text)
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 3000
            if index == num_bodies // 5:
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown_kb < 50_000
        for path in PATHS:
            assert client.post(path, json=good_body(path)).status_code == 200
        assert client.get("/health").status_code == 200
    assert server.service.engine.num_open == 0


@pytest.mark.parametrize("num_cases", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_the_document_and_what_it_allows(server: Running, num_cases: int) -> None:
    """No 5xx for anything that the document allows."""
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert set(PATHS) <= set(document["paths"])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    seen: set[int] = set()

    def check(case: Any) -> None:
        answer = case.call(timeout=30)
        seen.add(answer.status_code)
        assert answer.status_code < 500, (case.body, answer.text)

    bounded = settings(
        max_examples=num_cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in schema.get_all_operations():
        bounded(given(case=operation.ok().as_strategy())(check))()
    assert {200, 404} <= seen
