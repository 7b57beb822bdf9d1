"""What a form of a step is: the steps of a layer, joined in one way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ostinato.kernels.linear.tiles import MatrixShape

from ..layer import FeedForward, Layer
from ..layers import Linear, RMSNorm
from ..mixing import Mix
from ..taps import Taps

Rows = TypeVar("Rows")
"""What is on its way through the layers: rows [T, H], and what a form keeps beside them."""


class FormError(ValueError):
    """Layers that no form can run; the text says why each cannot."""


class Step(NamedTuple):
    """What decides on the form of a step."""

    num_tokens: int
    shapes: tuple[MatrixShape, ...]
    """The matrices of a layer."""
    formats: frozenset[str]
    """How these are stored."""
    dtype: torch.dtype
    device: torch.device


class Rest(NamedTuple):
    """How the last layer goes on behind its QKV projection where only some of the tokens matter."""

    form: "Form[Any]"
    """Of a step of so many tokens."""
    places: Tensor
    """Integers [R]: where these are among all tokens."""
    mix: Mix
    """From the rows of all tokens to attention [R, Hq, D] of these."""


class Form(ABC, Generic[Rows]):
    """One way through the layers. In its methods `rows` is what came in so far, as the form keeps it."""

    name: ClassVar[str]
    keeps_input: ClassVar[bool]
    """Whether what came in is the same afterwards, also on a GPU."""
    keeps_projected: ClassVar[bool] = False
    """Whether rows of the QKV projection stay to the end of a layer, so that its other results come to lie
    elsewhere."""

    @abstractmethod
    def why_not(self, step: Step) -> str | None:
        """Why a step cannot, or should not, run so; None: it can."""

    @abstractmethod
    def begin(self, x: Tensor, norm: RMSNorm) -> Rows:
        """From hidden states [T, H], which `norm` is the first to read."""

    @abstractmethod
    def normed(self, rows: Rows, norm: RMSNorm) -> Rows:
        """Ready for `project` behind this norm; where that does the norm itself, nothing happens here."""

    @abstractmethod
    def project(self, rows: Rows, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> Tensor:
        """`linear(norm(rows))`, perhaps in parts; gated: silu(first half) * second half of it."""

    @abstractmethod
    def add(self, rows: Rows, linear: Linear, x: Tensor, next_norm: RMSNorm) -> Rows:
        """`rows + linear(x)`; `next_norm` is who reads it."""

    @abstractmethod
    def stream(self, rows: Rows) -> Tensor:
        """What came in so far, as one tensor [T, H]; on a GPU good until the next `add`."""

    @abstractmethod
    def end(self, rows: Rows, norm: RMSNorm) -> Tensor:
        """To normalised hidden states [T, H]."""

    def through(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        mix: Mix,
        norm: RMSNorm,
        taps: Taps | None = None,
        rest: Rest | None = None,
    ) -> Tensor:
        """Hidden states [T, H] through layers to normalised ones; `taps` get what they want on the way. With
        a `rest` those of its tokens alone, [R, H]."""
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), norm]
        rows = self.begin(x, layers[0].input_layernorm)
        for layer, next_norm in zip(layers, next_norms, strict=True):
            attention = layer.self_attn
            before, between = layer.input_layernorm, layer.post_attention_layernorm
            rows = self.normed(rows, before)
            if taps is not None and attention.index in taps.layers:
                taps.take(attention.index, self.stream(rows))
            projected = self.project(rows, before, attention.qkv_proj)
            if rest is not None and layer is layers[-1]:
                mixed = rest.mix(attention, projected).flatten(1)
                x = self.stream(rows).index_select(0, rest.places)
                return rest.form.behind_attention(layer, x, mixed, norm)
            mixed = mix(attention, projected).flatten(1)
            if not self.keeps_projected:
                del projected  # of a long prompt, too large to be kept; so is the next
            rows = self.add(rows, attention.o_proj, mixed, between)
            del mixed
            rows = self.feed(rows, between, layer.mlp, next_norm)
        return self.end(rows, norm)

    def behind_attention(self, layer: Layer, x: Tensor, mixed: Tensor, norm: RMSNorm) -> Tensor:
        """The rest of a last layer: from what came into it [T, H] and its attention [T, Hq * D] to normalised
        hidden states, of as many tokens as this form is for."""
        between = layer.post_attention_layernorm
        rows = self.add(self.begin(x, between), layer.self_attn.o_proj, mixed, between)
        return self.end(self.feed(rows, between, layer.mlp, norm), norm)

    def feed(self, rows: Rows, norm: RMSNorm, mlp: FeedForward, next_norm: RMSNorm) -> Rows:
        """`rows + mlp(norm(rows))`; `next_norm` is who reads it."""
        rows = self.normed(rows, norm)
        inner = self.project(rows, norm, mlp.gate_up_proj, gated=True)
        return self.add(rows, mlp.down_proj, inner, next_norm)
