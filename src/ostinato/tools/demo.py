"""`ostinato demo`: the runtime in half a minute, on any device."""

import torch
from rich.console import Console

from ostinato.graphs import Ladder, eager_boundary, graphed

from .timing import wall_us


class Block(torch.nn.Module):
    """A small residual block with an operation in the middle that piecewise capture leaves out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, width)
        self.down = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x plus the block's result."""
        return x + self.down(activation(self.up(self.norm(x))))


@eager_boundary
def activation(x: torch.Tensor) -> torch.Tensor:
    """Stands in for attention: recorded in a full graph, called between segments of a piecewise one."""
    return torch.nn.functional.gelu(x)


def demo(device: torch.device, console: Console) -> None:
    """Capture a small model in both modes, serve random batches, verify, report."""
    torch.manual_seed(0)
    width = 64
    model = torch.nn.Sequential(*[Block(width) for _ in range(6)]).to(device).eval()
    full = graphed(model, ladder=Ladder.sglang(32))
    pieces = graphed(model, ladder=[8, 32], mode="piecewise")
    sizes = torch.randint(1, 34, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    for size in sizes:
        x = torch.randn(size, width, device=device)
        full(x)
        pieces(x)
    full.verify()
    pieces.verify()
    x = torch.randn(1, width, device=device)
    with torch.no_grad():
        eager = wall_us(lambda: model(x), device)
    replayed = wall_us(lambda: full(x), device)
    console.print(full.report().table(), "")
    console.print(pieces.report().table(), "")
    console.print("every graph was verified against eager, with plain and with poisoned padding")
    console.print(f"batch 1: eager {eager:.0f} us, graphed {replayed:.0f} us ({eager / replayed:.1f} times)")
