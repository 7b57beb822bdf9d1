"""A model that has no tokenizer is served by token ids."""

import json
from pathlib import Path

import pytest

from .scripted_model import write_scripted_model
from .server_process import ServerProcess


@pytest.mark.slow
def test_token_ids_in_and_out(tmp_path: Path) -> None:
    write_scripted_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    ids = {"prompt": [97], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    with ServerProcess(tmp_path) as server:
        [choice] = server.post("/v1/completions", ids).json()["choices"]
        assert (choice["token_ids"], choice["text"]) == ([98, 99, 100, 101], "")
        streamed = server.post("/v1/completions", {**ids, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice[
            "token_ids"
        ]
        for body, param in (
            ({"prompt": "a"}, "prompt"),
            ({**ids, "stop": "b"}, "stop"),
            ({**ids, "logprobs": 1}, "logprobs"),
            ({**ids, "response_format": {"type": "json_object"}}, "response_format"),
        ):
            refused = server.post("/v1/completions", body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 400
        assert server.post("/v1/embeddings", {"input": [[97]]}).status_code == 200
