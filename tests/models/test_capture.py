"""The forward pass can be captured: one recording serves every token and position."""

from pathlib import Path

import pytest
import torch

from ostinato.models.weights import load_model
from tape.tape_recording import record

from .small_models import dense_attend, saved_model


@pytest.mark.parametrize("family", ["llama-biases", "mistral-window", "qwen2", "qwen3"])
def test_a_replay_equals_the_eager_step_at_other_inputs(family: str, tmp_path: Path) -> None:
    saved_model(family, tmp_path)
    model = load_model(tmp_path)
    ids, positions = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    attend = dense_attend(model)

    def step() -> torch.Tensor:
        return model.logits(model(ids, positions, attend))

    recorded = record(step)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(0, 97, (8,), generator=generator))
        positions.copy_(torch.randint(0, 128, (8,), generator=generator))
        with torch.no_grad():
            expected = step()
        torch.testing.assert_close(recorded.replay(), expected, rtol=0, atol=1e-5)
