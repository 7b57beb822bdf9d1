"""A small language model, and the training loop that everybody writes, to compare with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.graphs import CaptureOptions, graphed_train_step

VOCABULARY = 13


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.dropout(F.gelu(self.out(attended)))


class TinyGpt(nn.Module):
    def __init__(
        self, *, dropout: float = 0.0, width: int = 8, layers: int = 1, checkpoint: Any = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpoint = checkpoint

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        return self.head(x)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_model(device: torch.device, **settings: Any) -> TinyGpt:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return TinyGpt(**settings).to(device)


def make_batches(
    device: torch.device, lengths: Sequence[int], *, rows: int = 2, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that count upwards from somewhere, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for length in lengths:
        starts = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        ids = ((starts + torch.arange(length + 1)) % VOCABULARY).to(device)
        batches.append((ids[:, :-1], ids[:, 1:]))
    return batches


def as_rung(
    batch: tuple[torch.Tensor, torch.Tensor], ladder: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as a graph of its rung sees it."""
    inputs, targets = batch
    extra = min(rung for rung in ladder if rung >= inputs.size(1)) - inputs.size(1)
    return F.pad(inputs, (0, extra)), F.pad(targets, (0, extra), value=-100)


def fast_options() -> CaptureOptions:
    return CaptureOptions(freeze_gc=False, strict=True)


def captured(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = cross_entropy, **settings: Any
) -> Any:
    settings.setdefault("ladder", [8])
    settings.setdefault("options", fast_options())
    return graphed_train_step(model, loss_fn, optimizer, **settings)


def train_eagerly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    last_accumulates: int | None = None,
    loss_fn: Any = None,
) -> list[float]:
    """The usual loop. `last_accumulates`: how many micro-batches the last update is of."""
    losses = []
    updates = 0
    device = next(model.parameters()).device.type
    for number, (inputs, targets) in enumerate(batches):
        left = len(batches) - number + number % accumulate
        size = min(accumulate, left)
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = (loss_fn or cross_entropy)(model(inputs), targets)
        losses.append(loss.item())
        share = loss / size
        (share if scaler is None else scaler.scale(share)).backward()
        if (number + 1) % accumulate and number + 1 < len(batches):
            continue
        for group in optimizer.param_groups if schedule is not None else ():
            group["lr"] = schedule(updates)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        updates += 1
    return losses


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def replays(step: Any) -> int:
    return sum(row.replays for row in step.report().graphs)
