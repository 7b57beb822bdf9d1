"""The default model, with real weights, behind a server."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .imported_late import openai
from .server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of a server that was told of no model: it takes SmolLM2, fetched first where it is not there."""
    flags = ("--port", "0", "--max-model-len", "512", "--max-running-requests", "4")
    with ServerProcess(None, *flags, bare=True, start_seconds=300) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    model = client.models.list().data[0].id
    options = {"model": model, "messages": question, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**options)
    assert "Paris" in whole.choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**options, stream=True)
    ]
    assert "".join(pieces) == whole.choices[0].message.content


def test_it_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "London", "Rome"]},
            "country": {"enum": ["France", "Italy"]},
        },
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "The capital of France and its country, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        temperature=0,
        max_tokens=60,
    )
    assert json.loads(answer.choices[0].message.content)["city"] == "Paris"


def test_out_of_the_box_it_answers_what_the_readme_asks(client: openai.OpenAI) -> None:
    [body] = re.findall(r"-d '(\{.*?\})'", (Path(__file__).parents[2] / "README.md").read_text())
    answer = httpx.post(f"{client.base_url}chat/completions", json=json.loads(body), timeout=300).json()
    assert "The capital of France is Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_out_of_the_box_it_does_not_repeat_itself_for_ever(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    def answered(question: str) -> openai.types.chat.ChatCompletion:
        messages = [{"role": "user", "content": question}]
        return client.chat.completions.create(model=model, messages=messages)

    with ThreadPoolExecutor() as threads:
        questions = ("Tell me a story about a cat.", "Tell me about the history of Rome.")
        for answer in threads.map(answered, questions):
            sentences = Counter(re.split(r"(?<=[.!?])\s+", answer.choices[0].message.content))
            assert sentences.most_common(1)[0][1] <= 3, sentences
            assert answer.usage.completion_tokens <= 400
