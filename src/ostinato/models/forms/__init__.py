"""The forms of a step: how the steps of a layer are joined, chosen by the number of tokens.

`few`: norms and sums are parts of the linear layers. `scaled`: a layer adds to what came in and leaves half
of the next norm to the one behind it. `general`: norms are steps of their own; runs anything.
"""

from typing import Any

from ostinato.kernels.lora import Adapters

from .few import Few
from .form import Form, FormError, Step
from .general import General
from .scaled import Scaled


def form_of(step: Step, adapters: Adapters | None = None) -> Form[Any]:
    """The form that a step should run in: the first that can, and should."""
    reasons = []
    for form in (Few(adapters), Scaled(adapters), General(adapters)):
        reason = form.why_not(step)
        if reason is None:
            return form
        reasons.append(f"{form.name}: {reason}")
    raise FormError("no form of a step can run these layers; " + "; ".join(reasons))
