"""LangChain and LiteLLM, unmodified, against the checkpoint that ships (make clients)."""

from __future__ import annotations

from typing import Any, Literal

import litellm
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.server.serving import Running

pytestmark = pytest.mark.clients


@tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Say what the weather is in a city."""
    return f"rain in {city}"


class Answer(BaseModel):
    """A city."""

    city: Literal["Bern", "Oslo"]


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request: Any, served: Running) -> Any:
    """LangChain's model over one of three APIs."""
    fields: dict[str, Any] = {"model": "m", "api_key": "none", "max_retries": 0, "max_tokens": 200}
    fields["temperature"] = 0
    if request.param == "anthropic":
        return ChatAnthropic(base_url=served.url, **fields)
    return ChatOpenAI(base_url=f"{served.url}/v1", use_responses_api=request.param == "responses", **fields)


def test_langchain_answers_and_streams(model: Any) -> None:
    whole = model.invoke("def add(a, b):")
    assert whole.text
    assert 0 < whole.usage_metadata["output_tokens"] <= 200
    chunks = list(model.stream("def add(a, b):"))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_langchain_calls_tools(model: Any) -> None:
    question = HumanMessage("Weather in Bern?")
    answer = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == f"rain in {call['args']['city']}"
    last = model.bind_tools([get_weather]).invoke([question, answer, result])
    assert last.usage_metadata["output_tokens"] > 0


def test_langchain_parses_structured_output(model: Any) -> None:
    structured = model.with_structured_output(Answer, method="json_schema")
    assert structured.invoke("Which city?").city in ("Bern", "Oslo")


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_completes(served: Running, provider: str) -> None:
    base = served.url + ("/v1" if provider == "openai" else "")
    fields: dict[str, Any] = {"model": f"{provider}/m", "api_base": base, "api_key": "none", "max_tokens": 16}
    messages = [{"role": "user", "content": "def add(a, b):"}]
    answer = litellm.completion(messages=messages, **fields)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16
    chunks = list(litellm.completion(messages=messages, stream=True, **fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_litellm_uses_responses(served: Running) -> None:
    fields: dict[str, Any] = {"api_base": f"{served.url}/v1", "api_key": "none", "max_output_tokens": 16}
    first = litellm.responses(model="openai/m", input="def add(a, b):", **fields)
    assert first.output
    again = litellm.responses(
        model="openai/m", input="def sub(a, b):", previous_response_id=first.id, stream=True, **fields
    )
    assert [event.type for event in again][-1] in ("response.completed", "response.incomplete")
