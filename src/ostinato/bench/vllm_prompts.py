"""vLLM's time to the first token of prompts, as `prompt_parts` measures ours: for the same machine.

python src/ostinato/bench/vllm_prompts.py rows.json FOLDER [--batches 1x4096,4x4096]

In an environment that has vLLM. FOLDER has a config.json in Hugging Face's form and no weights: they are
random. vLLM is at its defaults but for the length of the model and the prefix cache, engine in this process;
a batch is read in once, then three times for the clock, random tokens each time.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
BATCHES = "1x512,32x512,1x4096,4x4096,1x16384,8x8192"


def started(folder: str) -> tuple[Any, dict[str, Any]]:
    """The engine, and how it is set up."""
    import vllm

    began = time.perf_counter()
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=17_000,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.85,
    )
    config = llm.llm_engine.vllm_config
    layer = next(iter(config.compilation_config.static_forward_context.values()))
    return llm, {
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - began, 1),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "attention_backend": layer.attn_backend.get_name(),
        "flash_attn_version": getattr(layer.impl, "vllm_flash_attn_version", None),
    }


def main(file: Path, folder: str, batches: str) -> None:
    """Measure, print, write."""
    from vllm import SamplingParams

    llm, setup = started(folder)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    result: dict[str, Any] = {"benchmark": "first token, vLLM", "setup": setup, "rows": []}
    for number, length in (map(int, batch.split("x")) for batch in batches.split(",")):
        times = []
        for _ in range(4):
            prompts = [{"prompt_token_ids": draw.choices(range(vocab), k=length)} for _ in range(number)]
            began = time.perf_counter()
            outputs = llm.generate(prompts, once, use_tqdm=False)
            times.append(round((time.perf_counter() - began) * 1e3, 2))
            assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
        row = {"prompts": f"{number} x {length:,}", "ms": statistics.median(times[1:]), "times": times[1:]}
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder")
    parser.add_argument("--batches", default=BATCHES)
    given = parser.parse_args()
    main(given.file, given.folder, given.batches)
