"""Models of transformers in a captured training step, as docs/training.md says to pass their inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from contract.training_loops import captured, same_parameters, twins

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WITHOUT_A_MASK = {"attention_mask": {"full_attention": None}, "use_cache": False}


def loss_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("family", "options"),
    [("Llama", {}), ("Mistral", {}), ("Qwen3", {}), ("Qwen3", WITHOUT_A_MASK), ("Qwen2", WITHOUT_A_MASK)],
)
def test_inputs_as_documented_are_trained_with_as_eagerly(family: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="in the dev extra")
    config = getattr(transformers, f"{family}Config")(**SHAPE)
    torch.manual_seed(1)
    ours, theirs = twins(getattr(transformers, f"{family}ForCausalLM")(config))
    step, optimizer = captured(ours, adamw(ours), loss_of), adamw(theirs)
    for number in range(4):
        ids = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(number))
        loss = loss_of(theirs(ids, **options), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step({"input_ids": ids, **options}, ids).item() == loss.item()
    assert sum(row.replays for row in step.report().graphs) == 3
    assert same_parameters(ours, theirs)
