"""vLLM's options that are not flags of Ostinato but mean something to `LLM`, or differ for the server."""

from . import conversions
from .option import PeerOption, acts, harmless, mapped, refused

LLM_ROWS: tuple[PeerOption, ...] = (
    acts("chat_template", "vllm", "text", "{template}", "a file, or the template itself, for `chat`"),
    acts("served_model_name", "vllm", "text", "tiny", "the model's name in `get_metrics`"),
    harmless(
        *("disable_log_stats", "vllm", "flag", "", "`get_metrics` always counts, nothing is logged"),
        same=(True, False),
    ),
    harmless(
        *("enable_log_requests", "vllm", "flag", "", "only the server logs requests"),
        same=(False,),
        tunes=True,
    ),
    harmless("disable_log_requests", "vllm", "flag", "", "the default", same=(True, False)),
    harmless("stream_interval", "vllm", "int", "1", "every token is delivered", same=(1,)),
    harmless(
        *("guided_decoding_backend", "vllm", "text", "auto", "xgrammar is the only backend"),
        same=("auto", "xgrammar"),
    ),
    mapped(
        *("structured_outputs_config", "vllm", "json", '{"backend": "auto"}', None),
        "backend: auto or xgrammar, the only one",
        convert=conversions.structured_outputs_config,
    ),
    mapped(
        *(
            "profiler_config",
            "vllm",
            "json",
            '{"torch_profiler_dir": "p"}',
            "profile_dir",
        ),
        "torch_profiler_dir, delay_iterations and max_iterations of `start_profile`",
        convert=conversions.profiler_config,
    ),
    mapped(
        *("pooler_config", "vllm", "json", '{"pooling_type": "MEAN"}', "pooling"),
        "pooling_type LAST or MEAN; vectors have length 1",
        convert=conversions.pooler_config,
    ),
    refused("reasoning_parser", "vllm", "text", "qwen3", "reasoning stays in the text, between its tags"),
)
