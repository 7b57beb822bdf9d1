"""A logits processor for servers: only the token that a request names may come."""

from collections.abc import Callable

import torch
from ostinato.v1.sample.logits_processor import AdapterLogitsProcessor
from torch import Tensor

from ostinato import SamplingParams


class Forcing(AdapterLogitsProcessor):
    """Reads `target` of `vllm_xargs`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("target", 0), int):
            raise ValueError("target must be a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        target = (params.extra_args or {}).get("target")
        if target is None:
            return None

        def force(output: list[int], logits: Tensor) -> Tensor:
            only = torch.full_like(logits, -torch.inf)
            only[target] = 0.0
            return only

        return force
