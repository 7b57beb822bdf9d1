"""SGLang: its offline `Engine`, with its defaults except for the prefix cache."""

from __future__ import annotations

from typing import Any


class SglangPeer:
    """A running SGLang, its graphs captured."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Greedy answers of these lengths."""
        params = [
            {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in output_lens
        ]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return [list(output["output_ids"]) for output in outputs]


def start_sglang(settings: dict[str, Any]) -> tuple[SglangPeer, str]:
    """Load and capture."""
    import sglang

    engine = sglang.Engine(
        model_path=settings["directory"],
        dtype=settings["dtype"],
        load_format="dummy" if settings["random_weights"] else "auto",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        context_length=max(settings["max_len"], 8192),
        max_running_requests=max(settings["max_batch"], 256),
        log_level="error",
    )
    return SglangPeer(engine), sglang.__version__
