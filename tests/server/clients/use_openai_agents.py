"""openai-agents: an agent with a tool, streamed too, and one with an output type, over both APIs."""

import asyncio
import sys
from typing import Literal

import openai
import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}
CLIENT = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
set_tracing_disabled(True)
ASKED = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    ASKED.append(city)
    return "sunny"


class Pet(pydantic.BaseModel):
    kind: Literal["cat"]
    tame: bool


async def use(model: object) -> None:
    settings = ModelSettings(temperature=0, parallel_tool_calls=False, store=True)
    agent = Agent("weather", instructions="Help.", model=model, tools=[get_weather], model_settings=settings)
    assert get_weather.strict_json_schema
    result = await Runner.run(agent, "The weather?")
    assert result.final_output == "Hello wérld", result
    streamed = Runner.run_streamed(agent, "The weather?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == "Hello wérld"
    assert "run_item_stream_event" in kinds
    assert ASKED == ["Paris", "Paris"]
    ASKED.clear()
    careful = ModelSettings(temperature=0, max_tokens=80, extra_body={"logit_bias": NO_SPACE})
    agent = Agent("pets", model=model, output_type=Pet, model_settings=careful)
    assert (await Runner.run(agent, "A pet.")).final_output.kind == "cat"


async def main() -> None:
    await use(OpenAIChatCompletionsModel("scripted", CLIENT))
    await use(OpenAIResponsesModel("scripted", CLIENT))


asyncio.run(main())
