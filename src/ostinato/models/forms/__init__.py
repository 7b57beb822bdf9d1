"""The forms of a step: how the operations of a layer are joined, chosen by the number of tokens.

`few`: norms and sums are parts of the linear layers. `scaled`: a layer adds to its input and leaves half of
the next norm to the following layer. `general`: norms are operations of their own; runs anything.
"""

from typing import Any

from ostinato.kernels.lora import Adapters

from .few import Few
from .form import Form, FormError, Step
from .general import General
from .scaled import Scaled


def form_of(step: Step, adapters: Adapters | None = None) -> Form[Any]:
    """The form in which a step should run: the first that can, and is meant for it."""
    reasons = []
    for form in (Few(adapters), Scaled(adapters), General(adapters)):
        reason = form.why_not(step)
        if reason is None:
            return form
        reasons.append(f"{form.name}: {reason}")
    raise FormError("no form of a step can run these layers; " + "; ".join(reasons))
