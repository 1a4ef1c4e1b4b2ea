"""A session of an agent framework, openai-agents, against the checkpoint that ships (make clients)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.server.serving import Running

pytestmark = pytest.mark.clients
set_tracing_disabled(True)


class Forecast(BaseModel):
    """The end of the session."""

    city: Literal["Bern", "Oslo"]
    needs_umbrella: bool


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_an_agent_calls_its_tool_and_answers(served: Running, api: Any, is_streamed: bool) -> None:
    called = []

    @function_tool
    def get_weather(city: Literal["Bern", "Oslo"]) -> str:
        """Say what the weather is in a city."""
        called.append(city)
        return f"rain in {city}"

    async def session() -> Any:
        client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        # The small model never chooses to call: its first call is forced, then it answers in a given form.
        settings = ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0.0, max_tokens=200
        )
        agent = Agent(
            name="forecaster",
            instructions="Ask for the weather, then tell it.",
            tools=[get_weather],
            model=api(model="m", openai_client=client),
            model_settings=settings,
            output_type=Forecast,
        )
        if not is_streamed:
            return await Runner.run(agent, "Weather in Bern?")
        result = Runner.run_streamed(agent, "Weather in Bern?")
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(session())
    assert len(called) == 1
    assert isinstance(result.final_output, Forecast)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]


def test_a_session_continues_on_the_server(served: Running) -> None:
    async def session() -> list[str]:
        client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        model = OpenAIResponsesModel(model="m", openai_client=client)
        # The framework refuses an answer that its length cuts.
        settings = ModelSettings(temperature=0.0, max_tokens=64, extra_body={"stop": ["\n"]})
        agent = Agent(name="coder", instructions="Write Python.", model=model, model_settings=settings)
        first = await Runner.run(agent, "def add(a, b):")
        second = await Runner.run(agent, "def sub(a, b):", previous_response_id=first.last_response_id)
        stored = await client.responses.retrieve(second.last_response_id or "")
        return [str(first.last_response_id), str(stored.previous_response_id)]

    first, continued = asyncio.run(session())
    assert first == continued
