"""langchain-openai: chat, stream, strict tools, structured output, over both APIs; embeddings."""

import sys
from typing import Literal

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL = sys.argv[1] + "/v1"
NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Literal["cat"]
    tame: bool


for responses in (False, True):
    chat = ChatOpenAI(
        base_url=URL, api_key="none", model="scripted", temperature=0, use_responses_api=responses
    )
    assert chat.invoke("Say hello").text == "Hello wérld"
    assert "".join(chunk.text for chunk in chat.stream("Say hello")) == "Hello wérld"

    for options in ({}, {"strict": True}, {"strict": True, "parallel_tool_calls": False}):
        bound = chat.bind_tools([get_weather], **options)
        asked = HumanMessage("The weather?")
        answer = bound.invoke([asked])
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        told = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        assert bound.invoke([asked, answer, told]).text == "Hello wérld"

    quiet = {"extra_body": {"logit_bias": NO_SPACE}} if responses else {"logit_bias": NO_SPACE}
    careful = ChatOpenAI(
        base_url=URL,
        api_key="none",
        model="scripted",
        temperature=0,
        max_tokens=80,
        use_responses_api=responses,
        **quiet,
    )
    for method in ("json_schema", "function_calling"):
        found = careful.with_structured_output(Pet, method=method, strict=True).invoke("A pet.")
        assert isinstance(found, Pet), (responses, method, found)

embeddings = OpenAIEmbeddings(
    base_url=URL, api_key="none", model="scripted", dimensions=100, check_embedding_ctx_length=False
)
assert len(embeddings.embed_query("ab")) == 100
