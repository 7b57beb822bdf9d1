"""Options for LoRA adapters."""

from . import conversions
from .option import PeerOption, acts, harmless, mapped, refused

_BOTH = "vllm sglang"
_ONE_GPU = "one engine uses one GPU"
_ALL_LAYERS = "every linear layer of the model has slots"

ADAPTERS: tuple[PeerOption, ...] = (
    acts("enable_lora", _BOTH, "flag", "", "serve adapters beside the model"),
    acts("max_loras", "vllm", "int", "2", "different adapters in one step"),
    mapped("max_loras_per_batch", "sglang", "int", "2", "max_loras", "the same"),
    acts("max_lora_rank", _BOTH, "int", "16", "highest rank, at most 256"),
    acts("max_cpu_loras", "vllm", "int", "8", "adapters kept on the host"),
    mapped("max_loaded_loras", "sglang", "int", "8", "max_cpu_loras", "the same"),
    acts(
        *(
            "lora_modules",
            "vllm",
            "texts",
            "sql=/adapters/sql",
            "adapters to load at startup: name=directory",
        ),
        convert=conversions.lora_modules,
    ),
    mapped(
        *("lora_paths", "sglang", "texts", "sql=/adapters/sql", "lora_modules", "the same"),
        convert=conversions.lora_modules,
    ),
    harmless("lora_dtype", "vllm", "text", "auto", "adapters have the model's dtype", same=("auto",)),
    harmless("lora_target_modules", "sglang", "texts", "all", _ALL_LAYERS, tunes=True),
    harmless("fully_sharded_loras", "vllm", "flag", "", _ONE_GPU, same=(True, False)),
    harmless(
        "specialize_active_lora",
        "vllm",
        "flag",
        "",
        "a graph serves any number of adapters",
        same=(True, False),
    ),
    harmless("lora_backend", "sglang", "text", "csgmv", "there is only one", tunes=True),
    harmless(
        "lora_eviction_policy", "sglang", "text", "lru", "the least recently used is evicted", same=("lru",)
    ),
    harmless("lora_drain_wait_threshold", "sglang", "float", "0", "no request waits forever", tunes=True),
    harmless(
        "enable_lora_overlap_loading", "sglang", "flag", "", "files are read while steps continue", tunes=True
    ),
    harmless("max_lora_chunk_size", "sglang", "int", "16", "it concerns other kernels", tunes=True),
    refused("enable_lora_bias", "vllm", "flag", "", "adapters with biases cannot be served"),
)
