"""Answers whose form depends on what was asked are as the OpenAPI document says."""

from typing import Any

import jsonschema
import pytest

from .server_process import ServerProcess

SAMPLING = {"temperature": 0, "max_new_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": SAMPLING}),
        ("/generate", {"text": ["a"], "sampling_params": SAMPLING}),
        ("/generate", {"text": "a", "sampling_params": {**SAMPLING, "n": 2}}),
        ("/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 2}),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 2}),
    ],
)
def test_an_answer_is_as_the_document_says(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    document = server.get("/openapi.json").json()
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**described, "components": document["components"]})
