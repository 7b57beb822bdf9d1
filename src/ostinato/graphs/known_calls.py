"""What libraries do on the host that no capture can contain, and the option or call that avoids it.

Someone who calls `Categorical(logits=x)` cannot act on "Tensor.__bool__ reads a value": the line that does is
in torch. Here stands, by the function of the library that was running, what to write instead. Both the
tape, which refuses the call, and a capture on CUDA, which fails below it, look it up in the same frames.
"""

from itertools import takewhile
from types import FrameType
from typing import NamedTuple

import torch

from .blame import Blame, Frames, below_user, blamed
from .errors import CaptureError
from .forbidden import Forbidden


class _Known(NamedTuple):
    """A function of a library, and what is known of it."""

    module: str
    """Where it is; with a dot at the end: in all modules below."""
    function: str
    """Its qualified name; with a star in front: the end of it."""
    what: str
    """How a user calls it; `{}` stands for the class of the object whose method it is."""
    why: str
    """What it does and what to write instead, as in `Forbidden`."""

    def is_running(self, frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        if not (module.startswith(self.module) if self.module.endswith(".") else module == self.module):
            return False
        called = frame.f_code.co_qualname
        return called.endswith(self.function[1:]) if self.function[:1] == "*" else called == self.function


_VALIDATES = (
    "checks its arguments on the host: pass validate_args=False, or call "
    "torch.distributions.Distribution.set_default_validate_args(False) once"
)
_PACKED = (
    "works by lengths on the host: pass padded rows to the layer, and mask what is behind their ends, or "
    "pack and unpack outside of the step"
)
_FACTORS = (
    "factorises its matrix and checks on the host that it could: pass scale_tril= (torch.linalg.cholesky_ex)"
)

_KNOWN = (
    _Known(
        *("torch.nn.modules.batchnorm", "*BatchNorm.forward", "{}(momentum=None)"),
        "divides by its count of batches, which it reads on the host: give it a momentum",
    ),
    _Known(
        *("torch.nn.modules.transformer", "_detect_is_causal_mask", "nn.Transformer with a mask"),
        "compares the mask on the host with a causal one, to find out whether it is: say so beside the mask, "
        "is_causal=True (or False) to an encoder, tgt_is_causal= to a decoder",
    ),
    _Known(
        *("torch.nn.modules.transformer", "TransformerEncoder.forward", "{}(src_key_padding_mask=)"),
        "leaves padded positions out, in nested tensors whose shape depends on values: create it with "
        "enable_nested_tensor=False",
    ),
    _Known("torch.distributions.distribution", "Distribution.__init__", "{}(...)", _VALIDATES),
    _Known(
        "torch.distributions.distribution", "Distribution._validate_sample", "{}.log_prob(...)", _VALIDATES
    ),
    _Known(
        *("torch.distributions.utils", "broadcast_all", "{}(...) with a number"),
        "copies the number to the device: pass tensors, such as torch.ones_like(loc)",
    ),
    _Known("torch.distributions.multivariate_normal", "MultivariateNormal.__init__", "{}(...)", _FACTORS),
    _Known(
        *("torch.nn.utils.clip_grad", "_get_total_norm", "clip_grad_norm_(error_if_nonfinite=True)"),
        "looks at the norm on the host: leave the option out, and look at the norm that it returns after the "
        "replay",
    ),
    _Known("torch.nn.utils.rnn", "pack_padded_sequence", "pack_padded_sequence", _PACKED),
    _Known("torch.nn.utils.rnn", "pad_packed_sequence", "pad_packed_sequence", _PACKED),
    _Known("torch.nn.modules.rnn", "*.forward", "{} of a PackedSequence", _PACKED),
    _Known("torch.nn.modules.rnn", "*.check_forward_args", "{} of a PackedSequence", _PACKED),
    _Known(
        *("torch.nn.functional", "gaussian_nll_loss", "gaussian_nll_loss"),
        "looks on the host for negative variances: write 0.5 * (var.log() + (input - target) ** 2 / var)",
    ),
    _Known(
        *("torch.nn.functional", "ctc_loss", "ctc_loss"),
        "reads the lengths on the host: compute this loss outside of the step",
    ),
    _Known(
        *("torch.nn.modules.adaptive", "AdaptiveLogSoftmaxWithLoss.forward", "{}"),
        "sorts rows by cluster, so shapes depend on values: call its log_prob(), which computes all clusters",
    ),
    _Known(
        *("torch.amp.grad_scaler", "*", "GradScaler"),
        "reads on the host whether gradients overflowed: pass it to graphed_train_step(scaler=)",
    ),
    _Known(
        *("torch.optim.optimizer", "_get_value", "{}"),
        "counts its steps on the host: create it with capturable=True on a GPU, or let graphed_train_step do "
        "the step",
    ),
    _Known(
        *("torch.testing.", "*", "a check of torch.testing"),
        "compares values on the host: check after the replay what the step returns",
    ),
    _Known(
        *("transformers.models.", "*Experts.forward", "{} of transformers"),
        "chooses on the host which experts have tokens: call "
        'model.set_experts_implementation("batched_mm") before the capture',
    ),
    _Known(
        *("transformers.integrations.moe", "*", "grouped experts of transformers"),
        "reads on the host how many tokens each expert has: call "
        'model.set_experts_implementation("batched_mm") before the capture',
    ),
    _Known(
        *("transformers.generation.", "*", "transformers' generate()"),
        "decides on the host, token by token, how to go on: graph the model's forward, with a StaticCache, "
        "and leave the loop outside",
    ),
    _Known(
        *("transformers.modeling_flash_attention_utils", "*", "flash attention with a padding mask"),
        "removes padding, so shapes depend on values: load the model with attn_implementation='sdpa'",
    ),
    _Known(
        *("transformers.masking_utils", "*", "an attention mask of transformers"),
        "is looked at on the host: pass none, or a mask of four dimensions",
    ),
    _Known(
        *("transformers.modeling_attn_mask_utils", "*", "an attention mask of transformers"),
        "is looked at on the host: pass none, or a mask of four dimensions",
    ),
    _Known(
        *("transformers.loss.", "*", "a loss of transformers"),
        "matches predictions with labels on the host: call the model without labels, and compute the loss "
        "outside of the step",
    ),
)


def explained(found: Forbidden, frames: Frames) -> tuple[Forbidden, Blame]:
    """What is at fault for a call that cannot be captured, and where: what is known of the innermost function
    of a library that the user's code is waiting for, else the call itself."""
    blame = blamed(frames)
    below = [frame for frame, _ in below_user(frames)]
    for position, frame in enumerate(below):
        for known in _KNOWN:
            if known.is_running(frame):
                called = known.what.format(_called(below[position:]))
                return Forbidden(called, known.why), Blame(blame.line)
    return found, blame


def _called(frames: list[FrameType]) -> str:
    """The class of the object whose method runs; of a distribution that others consist of, that one."""
    owners = [frame.f_locals.get("self") for frame in frames]
    whole = list(takewhile(lambda owner: isinstance(owner, torch.distributions.Distribution), owners))
    owner = whole[-1] if whole else next((owner for owner in owners if owner is not None), None)
    return type(owner).__name__


def refusal(found: Forbidden, frames: Frames) -> CaptureError:
    """The error for a call that cannot be captured."""
    found, blame = explained(found, frames)
    return CaptureError(str(found), where=blame.line, inside=blame.inside)
