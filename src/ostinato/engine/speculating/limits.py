"""Which requests can take more than one token from a step."""

from ..parameters.sampling_params import SamplingParams


def why_single(params: SamplingParams, is_processed: bool) -> str:
    """What keeps a request that is not plain from having its drafts verified."""
    asked = {
        "structured output": params.structured_outputs is not None,
        "logits processors": is_processed,
        "penalties": params.has_penalties,
        "logprobs": params.wants_logprobs,
        "min_tokens": params.min_tokens > 0,
        "bad_words or allowed_token_ids": bool(params.bad_words) or params.allowed_token_ids is not None,
        "logit_bias": bool(params.logit_bias),
    }
    return next((name for name, is_asked in asked.items() if is_asked), "top_k, top_p or min_p")
