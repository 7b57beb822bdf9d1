"""The default model with its real weights: right answers, and transformers' tokens in every mode."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.models.cache_folder import cache_folder

from .expected_steps import Setup, sampling_of, service_of
from .test_engine_greedy import MODES, assert_all_back, served

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never once seen "
    "the mountains. One evening a stranger knocked at his door and",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are red,",
    "List five animals that live in Africa, five that live in South America and five that live in the sea, "
    "with one sentence about each:",
    "In 1969, the first human",
    "To be or not to be, that is the question: whether it is nobler in the mind to suffer the slings and "
    "arrows of outrageous fortune, or",
]
TOKENS = 64
HAS_MODEL = (cache_folder() / "downloads").is_dir() or os.environ.get("CI")
needs_model = pytest.mark.skipif(not HAS_MODEL, reason="the default model is not in the cache")


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_answers_paris() -> None:
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "ostinato", "generate", "What is the capital of France?"]
    command += [
        "--max-model-len",
        "128",
        "--chunked-prefill-size",
        "64",
        "--cuda-graph-prefill-tokens",
        "64",
        "--max-tokens",
        "24",
    ]
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


CASES = {
    "batched": Setup(running=8, decode_rungs=(1, 2, 4, 8)),
    "one-by-one": Setup(running=1, decode_rungs=(1,)),
    "whole": Setup(running=8, decode_rungs=(2, 8), chunked=False),
    "preempted": Setup(running=8, decode_rungs=(4, 8), pages=20, caching=False),
}


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers(expected: dict[str, list[int]], mode: str, case: str) -> None:
    setup = replace(CASES[case], mode=mode, length=128, budget=32, token_rungs=(8, 32))
    if not setup.chunked:
        setup = replace(setup, token_rungs=(8, 128))
    if setup.caching:
        setup = replace(setup, pages=100)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = PROMPTS[:3] if case == "one-by-one" else PROMPTS
    with LLM(device="cpu", dtype="float32", **setup.options) as llm:
        for hits in (False, True) if setup.caching else (False,):
            before, before_sampling = service_of(llm), sampling_of(llm)
            outputs = llm.generate(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == expected[prompt], prompt
            lengths = [len(output.prompt_token_ids) for output in outputs]
            cached = [(length - 1) // 16 * 16 if hits else 0 for length in lengths]
            assert [output.num_cached_tokens for output in outputs] == cached
            assert sum(cached) > 0 or not hits
            steps = setup.steps(lengths, TOKENS, cached)
            assert service_of(llm).since(before) == setup.service(steps)
            assert sampling_of(llm).since(before_sampling) == setup.sampling(steps)
        assert served(llm) == MODES[mode]
        assert (llm.engine.core.scheduler.num_preemptions > 0) == (case == "preempted")
        assert_all_back(llm)
