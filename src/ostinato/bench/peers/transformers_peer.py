"""transformers: `generate` over one static batch, padded on the left."""

from __future__ import annotations

from typing import Any

import torch


class TransformersPeer:
    """A model of transformers with its own defaults for attention and cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Only the length ends an answer.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """All answers run as long as the longest one: that is the cost of a static batch."""
        width = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
        )
        with torch.inference_mode():
            found = self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(output_lens)
            )
        answers: list[list[int]] = found[:, width:].tolist()
        return [answer[:length] for answer, length in zip(answers, output_lens, strict=True)]


def start_transformers(settings: dict[str, Any]) -> tuple[TransformersPeer, str]:
    """Load the model; uses as many threads as our own engine."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    with torch.device(settings["device"]):
        if settings["random_weights"]:
            config = transformers.AutoConfig.from_pretrained(settings["directory"])
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(settings["directory"], dtype=dtype)
    return TransformersPeer(model.to(settings["device"]).eval()), transformers.__version__
