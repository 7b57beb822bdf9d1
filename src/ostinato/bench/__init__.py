"""Benchmarks: `ostinato bench NAME`, or `python -m ostinato.bench.NAME`.

The commands with options of an engine (decode, prefill, throughput, host, ...) measure through the public
`LLM`, check the outputs and return one plain result; `SCRIPTS` measure one question each. Results are
committed in benchmarks/results, and docs/benchmarks.md says which command wrote which.
"""

SCRIPTS = {
    "asking-kernels": "What penalties, filters and logprobs add to a step, kernel by kernel.",
    "cascade": "Time per output token over a shared prefix, read by each or once for all.",
    "chunk-simulation": "What a bound on inter-token latency costs, computed from measured steps.",
    "compiled": "Layers through torch.compile beside ours.",
    "gpu-suite": "Run the GPU test suite and write what passed.",
    "grammar-processes": "What a step waits for grammars.",
    "grammars": "Steps of a batch with requests under grammars.",
    "kernels": "Time and share of the memory's limit of each part of a decode step.",
    "latency-under-prompts": "Inter-token latency of running streams while prompts arrive.",
    "lora": "What LoRA costs a whole decode step.",
    "lora-layers": "What LoRA costs the layers of a decode step.",
    "mixed-kinds": "Steps in which few requests have penalties, filters or logprobs.",
    "mixed-load": "Long prompts among running streams, through a server.",
    "prefix-hits": "Time to first token of prompts in the prefix cache.",
    "prefix-host": "What prompts cost the host, cached and new.",
    "prompt-attention": "Attention of prompts beside torch's, as TFLOP/s.",
    "prompt-parts": "Where the time to first token goes, by kernel.",
    "prompt-products": "GEMMs of thousands of tokens: cuBLAS beside prompt_product.cu.",
    "run-cpu": "Everything behind the committed CPU results.",
    "run-h200": "Everything behind the committed H200 results.",
    "safe-results": "What it costs that results are the caller's own.",
    "sampling": "Time of choosing a token.",
    "sleep": "Time to give a model's memory back and take it again.",
    "speculation": "Speculation from end to end, and its parts.",
    "steady-call": "CPU time of a steady call of graphed().",
    "structure": "Other ways to build a decode step.",
    "training": "A training step: eager, torch.compile, graphs.",
    "untuned": "A model in no table: by rules and tuned.",
    "verify-step": "What a step costs that verifies drafts.",
    "vllm-prompts": "vLLM's time to first token, for the same machine.",
}
"""Benchmarks with a command line of their own, in modules of these names, with what each measures."""
