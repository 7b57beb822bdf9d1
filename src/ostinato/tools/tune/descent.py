"""Finds the kernels of a model's matrices at one number of tokens, varying one while the others stay fixed.

A kernel is timed where it will run: between its neighbours, in a captured graph of whole layers, because what
one leaves free decides how early the next can start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ostinato.kernels.compiling.compile_ahead import compiling_only
from ostinato.kernels.cuda.compiled import has_warpgroup_products, is_supported
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.choice import choose, using
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import (
    FUSED,
    MOST_TOKENS,
    Library,
    MatrixShape,
    PromptTile,
    SkinnyTile,
    Tile,
    WideTile,
)
from ostinato.models.transformer import Transformer

from ..layer_step import LayerStep, graph_us
from .candidates import fused_tiles, refined, separate_tiles, wide_tiles

LAYERS = 8
CONTEXT = 192
KEPT = 0.995
"""A tile must bring the time below this fraction of it: every further tile is compiled at every start."""
FEWEST_WIDE_TOKENS = 9
"""With fewer tokens, half of the smallest tile would be empty."""
SEPARATE = (SkinnyTile, PromptTile, Library)
"""Kernels that only multiply, between others that do the rest. Not `wide`: it was measured among them too,
and was not better there than in its own form."""

Tiles = dict[MatrixShape, Tile]
Tried = dict[MatrixShape, dict[Tile, float]]
"""Microseconds by candidate."""


class Form(NamedTuple):
    """One way to run some matrices together."""

    kinds: tuple[type[Tile], ...]
    """Kinds of tiles that it can use."""
    candidates: Mapping[MatrixShape, list[Tile]]

    def beside(self, present: Tiles) -> Form:
        """The same form, also trying the present choice if it is of this form."""
        return Form(
            self.kinds,
            {
                shape: [*tiles, present[shape]] if isinstance(present[shape], self.kinds) else tiles
                for shape, tiles in self.candidates.items()
            },
        )


@dataclass
class Descent:
    """Matrices that run together, and the results for them."""

    run: Callable[[], Any]
    tiles: Tiles
    """The starting point at first, the best tiles in the end."""
    us: float = 0.0
    """The time of one run with these tiles."""
    tried: Tried = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """Measurements at one number of tokens, in microseconds per layer and for the head."""

    num_tokens: int
    tiles: Tiles
    library_us: float
    """With cuBLAS, and our kernels between its products."""
    before_us: float
    """With the previous choice."""
    layer_us: float
    head_before_us: float
    head_us: float
    tried: Tried


class Tuner:
    """Finds the kernels of a model on the GPU that it is on."""

    def __init__(self, model: Transformer, gpu: Gpu) -> None:
        self.model, self.gpu = model, gpu
        self.device = model.embed_tokens.weight.device
        self.has_cuda_kernels = is_supported(self.device)
        is_bfloat16 = model.embed_tokens.weight.dtype == torch.bfloat16
        self.has_wide_kernel = is_bfloat16 and has_warpgroup_products(self.device)
        self.shapes = list(model.matrix_shapes)
        *_, (self.head, _) = model.products_of(1, 1)

    def find(self, num_tokens: int, start: Tiles) -> Found:
        """The best kernels for steps of `num_tokens`; `start` are those found for fewer tokens."""
        step = LayerStep(self.model, num_tokens, num_layers=LAYERS, context=CONTEXT)
        dtype = self.model.embed_tokens.weight.dtype
        present = {
            shape: choose(shape, num_tokens, dtype, self.device) for shape in [*self.shapes, self.head]
        }
        start = present | start

        def layers_us(tiles: Tiles) -> float:
            return self.us(step.run_layers, tiles, num_tokens)

        before_us = layers_us(present)
        library_us = layers_us({shape: Library() for shape in self.shapes})
        descents = [
            self._descent(num_tokens, step.run_layers, start, form.beside(present))
            for form in self._forms(num_tokens)
            if all(form.candidates.values())
        ]
        best = min(descents, key=lambda descent: descent.us)
        head_before_us = self.us(step.run_head, present, num_tokens)
        head = self._descent(num_tokens, step.run_head, start, self._head_form(num_tokens).beside(present))
        return Found(
            num_tokens=num_tokens,
            tiles=best.tiles | head.tiles,
            library_us=library_us / LAYERS,
            before_us=before_us / LAYERS,
            layer_us=best.us / LAYERS,
            head_before_us=head_before_us,
            head_us=head.us,
            tried=_together(descent.tried for descent in (*descents, head)),
        )

    def _forms(self, num_tokens: int) -> Iterator[Form]:
        """The forms of a step: see `Transformer.form`."""
        yield Form(FUSED, {shape: self._fused(shape, num_tokens) for shape in self.shapes})
        if self.has_wide_kernel and FEWEST_WIDE_TOKENS <= num_tokens <= MOST_TOKENS[WideTile]:
            yield Form((WideTile,), {shape: self._wide(shape, num_tokens) for shape in self.shapes})
        if num_tokens > 1:
            yield Form(SEPARATE, {shape: self._separate(shape, num_tokens) for shape in self.shapes})

    def _head_form(self, num_tokens: int) -> Form:
        if num_tokens == 1:
            return Form(FUSED, {self.head: self._fused(self.head, 1)})
        # Without `wide`: at 128 rows of Qwen3-0.6B it took 116 us and cuBLAS 103.
        return Form(SEPARATE, {self.head: self._separate(self.head, num_tokens)})

    def _fused(self, shape: MatrixShape, num_tokens: int) -> list[Tile]:
        return fused_tiles(shape, num_tokens, cuda=self.has_cuda_kernels, gpu=self.gpu)

    def _wide(self, shape: MatrixShape, num_tokens: int) -> list[Tile]:
        return wide_tiles(shape, num_tokens, gpu=self.gpu)

    def _separate(self, shape: MatrixShape, num_tokens: int) -> list[Tile]:
        # The results of a layer's second and last matrix are added to something; attention in CUDA C++ adds
        # up parts of the first one's result.
        qkv, o, _, down = self.shapes
        in_parts = shape in (o, down) or (shape == qkv and self.has_cuda_kernels)
        return separate_tiles(shape, num_tokens, in_parts=in_parts, gpu=self.gpu)

    def _descent(self, num_tokens: int, run: Callable[[], Any], start: Tiles, form: Form) -> Descent:
        descent = Descent(run, {})
        for shape, tiles in form.candidates.items():
            found = start[shape]
            takes_all = num_tokens <= MOST_TOKENS.get(type(found), num_tokens)
            fits = takes_all and isinstance(found, form.kinds)
            descent.tiles[shape] = found if fits else tiles[0]
        self._try(descent, num_tokens, form.candidates)
        finer = {}
        for shape, times in descent.tried.items():
            ranked = sorted(times, key=lambda tile: times[tile])
            leaders = [more for tile in ranked if (more := refined(tile, shape, self.gpu))][:2]
            finer[shape] = [tile for more in leaders for tile in more]
        self._try(descent, num_tokens, finer)
        return descent

    def _try(self, descent: Descent, num_tokens: int, candidates: Mapping[MatrixShape, list[Tile]]) -> None:
        with compiling_only(self.device):
            for shape, tiles in candidates.items():
                for tile in tiles:
                    with self._running({**descent.tiles, shape: tile}, num_tokens):
                        descent.run()
        descent.us = self.us(descent.run, descent.tiles, num_tokens)
        for shape, tiles in candidates.items():
            times = descent.tried.setdefault(shape, {})
            times[descent.tiles[shape]] = descent.us
            for tile in tiles:
                if tile not in times:
                    times[tile] = self.us(descent.run, {**descent.tiles, shape: tile}, num_tokens)
            best = min(times, key=lambda tile: times[tile])
            if times[best] < descent.us * KEPT:
                descent.tiles[shape], descent.us = best, times[best]

    def us(self, run: Callable[[], Any], tiles: Tiles, num_tokens: int) -> float:
        """Microseconds per run with these tiles."""
        with self._running(tiles, num_tokens):
            return graph_us(run, replays=5, rounds=3)

    @contextmanager
    def _running(self, tiles: Tiles, num_tokens: int) -> Iterator[None]:
        """The model with these tiles, in the form that follows from them."""
        choices = {shape: (Choice(num_tokens, num_tokens, tile),) for shape, tile in tiles.items()}
        with using(KernelTable("", choices)):
            yield


def _together(parts: Iterable[Tried]) -> Tried:
    """The results of all forms of a step together."""
    all_tried: Tried = {}
    for tried in parts:
        for shape, times in tried.items():
            all_tried.setdefault(shape, {}).update(times)
    return all_tried
