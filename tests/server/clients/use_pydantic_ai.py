"""pydantic-ai: an agent with a tool, and one with an output type, over chat and over responses."""

import sys
from typing import Literal

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}
PROVIDER = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="none")
ASKED = []


class Pet(pydantic.BaseModel):
    kind: Literal["cat"]
    tame: bool


def get_weather(city: str) -> str:
    """The weather in a city."""
    ASKED.append(city)
    return "sunny"


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("scripted", provider=PROVIDER)
    one_call = {"temperature": 0, "parallel_tool_calls": False}
    agent = Agent(model, tools=[get_weather], model_settings=one_call)
    assert agent.run_sync("The weather?").output == "Hello wérld"
    assert ASKED == ["Paris"]
    ASKED.clear()

    settings = {"temperature": 0, "max_tokens": 80, "extra_body": {"logit_bias": NO_SPACE}}
    for output in (NativeOutput(Pet), Pet):  # a format, and a tool that must be called
        found = Agent(model, output_type=output, model_settings=settings).run_sync("A pet.").output
        assert found.kind == "cat", (model, output)
