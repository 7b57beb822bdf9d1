"""Embeddings on CUDA: the vectors of transformers, and nothing makes the host wait but the last vector."""

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.expected_steps import Setup
from engine.test_engine_embedding import expected_vector
from ostinato import LLM

SETUP = Setup(token_rungs=(8, 16, 32), budget=32, length=128, pages=64, ahead=1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_come_without_a_copy_that_waits(tmp_path, pooling, device):
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, "Llama")
    prompts = prompts_of((60, 3, 100, 16, 33, 1, 2, 90), seed=4)
    with LLM(model.directory, device="cuda", dtype="float32", **SETUP.options) as llm:
        llm.embed(prompts[:2], pooling=pooling)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = llm.embed(prompts, pooling=pooling)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = expected_vector(model.reference.model, prompt["prompt_token_ids"], pooling)
            assert torch.cosine_similarity(torch.tensor(output.embedding), expected, dim=0) > 0.9999
