"""Qwen3-0.6B and Llama-3.2-1B whole, with random weights, on CUDA: `test_engine_model_shapes` again."""

import gc

import pytest
import torch

from engine.model_shapes import SHAPES, Checkpoint, config_of
from engine.test_engine_model_shapes import *  # noqa: F403

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request, tmp_path_factory, device):
    """The whole model, made on the device, saved by transformers and loaded by our loader."""
    directory = tmp_path_factory.mktemp(request.param)
    yield Checkpoint.make(directory, config_of(request.param, scaled=False), device)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    gc.collect()
    torch.cuda.empty_cache()
