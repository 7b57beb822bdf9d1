"""A form of a step: the operations of a layer, joined in one way."""

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
"""What passes through the layers: rows [T, H], and what a form keeps with them."""


class FormError(ValueError):
    """No form can run these layers; the message says why for each."""


class Step(NamedTuple):
    """What determines the form of a step."""

    num_tokens: int
    shapes: tuple[MatrixShape, ...]
    """The matrices of a layer."""
    formats: frozenset[str]
    """How they are stored."""
    dtype: torch.dtype
    device: torch.device


class Rest(NamedTuple):
    """How the last layer continues after its QKV projection if only some of the tokens matter."""

    form: "Form[Any]"
    """The form for that number of tokens."""
    places: Tensor
    """Integers [R]: where they are among all tokens."""
    mix: Mix
    """From the rows of all tokens to attention [R, Hq, D] of these tokens."""


class Form(ABC, Generic[Rows]):
    """One way through the layers. In its methods `rows` is the residual stream so far, as the form keeps
    it."""

    name: ClassVar[str]
    keeps_input: ClassVar[bool]
    """Whether the input is unchanged afterwards, also on a GPU."""
    keeps_projected: ClassVar[bool] = False
    """Whether rows of the QKV projection are kept until the end of a layer, so that its other results lie
    elsewhere."""

    @abstractmethod
    def why_not(self, step: Step) -> str | None:
        """Why a step cannot, or should not, run in this form; None: it can."""

    @abstractmethod
    def begin(self, x: Tensor, norm: RMSNorm) -> Rows:
        """From hidden states [T, H]; `norm` is the first to read them."""

    @abstractmethod
    def normed(self, rows: Rows, norm: RMSNorm) -> Rows:
        """Ready for `project` after this norm; does nothing if `project` computes the norm itself."""

    @abstractmethod
    def project(self, rows: Rows, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> Tensor:
        """`linear(norm(rows))`, perhaps in parts; gated: silu(first half) * second half of it."""

    @abstractmethod
    def add(self, rows: Rows, linear: Linear, x: Tensor, next_norm: RMSNorm) -> Rows:
        """`rows + linear(x)`; `next_norm` is the norm that reads it."""

    @abstractmethod
    def stream(self, rows: Rows) -> Tensor:
        """The residual stream so far, as one tensor [T, H]; on a GPU valid until the next `add`."""

    @abstractmethod
    def end(self, rows: Rows, norm: RMSNorm) -> Tensor:
        """The normalised hidden states [T, H]."""

    def through(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        mix: Mix,
        norm: RMSNorm,
        taps: Taps | None = None,
        rest: Rest | None = None,
    ) -> Tensor:
        """Hidden states [T, H] through layers to normalised ones; `taps` take their features on the way. With
        a `rest`, only those of its tokens, [R, H]."""
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
                del projected  # too large to keep for a long prompt; so is the next one
            rows = self.add(rows, attention.o_proj, mixed, between)
            del mixed
            rows = self.feed(rows, between, layer.mlp, next_norm)
        return self.end(rows, norm)

    def behind_attention(self, layer: Layer, x: Tensor, mixed: Tensor, norm: RMSNorm) -> Tensor:
        """The rest of a last layer: from its input [T, H] and its attention [T, Hq * D] to normalised hidden
        states, for as many tokens as this form is for."""
        between = layer.post_attention_layernorm
        rows = self.add(self.begin(x, between), layer.self_attn.o_proj, mixed, between)
        return self.end(self.feed(rows, between, layer.mlp, norm), norm)

    def feed(self, rows: Rows, norm: RMSNorm, mlp: FeedForward, next_norm: RMSNorm) -> Rows:
        """`rows + mlp(norm(rows))`; `next_norm` is the norm that reads it."""
        rows = self.normed(rows, norm)
        inner = self.project(rows, norm, mlp.gate_up_proj, gated=True)
        return self.add(rows, mlp.down_proj, inner, next_norm)
