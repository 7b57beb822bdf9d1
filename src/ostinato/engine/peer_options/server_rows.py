"""Options for the HTTP server."""

from typing import Any

from . import option
from .option import PeerOption

BOTH = "vllm sglang"


def acts(*given: Any, **details: Any) -> PeerOption:
    return option.acts(*given, **details, is_servers=True)


def mapped(*given: Any, **details: Any) -> PeerOption:
    return option.mapped(*given, **details, is_servers=True)


def harmless(*given: Any, **details: Any) -> PeerOption:
    return option.harmless(*given, **details, is_servers=True)


def refused(*given: Any, **details: Any) -> PeerOption:
    return option.refused(*given, **details, is_servers=True)


SERVER_ROWS: tuple[PeerOption, ...] = (
    acts("host", BOTH, "text", "127.0.0.1", "address to listen on"),
    acts("port", BOTH, "int", "0", "port to listen on"),
    acts("api_key", BOTH, "texts", "secret", "one or several"),
    mapped("admin_api_key", "sglang", "text", "secret", "admin_key", "key of the admin endpoints"),
    acts("served_model_name", BOTH, "text", "tiny", "a single name"),
    acts("chat_template", BOTH, "text", "{template}", "a file, or the template itself"),
    acts("trust_request_chat_template", "vllm", "flag", "", "requests may bring chat templates"),
    harmless(
        *("chat_template_content_format", "vllm", "text", "auto", "contents are joined into one text"),
        same=("auto", "string"),
    ),
    harmless(
        "response_role", "vllm", "text", "assistant", "answers are the assistant's", same=("assistant",)
    ),
    harmless(
        "enable_auto_tool_choice", "vllm", "flag", "", "tool calls are always enabled", same=(True, False)
    ),
    acts("tool_call_parser", BOTH, "text", "auto", "auto (by the chat template), or a name"),
    refused("reasoning_parser", BOTH, "text", "qwen3", "reasoning stays in the text, between its tags"),
    acts("enable_log_requests", "vllm", "flag", "", "a line per request"),
    acts("per_request_spec_decode_metrics", "vllm", "text", "summary", "draft metrics in each answer"),
    mapped("log_requests", "sglang", "flag", "", "enable_log_requests", "the same"),
    harmless(
        *("log_requests_level", "sglang", "int", "1", "prompts and answers are never logged"),
        same=(0, 1),
        tunes=True,
    ),
    harmless("disable_log_requests", "vllm", "flag", "", "the default", same=(True, False)),
    harmless("max_log_len", "vllm", "int", "100", "prompts are never logged", tunes=True),
    acts("disable_log_stats", "vllm", "flag", "", "no throughput lines"),
    harmless("log_level", "sglang", "text", "info", "there is only one level", same=("info",), tunes=True),
    harmless(
        *("log_level_http", "sglang", "text", "warning", "use --enable-log-requests for HTTP"),
        tunes=True,
    ),
    harmless(
        *("uvicorn_log_level", "vllm", "text", "warning", "use --enable-log-requests for HTTP"),
        tunes=True,
    ),
    harmless(
        *("decode_log_interval", "sglang", "int", "40", "throughput is logged every ten seconds"), tunes=True
    ),
    harmless("enable_metrics", "sglang", "flag", "", "/metrics is always available", same=(True, False)),
    harmless("enable_cache_report", "sglang", "flag", "", "usage always includes it", same=(True, False)),
    harmless(
        *("enable_prompt_tokens_details", "vllm", "flag", "", "usage always includes them"),
        same=(True, False),
    ),
    harmless(
        *("enable_request_id_headers", "vllm", "flag", "", "answers always have X-Request-Id"),
        same=(True, False),
    ),
    acts("stream_interval", BOTH, "int", "1", "tokens per chunk of a stream"),
    harmless(
        "grammar_backend", "sglang", "text", "xgrammar", "xgrammar is the only backend", same=("xgrammar",)
    ),
    harmless(
        *("guided_decoding_backend", "vllm", "text", "auto", "xgrammar is the only backend"),
        same=("auto", "xgrammar"),
    ),
    harmless("skip_server_warmup", "sglang", "flag", "", "every start is warmed up", same=(True, False)),
    harmless("watchdog_timeout", "sglang", "float", "300", "use --request-timeout", tunes=True),
    harmless("tokenizer_worker_num", "sglang", "int", "1", "there is one HTTP process", same=(1,)),
    harmless("api_server_count", "vllm", "int", "1", "there is one HTTP process", same=(1,)),
    harmless("load_balance_method", "sglang", "text", "round_robin", "there is one engine", tunes=True),
    harmless("disable_fastapi_docs", "vllm", "flag", "", "there are none", same=(True, False)),
    refused("ssl_keyfile", BOTH, "text", "key.pem", "terminate TLS in a proxy in front"),
    refused("ssl_certfile", BOTH, "text", "cert.pem", "terminate TLS in a proxy in front"),
    refused("root_path", "vllm", "text", "/api", "strip the prefix in the proxy in front"),
    refused("config", "vllm", "text", "serve.yaml", "write its entries as flags"),
    refused("headless", "vllm", "flag", "", "a server always has its engine"),
    refused("middleware", "vllm", "texts", "x.y", "put a proxy in front"),
    refused("default_chat_template_kwargs", "vllm", "json", "{}", "send chat_template_kwargs in requests"),
)
