"""Images from LangChain, over three APIs, and from LiteLLM, against a tiny checkpoint with a tower."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from compiled_mtp.request import SamplingParams
from tests.engines import make_engine
from tests.server.serving import Running, running
from tests.vision.checkpoints import picture, write_vision_checkpoint

pytestmark = pytest.mark.clients

FIELDS: dict[str, Any] = {"api_key": "none", "max_tokens": 8, "temperature": 0}


def png() -> bytes:
    stream = io.BytesIO()
    picture(96, 64).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str, int]]:
    """A service, and what an engine alone answers, with the tokens of the prompt."""
    directory = write_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    content = [{"type": "image", "image": png()}, {"type": "text", "text": "What is it?"}]
    (output,) = make_engine(directory, max_images=1, mtp_step=0).generate(
        messages=[{"role": "user", "content": content}], params=SamplingParams(max_tokens=8, temperature=0)
    )
    with running(make_engine(directory, max_images=2), directory) as server:
        yield server, output.new_text, output.metrics.prompt_tokens


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langchain_shows_an_image(seeing: tuple[Running, str, int], api: str) -> None:
    server, text, num_tokens = seeing
    fields = {"model": "m", "max_retries": 0, **FIELDS}
    if api == "anthropic":
        model: Any = ChatAnthropic(base_url=server.url, **fields)
    else:
        model = ChatOpenAI(base_url=f"{server.url}/v1", use_responses_api=api == "responses", **fields)
    image = {"type": "image", "base64": base64.b64encode(png()).decode(), "mime_type": "image/png"}
    message = HumanMessage([image, {"type": "text", "text": "What is it?"}])
    whole = model.invoke([message])
    assert (whole.text, whole.usage_metadata["input_tokens"]) == (text, num_tokens)
    assert "".join(chunk.text for chunk in model.stream([message])) == text


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_shows_an_image(seeing: tuple[Running, str, int], provider: str) -> None:
    server, text, num_tokens = seeing
    base = server.url + ("/v1" if provider == "openai" else "")
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    fields: dict[str, Any] = {"model": f"{provider}/m", "api_base": base, **FIELDS}
    answer = litellm.completion(messages=messages, **fields)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, num_tokens)
    chunks = list(litellm.completion(messages=messages, stream=True, **fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
