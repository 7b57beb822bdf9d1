"""litellm: chat, stream, a strict tool, an answer of a schema, responses, embeddings."""

import json
import os
import sys
from typing import Literal

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the web for prices

import litellm
import pydantic
from openai import pydantic_function_tool

URL = sys.argv[1] + "/v1"
NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}
COMMON = {"model": "openai/scripted", "api_base": URL, "api_key": "none", "temperature": 0}
HELLO = [{"role": "user", "content": "Say hello"}]


class get_weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str


class Pet(pydantic.BaseModel):
    kind: Literal["cat"]
    tame: bool


answer = litellm.completion(messages=HELLO, **COMMON)
assert answer.choices[0].message.content == "Hello wérld", answer

chunks = litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **COMMON)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello wérld"

tool = pydantic_function_tool(get_weather)
assert tool["function"]["strict"] is True
choice = litellm.completion(messages=HELLO, tools=[tool], tool_choice="auto", **COMMON).choices[0]
[call] = choice.message.tool_calls
assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
assert json.loads(call.function.arguments) == {"city": "Paris"}
history = [
    *HELLO,
    choice.message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
answer = litellm.completion(messages=history, tools=[tool], **COMMON)
assert answer.choices[0].message.content == "Hello wérld", answer

answer = litellm.completion(messages=HELLO, response_format=Pet, logit_bias=NO_SPACE, max_tokens=60, **COMMON)
assert Pet.model_validate_json(answer.choices[0].message.content).kind == "cat"

response = litellm.responses(input="Say hello", **COMMON)
assert response.output[0].content[0].text == "Hello wérld", response

vectors = litellm.embedding(input=["a"], model="openai/scripted", api_base=URL, api_key="none")
assert len(vectors.data) == 1
