"""instructor: models of pydantic out of tools, strict tools and JSON schemas."""

import sys
from typing import Literal

import instructor
import openai
import pydantic

NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Literal["cat"]
    tame: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model="scripted",
        response_model=Pet,
        messages=[{"role": "user", "content": "A pet."}],
        temperature=0,
        max_tokens=80,
        max_retries=0,
        logit_bias=NO_SPACE,
    )
    assert found.kind == "cat", (mode, found)
