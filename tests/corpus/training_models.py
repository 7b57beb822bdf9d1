"""Small models and data of the training programs."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(run, steps, rows=8, width=16, classes=4, seed=7):
    """Batches [rows, width] with a class each, from a fixed linear rule."""
    g = seeded(seed)
    rule = torch.randn(width, classes, generator=g)
    made = []
    for _ in range(steps):
        x = torch.randn(rows, width, generator=g)
        made.append((x.to(run.device), (x @ rule).argmax(-1).to(run.device)))
    return made


def regression(run, steps, rows=8, width=16, out=1, seed=7):
    g = seeded(seed)
    rule = torch.randn(width, out, generator=g)
    made = []
    for _ in range(steps):
        x = torch.randn(rows, width, generator=g)
        made.append((x.to(run.device), (x @ rule + 0.1 * torch.randn(rows, out, generator=g)).to(run.device)))
    return made


def images(run, steps, rows=4, channels=3, size=8, classes=4, seed=7):
    g = seeded(seed)
    return [
        (
            torch.randn(rows, channels, size, size, generator=g).to(run.device),
            torch.randint(classes, (rows,), generator=g).to(run.device),
        )
        for _ in range(steps)
    ]


def tokens(run, lengths, rows=4, vocabulary=32, seed=7):
    """Language modelling batches: each token's target is the next one."""
    g = seeded(seed)
    made = []
    for length in lengths:
        text = torch.randint(vocabulary, (rows, length + 1), generator=g).to(run.device)
        made.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return made


def mlp(*widths, act=nn.ReLU, dropout=0.0):
    layers = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            layers.append(act())
            if dropout:
                layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class ConvNet(nn.Module):
    def __init__(self, channels=3, width=8, classes=4, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = norm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class GPT(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, vocabulary=32, width=32, layers=2, heads=2, length=64, dropout=0.0, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias of keys: its gradient is rounding alone, which Adam would blow up.
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


def lm_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
