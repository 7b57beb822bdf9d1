"""Which requests can take more than one token from a step."""

from ..parameters.sampling_params import SamplingParams


def why_single(params: SamplingParams, *, is_processed: bool, follows_tokens: bool) -> str | None:
    """Why a request cannot have its drafts verified: its next token depends on the previous one in a way that
    only the host knows, or its answer contains more than tokens; None: it can.

    `is_processed`: functions change its logits; `follows_tokens`: the allowed tokens depend on earlier ones.
    """
    asked = {
        "structured output": params.structured_outputs is not None,
        "logits processors": is_processed,
        "penalties": params.has_penalties,
        "logprobs": params.wants_logprobs,
        "bad_words of several tokens": follows_tokens,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)
