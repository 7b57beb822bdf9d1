"""The default model with its real weights: right answers, and transformers' tokens in every mode."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.sampling_params import SamplingParams
from ostinato.models.cache_folder import cache_folder

from .test_engine_greedy import MODES, assert_all_back, served

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are red,",
    "List five animals that live in Africa:",
    "In 1969, the first human",
    "To be or not to be,",
]
TOKENS = 64
HAS_MODEL = (cache_folder() / "downloads").is_dir() or os.environ.get("CI")
needs_model = pytest.mark.skipif(not HAS_MODEL, reason="the default model is not in the cache")


@needs_model
@pytest.mark.timeout(300)
def test_the_command_answers_paris() -> None:
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "ostinato", "generate", "What is the capital of France?"]
    command += ["--max-model-len", "128", "--cuda-graph-prefill-tokens", "64", "--max-tokens", "24"]
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "graphs, mode full-and-piecewise" in done.stderr


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """transformers' greedy tokens on the same weights."""
    import transformers

    from ostinato.models.locate import locate_model
    from ostinato.text.tokenizer import Tokenizer

    directory = locate_model()
    tokenizer = Tokenizer.from_directory(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        found[prompt] = out[0, ids.shape[1] :].tolist()
    return found


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 8},
        {"max_running_requests": 1},
        {"max_running_requests": 8, "enable_chunked_prefill": False, "num_pages": 14},
    ],
    ids=["batched", "one-by-one", "preempted"],
)
def test_tokens_equal_transformers(
    expected: dict[str, list[int]], mode: str, options: dict[str, Any]
) -> None:

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    shape = {"max_model_len": 96, "chunked_prefill_size": 32}
    with LLM(device="cpu", dtype="float32", cuda_graph_mode=mode, **{**shape, **options}) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert output.outputs[0].token_ids == expected[prompt], prompt
        assert served(llm) == MODES[mode]
        assert (llm.engine.core.scheduler.num_preemptions > 0) == ("num_pages" in options)
        assert_all_back(llm)
