"""What SGLang's `/generate` is sampled with if a request does not say: nothing of the model's own."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.server.config import ServerConfig
from ostinato.server.engine_process.main import _ready
from ostinato.server.openai.completions import completions_of
from ostinato.server.openai.requests import CompletionRequest
from ostinato.server.openai.served_model import ServedModel
from ostinato.server.sglang.generate import generations_of
from ostinato.server.sglang.requests import GenerateRequest

OWN = {"temperature": 0.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3, "max_new_tokens": 9}
PREFERRED = {"top_p": 0.5, "max_new_tokens": 7}


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = shutil.copytree(model, tmp_path_factory.mktemp("own") / "model")
    (directory / "generation_config.json").write_text(json.dumps(OWN))
    options = {"max_model_len": 256, "num_pages": 20, "cuda_graph_mode": "none"}
    with LLM(str(directory), override_generation_config=PREFERRED, **options) as llm:
        yield llm


def params_of(llm: LLM, body: GenerateRequest | CompletionRequest) -> SamplingParams:
    async def asked() -> SamplingParams:
        model = ServedModel("own", _ready(llm, {}), ServerConfig(), llm.engine.tokenizer)
        try:
            of: Any = generations_of if isinstance(body, GenerateRequest) else completions_of
            [completion] = await of(body, model, 0, lambda *_: None)
            return completion.params
        finally:
            model.close()

    return asyncio.run(asked())


def test_files_of_the_model_count_for_openais_api_alone(llm: LLM) -> None:
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "max_tokens")
    for body, expected in (
        (CompletionRequest(prompt="a"), (0.3, 5, 0.5, 1.3, 16)),
        (GenerateRequest(text="a"), (1.0, 0, 0.5, 1.0, 7)),
        (
            GenerateRequest(
                text="a", sampling_params={"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 3}
            ),
            (0.7, 0, 1.0, 1.0, 3),
        ),
    ):
        params = params_of(llm, body)
        assert tuple(getattr(params, name) for name in names) == expected
