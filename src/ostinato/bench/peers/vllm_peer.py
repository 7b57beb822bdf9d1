"""vLLM: its offline `LLM`, with its defaults except for the prefix cache."""

from __future__ import annotations

from typing import Any


class VllmPeer:
    """A running vLLM, its graphs captured."""

    def __init__(self, llm: Any, sampling_params: Any) -> None:
        self._llm = llm
        self._sampling_params = sampling_params

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Greedy answers of these lengths."""
        params = [
            self._sampling_params(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def start_vllm(settings: dict[str, Any]) -> tuple[VllmPeer, str]:
    """Load and capture."""
    import vllm

    llm = vllm.LLM(
        settings["directory"],
        dtype=settings["dtype"],
        load_format="dummy" if settings["random_weights"] else "auto",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(settings["max_len"], 8192),
        max_num_seqs=max(settings["max_batch"], 256),
    )
    return VllmPeer(llm, vllm.SamplingParams), vllm.__version__
