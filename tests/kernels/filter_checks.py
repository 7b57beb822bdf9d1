"""Checks of the cuts of top-k, top-p and min-p against their definition in float64, on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.asked_rows import nothing_asked
from ostinato.kernels.constants import GREEDY_BELOW
from ostinato.kernels.sampling import filters
from ostinato.kernels.sampling.asked import Asked

MASS_TOLERANCE = 5e-6
"""How near to top_p a sum of probabilities may be to be decided either way."""
LOGIT_TOLERANCE = 1e-5
"""The same for a logit and the bound of min-p, as a share of the larger of the two and 1."""


@dataclass(frozen=True)
class Filtering:
    """Rows of logits and what is asked of each."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def asked(self, **fields: Tensor) -> Asked:
        """These filters, those of the first line of logits in row 1; row 0 has none."""
        named = ("temperature", "top_k", "top_p", "min_p")
        of_rows = {name: torch.cat([vars(self)[name][:1] * 0, vars(self)[name]]) for name in named}
        n, vocab = self.logits.shape
        return nothing_asked(n + 1, vocab, self.logits.device, **of_rows, **fields)

    def cuts(self) -> tuple[Tensor, Tensor]:
        """By the kernels, in the interpreter also on a CPU."""
        from ostinato.kernels.sampling.filters.triton_candidate import judge
        from ostinato.kernels.sampling.filters.triton_cuts import Cuts, Verdicts
        from ostinato.kernels.sampling.filters.triton_find_cuts import find_cuts
        from ostinato.kernels.sampling.triton_adjusted import draw_adjusted

        (n, vocab), device = self.logits.shape, self.logits.device
        asked, places = self.asked(), torch.arange(n, device=device).int()
        drawn = draw_adjusted(self.logits, places + 1, places, asked, has_filters=True)
        # The candidate is the last token in the order: it stays only where nothing is cut off.
        values, tokens = drawn.best
        values.fill_(float("-inf"))[:, 0] = 1.0
        tokens[:, 0] = self.logits.sort(dim=-1, descending=True, stable=True).indices[:, -1]
        of_rows = (drawn.logits, places + 1, asked.filters, drawn.surveyed)
        verdicts, cuts = Verdicts.empty(n, vocab, device), Cuts.empty(n, vocab, device)
        cuts.value.fill_(float("-inf"))
        cuts.last.fill_(vocab - 1)
        judge(*of_rows, drawn.best, verdicts, drawn.arrived)
        find_cuts(*of_rows, verdicts.verdicts, drawn.arrived, cuts)
        return cuts.value, cuts.last

    def to(self, device: torch.device | str) -> "Filtering":
        """The same on another device."""
        return Filtering(*(tensor.to(device) for tensor in vars(self).values()))

    @classmethod
    def random(cls, logits: Tensor, seed: int = 0) -> "Filtering":
        """Any filter may be on or off in any row."""
        generator = torch.Generator().manual_seed(seed)
        n, vocab = logits.shape

        def one_of(*values: float) -> Tensor:
            return torch.tensor(values)[torch.randint(len(values), (n,), generator=generator)]

        return cls(
            logits,
            one_of(0.0, 0.1, 0.7, 1.0, 1.0, 1.8, 30.0),
            one_of(-1, 0, 0, 1, 2, 20, 50, vocab // 9, vocab // 2, vocab - 1, vocab, 2 * vocab).int(),
            one_of(1e-6, 0.1, 0.5, 0.8, 0.9, 0.95, 0.999, 1.0, 1.0),
            one_of(0.0, 0.0, 0.0, 0.01, 0.2, 1.0),
        )


def counts_kept(case: Filtering, slack: int) -> Tensor:
    """int64 [n]: how many tokens stay by definition; `slack` of -1 takes the tolerances, 1 gives them."""
    logits = case.logits.double()
    temperature, top_p, min_p = (
        tensor.double().unsqueeze(1) for tensor in (case.temperature, case.top_p, case.min_p)
    )
    vocab = logits.size(1)
    ordered = logits.sort(dim=-1, descending=True).values
    ranks = torch.arange(vocab, device=logits.device)
    kept = ranks < torch.where(case.top_k > 0, case.top_k, vocab).unsqueeze(1)
    heat = temperature.clamp(min=GREEDY_BELOW)
    weights = ((ordered - ordered[:, :1]) / heat).exp() * kept
    share = weights.cumsum(-1) - weights
    kept &= (share < (top_p + slack * MASS_TOLERANCE) * weights.sum(-1, keepdim=True)) | (top_p == 1)
    bound = ordered[:, :1] + heat * min_p.log()
    margin = LOGIT_TOLERANCE * torch.maximum(ordered.abs(), bound.abs()).clamp(min=1.0).nan_to_num(posinf=0.0)
    kept &= (ordered >= bound - slack * margin) | (min_p == 0)
    kept |= (ranks == 0) | (temperature < GREEDY_BELOW)
    return kept.sum(-1)


def check_cuts(case: Filtering, *, twice: bool = True) -> None:
    """Each row keeps the right number of its best tokens, and the same on a second run."""
    value, last = case.cuts()
    assert value.dtype == torch.float32
    assert last.dtype == torch.int32
    found = filters.is_kept(case.logits, value, last).sum(-1)
    # Kept are those before the cut in the order of (logit, id): the number says it all.
    least, most = counts_kept(case, -1), counts_kept(case, 1)
    right = (least <= found) & (found <= most)
    assert right.all(), _described(case, ~right, found, least, most)
    if twice:
        for first, again in zip((value, last), case.cuts(), strict=True):
            assert torch.equal(first, again)


def _described(case: Filtering, wrong: Tensor, found: Tensor, least: Tensor, most: Tensor) -> str:
    lines = []
    for row in wrong.nonzero().flatten().tolist():
        asked = {name: vars(case)[name][row].item() for name in ("temperature", "top_k", "top_p", "min_p")}
        lines.append(f"row {row}: {asked}: kept {found[row]}, not {least[row]} to {most[row]}")
    return "\n".join(lines)


def logits_of(kind: str, n: int, vocab: int, seed: int = 0) -> Tensor:
    """Rows of one kind: how models' logits may lie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab, generator=generator)
    if kind == "flat":
        return logits / 2
    if kind == "spread":
        return logits * 4
    if kind == "peaked":
        leaders = torch.randint(vocab, (n, min(30, vocab)), generator=generator)
        return (2 * logits).scatter_add(1, leaders, 12 * torch.rand(leaders.shape, generator=generator))
    if kind == "bfloat16":
        return (3 * logits).bfloat16().float()
    if kind == "ties":
        return (2 * logits).round()
    if kind == "equal":
        return torch.full_like(logits, -3.25)
    if kind == "zeros":
        return torch.where(logits > 0, 0.0, -0.0)
    if kind == "sorted":
        return (4 * logits).sort(dim=-1, descending=True).values
    assert kind == "masked", kind
    masked = logits.masked_fill(torch.rand(n, vocab, generator=generator) < 0.9, float("-inf"))
    masked[:, vocab // 3] = -7.0
    return masked


KINDS = ("flat", "spread", "peaked", "bfloat16", "ties", "equal", "zeros", "sorted", "masked")
