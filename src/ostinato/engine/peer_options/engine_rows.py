"""Options for the model and the engine."""

from . import conversions
from .lora_rows import ADAPTERS
from .option import PeerOption, acts, harmless, mapped, refused
from .speculation_rows import SPECULATION

BOTH = "vllm sglang"
ONE_GPU = "one engine uses one GPU; start one server per GPU"
TEXT_ONLY = "models here take text only"
NO_COMPILER = "the engine has its own kernels, and torch.compile gained nothing over them"
NO_DISAGGREGATION = "a server does prefill and decode itself"

MODEL: tuple[PeerOption, ...] = (
    acts("model", BOTH, "text", "{model}", "a directory, a GGUF file or a hub name"),
    mapped("model_path", "sglang", "text", "{model}", "model", "the same"),
    acts(
        *("dtype", BOTH, "text", "half", "auto, float32 (float), float16 (half), bfloat16"),
        values={"half": "float16", "float": "float32"},
    ),
    acts(
        *("load_format", BOTH, "text", "safetensors"),
        "auto, dummy; safetensors and hf mean auto; mistral reads the model's Hugging Face files",
        values={"safetensors": "auto", "hf": "auto", "mistral": "auto"},
    ),
    acts("tokenizer", "vllm", "text", "{model}", "tokenizer files from another directory"),
    mapped("tokenizer_path", "sglang", "text", "{model}", "tokenizer", "the same"),
    harmless(
        *("tokenizer_mode", BOTH, "text", "auto", "there is one tokenizer per model, from HF's files"),
        same=("auto", "hf", "slow"),
        tunes=True,
    ),
    acts("revision", BOTH, "text", "main", "revision of a hub model"),
    acts("download_dir", BOTH, "text", "{folder}", "folder for hub models"),
    harmless(
        *("trust_remote_code", BOTH, "flag", "", "code in checkpoints is never run"), same=(True, False)
    ),
    acts("seed", "vllm", "int", "7", "for requests without a seed"),
    mapped("random_seed", "sglang", "int", "7", "seed", "the same"),
    acts(
        *(
            "max_model_len",
            "vllm",
            "int",
            "64",
            "maximum length of prompt plus output; -1 and auto: as model and machine allow",
        ),
        convert=conversions.max_model_len,
    ),
    mapped("context_length", "sglang", "int", "64", "max_model_len", "the same"),
    acts(
        *("generation_config", "vllm", "text", "vllm", "auto, or a folder; vLLM's vllm is none here"),
        values={"vllm": "none"},
    ),
    acts("override_generation_config", "vllm", "json", '{"temperature": 0.5}', "default sampling values"),
    mapped(
        *(
            "sampling_defaults",
            "sglang",
            "text",
            "model",
            "generation_config",
            "model means auto, openai means none",
        ),
        values={"model": "auto", "openai": "none"},
    ),
    mapped(
        *("preferred_sampling_params", "sglang", "json", '{"top_p": 0.9}', "override_generation_config"),
        "the same",
    ),
    harmless(
        *("runner", "vllm", "text", "auto", "a model supports everything that its weights allow"),
        same=("auto", "generate", "pooling"),
    ),
    harmless(
        *("convert", "vllm", "text", "auto", "every model can embed; heads come from the checkpoint"),
        same=("auto", "none", "embed"),
    ),
    harmless(
        *("task", "vllm", "text", "generate", "a model supports everything that its weights allow"),
        same=("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    ),
    harmless("is_embedding", "sglang", "flag", "", "every model can embed", same=(True, False)),
    harmless(
        "model_impl", BOTH, "text", "auto", "there is only Ostinato's own", same=("auto", "vllm", "sglang")
    ),
    refused("skip_tokenizer_init", BOTH, "flag", "", "a tokenizer is loaded if the model has one"),
    refused("quantization", BOTH, "text", "fp8", "weights are float32, float16 or bfloat16", shorts=("-q",)),
    harmless(*("kv_cache_dtype", BOTH, "text", "auto", "the KV cache has the model's dtype"), same=("auto",)),
    acts(
        *("hf_overrides", "vllm", "json", '{"rope_theta": 500000.0}', "overrides of config.json's values"),
        convert=conversions.hf_overrides,
    ),
    mapped(
        *(
            "json_model_override_args",
            "sglang",
            "json",
            '{"rope_theta": 500000.0}',
            "hf_overrides",
            "the same",
        ),
        convert=conversions.hf_overrides,
    ),
    refused("rope_scaling", "vllm", "json", "{}", "give hf_overrides '{\"rope_parameters\": {...}}'"),
    refused("rope_theta", "vllm", "float", "10000", "give hf_overrides '{\"rope_theta\": ...}'"),
    refused("hf_config_path", "vllm", "text", "/x", "config.json is read from the folder of the weights"),
    refused("hf_token", "vllm", "text", "x", "set HF_TOKEN in the environment"),
    refused("tokenizer_revision", "vllm", "text", "main", "download it and give its folder as tokenizer"),
    harmless("code_revision", "vllm", "text", "main", "code in checkpoints is never run", tunes=True),
    harmless(
        *("config_format", "vllm", "text", "auto", "config.json is read, Mistral's params.json is not"),
        same=("auto", "hf"),
        tunes=True,
    ),
    refused("model_loader_extra_config", BOTH, "json", "{}", "only safetensors files are read"),
    acts("max_logprobs", "vllm", "int", "20", "maximum number of log probabilities per token; -1 for all"),
    harmless("limit_mm_per_prompt", "vllm", "json", '{"image": 1}', TEXT_ONLY, tunes=True),
    harmless("allowed_local_media_path", "vllm", "text", "/", TEXT_ONLY, same=("",), tunes=True),
    harmless("allowed_media_domains", "vllm", "texts", "x.y", TEXT_ONLY, tunes=True),
    harmless("mm_processor_cache_gb", "vllm", "float", "4", TEXT_ONLY, tunes=True),
    harmless("disable_mm_preprocessor_cache", "vllm", "flag", "", TEXT_ONLY, same=(True, False)),
    harmless("language_model_only", "vllm", "flag", "", TEXT_ONLY, same=(True, False)),
    harmless("skip_mm_profiling", "vllm", "flag", "", TEXT_ONLY, same=(True, False)),
    refused("enable_prompt_embeds", "vllm", "flag", "", "prompts are texts or token ids"),
    harmless("mm_processor_kwargs", "vllm", "json", '{"fps": 1}', TEXT_ONLY, tunes=True),
    harmless("mm_attention_backend", "sglang", "text", "sdpa", TEXT_ONLY, tunes=True),
    refused("enable_multimodal", "sglang", "flag", "", TEXT_ONLY),
)

MEMORY_AND_STEPS: tuple[PeerOption, ...] = (
    mapped(
        *("gpu_memory_utilization", "vllm", "float", "0.5", "mem_fraction"),
        "share of the GPU's memory for weights, KV cache and graphs",
    ),
    mapped(
        *("mem_fraction_static", "sglang", "float", "0.5", "mem_fraction"),
        "the same; SGLang's excludes graphs and activations, so its values are somewhat low here",
    ),
    mapped("max_num_seqs", "vllm", "int", "4", "max_running_requests", "maximum requests per step"),
    acts("max_running_requests", "sglang", "int", "4", "maximum requests per step"),
    mapped(
        *("max_num_batched_tokens", "vllm", "int", "64", "chunked_prefill_size", "maximum tokens per step"),
    ),
    acts(
        *("chunked_prefill_size", "sglang", "int", "64", "maximum tokens per step; -1: no chunks"),
        convert=conversions.chunked_prefill_size,
    ),
    acts("enable_chunked_prefill", "vllm", "flag", "", "long prompts in several steps; the default"),
    harmless("enable_mixed_chunk", "sglang", "flag", "", "steps are always mixed", same=(True, False)),
    acts("enable_prefix_caching", "vllm", "flag", "", "the default"),
    mapped(
        *("disable_radix_cache", "sglang", "flag", "", "enable_prefix_caching", "no prefix caching"),
        convert=conversions.when_true("enable_prefix_caching", False),
    ),
    harmless("block_size", "vllm", "int", "16", "KV pages have 16 tokens", same=(16,), tunes=True),
    harmless("page_size", "sglang", "int", "16", "KV pages have 16 tokens", same=(16,), tunes=True),
    mapped(
        *("num_gpu_blocks_override", "vllm", "int", "64", "num_pages", "KV pages of 16 tokens"),
    ),
    mapped(
        *("max_total_tokens", "sglang", "int", "1024", "num_pages", "as many pages as hold them"),
        convert=conversions.pages_of_tokens,
    ),
    refused("disable_sliding_window", "vllm", "flag", "", "windows stay as the model was trained"),
    harmless(
        *("disable_cascade_attn", "vllm", "flag", "", "off unless enable_cascade_attention is set"),
        same=(True, False),
    ),
    harmless("num_scheduler_steps", "vllm", "int", "1", "use steps_ahead", same=(1,), tunes=True),
    harmless("use_v2_block_manager", "vllm", "flag", "", "there is only one", same=(True, False)),
    harmless(
        "preemption_mode",
        "vllm",
        "text",
        "recompute",
        "preemption always recomputes",
        same=("recompute",),
        tunes=True,
    ),
    harmless(
        *("long_prefill_token_threshold", "vllm", "int", "0"),
        "prompts run one after the other; with streams running, target_itl_ms cuts them",
        same=(0,),
    ),
    harmless("max_num_partial_prefills", "vllm", "int", "1", "prompts run one after the other", same=(1,)),
    harmless("max_long_partial_prefills", "vllm", "int", "1", "prompts run one after the other", same=(1,)),
    harmless("disable_hybrid_kv_cache_manager", "vllm", "flag", "", "there is none", same=(True, False)),
    harmless(
        *("prefix_caching_hash_algo", "vllm", "text", "sha256", "prefixes are compared, not hashed"),
        tunes=True,
    ),
    refused("scheduler_cls", "vllm", "text", "x.Y", "there is one scheduler"),
    refused("kv_cache_memory_bytes", "vllm", "int", "1000000000", "give num_pages"),
    harmless(
        *("swap_space", "vllm", "float", "4", "preempted requests are recomputed, not swapped"),
        tunes=True,
    ),
    harmless("cpu_offload_gb", BOTH, "float", "0", "weights stay on the GPU", same=(0,)),
    refused("enable_hierarchical_cache", "sglang", "flag", "", "the prefix cache is on the GPU only"),
    harmless(
        *("max_prefill_tokens", "sglang", "int", "16384", "chunked_prefill_size bounds every step"),
        tunes=True,
    ),
    harmless(
        *("scheduling_policy", "vllm", "text", "fcfs", "first come, first served"),
        same=("fcfs",),
    ),
    harmless(
        *("schedule_policy", "sglang", "text", "lpm", "first come, first served"),
        same=("fcfs",),
        tunes=True,
    ),
    harmless(
        *("schedule_conservativeness", "sglang", "float", "1.0", "requests join as long as pages are free"),
        tunes=True,
    ),
    mapped(
        *("disable_overlap_schedule", "sglang", "flag", "", "steps_ahead", "0 steps ahead"),
        convert=conversions.when_true("steps_ahead", 0),
    ),
    mapped(
        *("async_scheduling", "vllm", "flag", "", "steps_ahead", "1 step ahead, or 0"),
        values={True: 1, False: 0},
    ),
    harmless(
        *("num_continuous_decode_steps", "sglang", "int", "1"),
        "every step mixes decodes and prompts; target_itl_ms limits the share of prompts",
        same=(1,),
        tunes=True,
    ),
    mapped(
        *("enable_deterministic_inference", "sglang", "flag", "", "batch_invariant", "the same"),
    ),
)

GRAPHS_AND_KERNELS: tuple[PeerOption, ...] = (
    mapped("enforce_eager", "vllm", "flag", "", "disable_cuda_graph", "no graphs"),
    acts("disable_cuda_graph", "sglang", "flag", "", "no graphs"),
    acts("cuda_graph_bs", "sglang", "ints", "1 2 4", "captured decode batches"),
    acts("cuda_graph_max_bs", "sglang", "int", "4", "the largest of them"),
    mapped("cuda_graph_bs_decode", "sglang", "ints", "1 2 4", "cuda_graph_bs", "the same"),
    mapped("cuda_graph_max_bs_decode", "sglang", "int", "4", "cuda_graph_max_bs", "the same"),
    acts("disable_cuda_graph_padding", "sglang", "flag", "", "replay exact sizes only"),
    acts("cudagraph_capture_sizes", "vllm", "ints", "1 2 4", "sizes in tokens, for decode and prefill"),
    acts("max_cudagraph_capture_size", "vllm", "int", "4", "end of both lists"),
    mapped("cuda_graph_sizes", "vllm", "ints", "1 2 4", "cudagraph_capture_sizes", "its older name"),
    mapped(
        *("cudagraph_mode", "vllm", "text", "FULL_AND_PIECEWISE", "cuda_graph_mode"),
        "NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE",
    ),
    mapped(
        *("compilation_config", "vllm", "json", '{"cudagraph_mode": "NONE"}', None),
        "cudagraph_mode, cudagraph_capture_sizes and max_cudagraph_capture_size work; the compiler's keys "
        "have no effect",
        convert=conversions.compilation_config,
        shorts=("-cc", "-O"),
    ),
    harmless("enable_torch_compile", "sglang", "flag", "", NO_COMPILER, same=(False,), tunes=True),
    harmless("torch_compile_max_bs", "sglang", "int", "8", NO_COMPILER, tunes=True),
    harmless("optimization_level", "vllm", "int", "2", NO_COMPILER, tunes=True),
    acts(
        *("attention_backend", BOTH, "text", "TRITON_ATTN"),
        "auto, triton, torch; flash-attention, flashinfer and the like mean auto, with a warning",
        convert=conversions.attention_backend,
    ),
    mapped(
        *("attention_config", "vllm", "json", '{"backend": "TRITON_ATTN"}', "attention_backend"),
        "backend, as attention_backend",
        convert=conversions.attention_config,
    ),
    harmless(
        *("max_seq_len_to_capture", "vllm", "int", "8192", "graphs serve every length"),
        tunes=True,
    ),
    harmless("kernel_config", "vllm", "json", '{"a": 1}', "use kernel_table to choose kernels", tunes=True),
    harmless("performance_mode", "vllm", "text", "balanced", "there is only one", tunes=True),
    harmless("sampling_backend", "sglang", "text", "pytorch", "sampling has its own kernels", tunes=True),
    acts("device", BOTH, "text", "cpu", "auto, cuda, cuda:N, cpu"),
    mapped(
        *("base_gpu_id", "sglang", "int", "0", "device", "cuda:N"),
        convert=conversions.gpu_by_number,
    ),
)

SEVERAL_GPUS: tuple[PeerOption, ...] = (
    harmless("tensor_parallel_size", "vllm", "int", "1", ONE_GPU, same=(1,), shorts=("-tp",)),
    harmless("tp_size", "sglang", "int", "1", ONE_GPU, same=(1,), shorts=("--tp", "--tensor-parallel-size")),
    harmless("pipeline_parallel_size", "vllm", "int", "1", ONE_GPU, same=(1,), shorts=("-pp",)),
    harmless("pp_size", "sglang", "int", "1", ONE_GPU, same=(1,), shorts=("--pipeline-parallel-size",)),
    harmless("data_parallel_size", "vllm", "int", "1", ONE_GPU, same=(1,), shorts=("-dp",)),
    harmless("dp_size", "sglang", "int", "1", ONE_GPU, same=(1,), shorts=("--dp", "--data-parallel-size")),
    harmless("ep_size", "sglang", "int", "1", ONE_GPU, same=(1,), shorts=("--ep", "--expert-parallel-size")),
    refused("enable_expert_parallel", "vllm", "flag", "", ONE_GPU),
    refused("enable_dp_attention", "sglang", "flag", "", ONE_GPU),
    harmless("nnodes", BOTH, "int", "1", ONE_GPU, same=(1,)),
    harmless("node_rank", BOTH, "int", "0", ONE_GPU, same=(0,)),
    harmless("master_addr", "vllm", "text", "127.0.0.1", "there is one node", tunes=True),
    harmless("dist_init_addr", "sglang", "text", "127.0.0.1:5000", "there is one node", tunes=True),
    harmless(
        *("distributed_executor_backend", "vllm", "text", "mp"),
        "the engine is one process, on its current GPU",
        same=("mp", "uni", "uniproc", "external_launcher"),
    ),
    harmless(
        "disable_custom_all_reduce", BOTH, "flag", "", "one GPU needs no all-reduce", same=(True, False)
    ),
    refused("kv_transfer_config", "vllm", "json", "{}", NO_DISAGGREGATION),
    harmless("disaggregation_mode", "sglang", "text", "null", NO_DISAGGREGATION, same=("null",)),
    refused("disaggregation_transfer_backend", "sglang", "text", "nixl", NO_DISAGGREGATION),
    refused("enable_trace_replay", "vllm", "flag", "", "give the tokens as a prompt with prompt_logprobs"),
    refused("enable_return_routed_experts", "vllm", "flag", "", "there are no experts"),
    refused("return_sampling_mask", "vllm", "flag", "", "ask for logprobs"),
    acts(
        *("logprobs_mode", "vllm", "text", "processed_logprobs"),
        "raw_logprobs or processed_logprobs; logits are not returned",
    ),
    harmless("use_tqdm_on_load", "vllm", "flag", "", "loading shows no progress bar", same=(True, False)),
    harmless(
        "ignore_patterns", "vllm", "texts", "original/*", "only the needed files are fetched", tunes=True
    ),
    harmless("max_parallel_loading_workers", "vllm", "int", "1", "there is one GPU", tunes=True),
    harmless("worker_cls", "vllm", "text", "auto", "the engine has no workers", same=("auto",)),
    acts("enable_sleep_mode", "vllm", "flag", "", "allow sleep to release memory"),
    mapped("enable_memory_saver", "sglang", "flag", "", "enable_sleep_mode", "the same"),
    harmless(
        "enable_weights_cpu_backup", "sglang", "flag", "", "backups are always kept", same=(True, False)
    ),
    acts("worker_extension_cls", "vllm", "text", "x.Y", "methods for `collective_rpc`"),
    harmless(
        *("weight_transfer_config", "vllm", "json", '{"backend": "nccl"}'),
        "nccl or ipc: depends on whether `init_info` has an address",
        same=({"backend": "nccl"}, {"backend": "ipc"}),
    ),
)

ENGINE_ROWS = MODEL + ADAPTERS + MEMORY_AND_STEPS + GRAPHS_AND_KERNELS + SPECULATION + SEVERAL_GPUS
