"""The memory of a long prompt's step on a GPU: little more than what is alive at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import H200
from ostinato.kernels.linear import choice
from ostinato.models.config import ModelConfig
from ostinato.models.mixing import StepAttention
from ostinato.models.transformer import Transformer

from .simulated_pool import MIB, Pool, PooledAllocations

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"


def test_the_pool_cuts_and_joins_blocks() -> None:
    pool = Pool()
    large = pool.allocate(200 * MIB)
    pool.release(large)
    first, second = pool.allocate(32 * MIB), pool.allocate(32 * MIB)
    assert pool.bytes == 200 * MIB, "both were cut out of the large one"
    pool.allocate(200 * MIB)
    assert pool.bytes == 400 * MIB, "which is not whole any more"
    pool.release(first)
    pool.release(second)
    pool.allocate(190 * MIB)
    assert pool.bytes == 400 * MIB, "but is again once they are gone"


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "gpu_of", lambda _: H200)
    monkeypatch.setattr(compiled, "is_supported", lambda _: True)
    choice.use_table(None)
    yield
    choice.use_table(None)


def allocations_of(shape: str, num_tokens: int) -> PooledAllocations:
    """Of a step through six layers."""
    config = ModelConfig.load(SHAPES / shape)
    heads = config.num_heads, config.head_dim

    def attend_rows(layer: int, rows: torch.Tensor, _: Any) -> torch.Tensor:
        queries = rows.new_empty(num_tokens, *heads)
        return torch.empty_like(queries)

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("the model starts from rows")

    with FakeTensorMode(), torch.no_grad():
        model = Transformer(config, device="cuda", dtype=torch.bfloat16, max_positions=8192)
        ids = torch.empty(num_tokens, dtype=torch.int64, device="cuda")
        model._run = range(6)
        with PooledAllocations([*model.parameters(), *model.buffers(), ids]) as allocations:
            model(ids, ids, StepAttention(refuse, attend_rows))
    return allocations


@pytest.mark.parametrize(("shape", "most_mib"), [("llama-3.1-8b", 376), ("llama-3.2-1b", 208)])
def test_no_block_is_there_twice(shape: str, most_mib: int) -> None:
    """A second one for gate and up made graphs of the 8B a third larger than they are."""
    allocations = allocations_of(shape, 3840)
    assert allocations.most_alive >= 0.8 * most_mib * MIB
    assert allocations.pool.bytes <= most_mib * MIB


@pytest.mark.parametrize(("shape", "most_mib"), [("llama-3.1-8b", 288), ("llama-3.2-1b", 152)])
def test_a_larger_step_that_never_makes_gate_and_up_takes_less(shape: str, most_mib: int) -> None:
    """Which is why a rehearsal tries both."""
    allocations = allocations_of(shape, 4096)
    assert allocations.pool.bytes <= most_mib * MIB
    assert allocations.pool.bytes < allocations_of(shape, 3840).most_alive
