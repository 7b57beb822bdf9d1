"""The launches of a step in each form are those that were recorded, in order, on the same operands.

`PYTHONPATH=src:tests python -m models.test_launches` records them again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import H200, Gpu
from ostinato.kernels.linear import choice, products
from ostinato.kernels.linear.rules import tile_by_rule
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import (
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    SkinnyTile,
    Tile,
    WideTile,
)
from ostinato.kernels.lora import Adapters, Rows, Stack
from ostinato.models.config import ModelConfig
from ostinato.models.layers import Linear
from ostinato.models.mixing import StepAttention
from ostinato.models.transformer import Transformer

from .launch_record import LaunchRecord

RECORDS = Path(__file__).parent / "launches"
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "biased": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
}
QKV, OUT, GATE_UP, DOWN = (
    MatrixShape(512, 256),
    MatrixShape(256, 256),
    MatrixShape(512, 256, gated=True),
    MatrixShape(256, 512),
)
GEMV, FRAGMENTS, WIDE = GemvTile(4, 256, 4), FragmentsTile(16, 2, 4, 1, 128), WideTile(32, 64, 64, 2, 2)
LAYER = (Choice(1, 1, GEMV), Choice(2, 8, FRAGMENTS), Choice(9, 32, WIDE))
TABLE = KernelTable(
    "",
    {
        QKV: (*LAYER, Choice(33, 64, SkinnyTile(16, 64, 64, 4, 3, parts=2))),
        OUT: (*LAYER, Choice(33, 48, SkinnyTile(16, 64, 64, 4, 3, parts=4)), Choice(49, 64, WIDE)),
        GATE_UP: (*LAYER, Choice(33, 64, SkinnyTile(16, 64, 64, 4, 3))),
        DOWN: (
            *LAYER,
            Choice(33, 48, SkinnyTile(16, 64, 64, 4, 3, parts=2)),
            Choice(49, 64, FRAGMENTS),
        ),
        MatrixShape(640, 256): (
            Choice(1, 1, GEMV),
            Choice(2, 8, FRAGMENTS),
            Choice(9, 32, SkinnyTile(16, 64, 64, 4, 3)),
            Choice(33, 48, SkinnyTile(16, 64, 64, 4, 3, parts=2)),
        ),
    },
)
LONG = 65_536
"""Tokens enough for such small matrices to fill a GPU: what is not in the table is by rule."""
FORMS = {
    1: "few",
    8: "few",
    9: "scaled",
    32: "scaled",
    40: "general",
    64: "general",
    100: "general",
    LONG: "general",
}
CASES = [
    *((model, tokens, "rows") for model in MODELS for tokens in FORMS),
    *(("qwen3", tokens, "heads") for tokens in (8, 32, 40)),
    *(("qwen3", tokens, "adapters") for tokens in FORMS),
]


def long_by_rule(shape: MatrixShape, num_tokens: int, gpu: Gpu, *, cuda: bool) -> Tile:
    return tile_by_rule(shape, num_tokens, gpu, cuda=cuda) if num_tokens >= LONG else Library()


@contextmanager
def on_a_hopper() -> Iterator[None]:
    """A GPU that has all kernels and no table but this one."""
    with (
        mock.patch.object(choice, "gpu_of", return_value=H200),
        mock.patch.object(choice, "package_table", return_value=None),
        mock.patch.object(choice, "tile_by_rule", long_by_rule),
        mock.patch.object(compiled, "is_supported", return_value=True),
        mock.patch.object(compiled, "has_warpgroup_products", return_value=True),
        choice.using(TABLE),
    ):
        yield


def attend_heads(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([q, k, v], dim=1).narrow(1, 0, q.size(1)) * 2


def attend_rows(layer: int, rows: torch.Tensor, heads: Any) -> torch.Tensor:
    queries = products.joined(rows, torch.bfloat16).narrow(1, 0, 256).unflatten(1, (4, 64)) * heads.eps
    return queries if heads.q_norm is None else queries * heads.q_norm * heads.k_norm


def launches(model_name: str, num_tokens: int, starts_from: str) -> list[str]:
    """Of a step of this model, from its tokens to its logits."""
    attend = attend_heads if starts_from == "heads" else StepAttention(attend_heads, attend_rows)
    with on_a_hopper(), FakeTensorMode(), torch.no_grad():
        config = ModelConfig.from_dict({**SHAPE, **MODELS[model_name]})
        model = Transformer(config, device="cuda", dtype=torch.bfloat16)
        ids = torch.empty(num_tokens, dtype=torch.int64, device="cuda")
        stacks = stacks_of(model)
        with LaunchRecord(model, of_stacks(stacks)) as record:
            adapters = None
            if starts_from.endswith("adapters"):
                slots = torch.empty(num_tokens, dtype=torch.int32, device="cuda")
                adapters = Adapters(stacks, Rows.of(slots, 4))
            model.logits(model(ids, ids, attend, adapters))
    return record.lines


def stacks_of(model: Transformer) -> dict[str, Stack]:
    """Four slots for every linear layer of the layers."""
    return {
        f"layers.{name}": Stack.empty(
            4,
            16,
            linear.weight.size(1),
            linear.parts or (linear.weight.size(0),),
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
        )
        for name, linear in model.layers.named_modules()
        if isinstance(linear, Linear)
    }


def of_stacks(stacks: dict[str, Stack]) -> dict[str, torch.Tensor]:
    """All tensors by name."""
    return {
        f"{name}.{kind}": getattr(stack, kind)
        for name, stack in stacks.items()
        for kind in ("a", "b", "ranks")
    }


def record_of(model_name: str, num_tokens: int, starts_from: str) -> Path:
    return RECORDS / f"{model_name}-{num_tokens}-{starts_from}.txt"


@pytest.mark.parametrize(("model", "num_tokens", "starts_from"), CASES)
def test_a_step_launches_what_was_recorded(model: str, num_tokens: int, starts_from: str) -> None:
    recorded = record_of(model, num_tokens, starts_from).read_text().splitlines()
    assert launches(model, num_tokens, starts_from) == recorded


if __name__ == "__main__":
    for case in CASES:
        record_of(*case).write_text("\n".join(launches(*case)) + "\n")
