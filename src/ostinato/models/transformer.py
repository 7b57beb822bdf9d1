"""The one transformer: Llama, Mistral, Qwen2 and Qwen3 differ only in their `ModelConfig`.

Tokens of all requests are flattened into one dimension T; the caller's `attend` function decides which of
them see each other (`mixing`). How the operations of a layer are joined depends on the number of tokens
(`forms`). Shapes: H hidden size, D head dimension, Hq/Hkv query and KV heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ostinato.kernels.allocation import Allocate
from ostinato.kernels.linear import products
from ostinato.kernels.linear.tiles import MatrixShape
from ostinato.kernels.lora import Adapters

from .config import ModelConfig
from .errors import ModelError
from .forms import Form, Step, form_of
from .forms.form import Rest
from .last_tokens import LastTokens
from .layer import Layer
from .layers import Embedding, Linear, RMSNorm, RotaryTable
from .mixing import Attend, mix_of
from .room import Room
from .taps import Taps


class Transformer(nn.Module):
    """Token ids and positions to hidden states, hidden states to logits. Weights are uninitialised."""

    lm_head: Linear | None
    score: Linear | None
    """From a last hidden state to labels; applied by callers, outside of steps."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """`max_positions` bounds the rotary table, by default at the model's own context length.

        `allocate` allocates the weights, by the names of `named_parameters`.
        """
        super().__init__()
        self.config = config
        self._run: Sequence[int] = range(config.num_layers)
        self.matrix_shapes = _matrix_shapes(config)
        hidden, vocab = config.hidden_size, config.vocab_size
        room = Room(torch.device(device), dtype, allocate)
        self.embed_tokens = Embedding(room.of("embed_tokens"), vocab, hidden)
        positions = max_positions or config.max_position_embeddings
        with room.device:
            self.rotary = RotaryTable(config.rope, config.head_dim, positions)
        self.layers = nn.ModuleList(
            Layer(config, index, room.of(f"layers.{index}")) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(room.of("norm"), hidden, config.rms_norm_eps)
        self.lm_head = (
            Linear(room.of("lm_head"), hidden, vocab, bias=False, shard_dim=0)
            if config.has_lm_head and not config.tie_word_embeddings
            else None
        )
        labels = config.num_labels
        self.score = Linear(room.of("score"), hidden, labels, bias=False, shard_dim=0) if labels else None
        self._formats = frozenset(part.format for part in self.layers.modules() if isinstance(part, Linear))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: Adapters | None = None,
        taps: Taps | None = None,
        last: LastTokens | None = None,
    ) -> Tensor:
        """input_ids and positions, both int64 [T], to normalised hidden states [T, H]; with `last`, only
        those of its tokens, [R, H].

        `adapters` add to the products of linear layers. `taps` copy hidden states on the way.
        """
        x = self.embed_tokens(input_ids)
        if taps is not None:
            taps.begin(x)
        layers = [cast(Layer, self.layers[index]) for index in self._run]
        mix = mix_of(attend, self.rotary, positions)
        rest = None
        if last is not None:
            form = self.form(last.places.size(0), last.adapters)
            rest = Rest(form, last.places, mix_of(last.attend, self.rotary, positions))
        return self.form(x.size(0), adapters).through(layers, x, mix, self.norm, taps, rest)

    def form(self, num_tokens: int, adapters: Adapters | None = None) -> Form[Any]:
        """The form in which a step of this many tokens runs."""
        weight = self.embed_tokens.weight
        step = Step(num_tokens, self.matrix_shapes, self._formats, weight.dtype, weight.device)
        return form_of(step, adapters)

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside, a step skips layers that would launch no kernel that another has not launched.

        Results are meaningless. The first layer has nothing to add, unlike others of its kind, so the second
        one runs too. With `last` tokens, a last layer runs in place of the second, which steps for all tokens
        try out.
        """
        kinds = self.config.layers
        first_of_each = {kinds.index(kind) for kind in kinds}
        all_layers = self._run
        self._run = sorted(first_of_each | set(range(len(kinds))[:2]))
        try:
            yield
        finally:
            self._run = all_layers

    def products_of(self, num_tokens: int, num_outputs: int) -> list[tuple[MatrixShape, int]]:
        """The matrices of a step, each with the number of rows that it is multiplied with."""
        head = MatrixShape(self.config.vocab_size, self.config.hidden_size)
        return [*((shape, num_tokens) for shape in self.matrix_shapes), (head, num_outputs)]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """From hidden states [n, H] to float32 scores of every token id [n, vocab], in `out` if given."""
        if not self.config.has_lm_head:
            raise ModelError(
                f"{self.config.architecture} has no output layer: it can embed, but not generate"
            )
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return products.float_linear(hidden, head.matrix, out)


def _matrix_shapes(config: ModelConfig) -> tuple[MatrixShape, ...]:
    """The matrices of a layer."""
    hidden, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return (
        MatrixShape(q_width + 2 * config.num_kv_heads * config.head_dim, hidden),
        MatrixShape(hidden, q_width),
        MatrixShape(inner, hidden, gated=True),
        MatrixShape(hidden, inner),
    )
