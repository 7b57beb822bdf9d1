"""docs/flags.md, from the table in the code. Run as a program it writes the file."""

from pathlib import Path

from ostinato.engine.peer_options.llm_rows import LLM_ROWS
from ostinato.engine.peer_options.option import Effect, PeerOption
from ostinato.engine.peer_options.translation import BY_NAME, ROWS

FILE = Path(__file__).parents[2] / "docs" / "flags.md"

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

MOST_USED = {
    "vllm": (
        *("port", "max_model_len", "tensor_parallel_size", "enforce_eager", "kv_transfer_config"),
        *("gpu_memory_utilization", "trust_remote_code", "block_size", "speculative_config"),
        *("data_parallel_size", "load_format", "host", "max_num_seqs", "hf_overrides"),
        *("allowed_local_media_path", "pipeline_parallel_size", "compilation_config"),
        *("enable_request_id_headers", "seed", "reasoning_parser", "enable_lora", "dtype", "runner"),
        *("enable_expert_parallel", "max_num_batched_tokens", "chat_template", "config"),
        *("distributed_executor_backend", "enable_prefix_caching", "nnodes", "node_rank", "master_addr"),
        *("quantization", "enable_auto_tool_choice", "tool_call_parser", "limit_mm_per_prompt"),
        *("attention_backend", "tokenizer", "served_model_name", "api_key", "kv_cache_dtype"),
        *("enable_chunked_prefill", "generation_config", "download_dir", "swap_space"),
    ),
    "sglang": (
        *("model_path", "port", "host", "trust_remote_code", "tp_size", "mem_fraction_static"),
        *("reasoning_parser", "attention_backend", "tool_call_parser", "device", "max_running_requests"),
        *("nnodes", "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps"),
        *("speculative_eagle_topk", "quantization", "node_rank", "chunked_prefill_size"),
        *("disaggregation_mode", "dtype", "disable_radix_cache", "enable_dp_attention", "dp_size"),
        *("dist_init_addr", "max_prefill_tokens", "cuda_graph_bs", "context_length", "log_level"),
        *("watchdog_timeout", "page_size", "enable_torch_compile", "disable_cuda_graph"),
        *("served_model_name", "ep_size", "base_gpu_id", "load_balance_method", "tokenizer_worker_num"),
        *("load_format", "sampling_backend", "kv_cache_dtype", "max_total_tokens", "enable_metrics"),
        *("torch_compile_max_bs", "tokenizer_path", "chat_template"),
    ),
}
"""In the order of how often they stand behind `vllm serve` and `sglang.launch_server` in the documentation
and scripts of the two repositories (August 2026), without those of machines that are no GPUs, of multimodal
and of several-node serving; at the end some that quick starts use."""

_WORDS = {
    Effect.ACTS: "supported",
    Effect.MAPPED: "mapped",
    Effect.HARMLESS: "accepted",
    Effect.REFUSED: "refused",
}


def written() -> str:
    """The whole page."""
    return HEAD + "".join(_section(peer) for peer in NAMES) + _others() + _of_llm()


def _section(peer: str) -> str:
    rows = [BY_NAME[name] for name in MOST_USED[peer]]
    passing = sum(not row.stops_the_start for row in rows)
    title = f"## {NAMES[peer]}: the {len(rows)} most used\n\n{passing} of them do not prevent startup.\n\n"
    return title + _table(rows)


def _others() -> str:
    shown = {*MOST_USED["vllm"], *MOST_USED["sglang"]}
    rows = [row for row in ROWS if row.name not in shown]
    return "## Other known flags\n\n" + _table(rows, peers=True).rstrip("\n") + "\n"


def _of_llm() -> str:
    lines = ["| keyword | effect | |", "|---|---|---|"]
    for row in LLM_ROWS:
        word = "supported" if row.effect is Effect.MAPPED else _WORDS[row.effect]
        lines.append(f"| `{row.name}` | {word} | {row.text} |")
    title = "\n## Keywords of `LLM` that are not flags, or differ from the flag\n\n"
    return title + "\n".join(lines) + "\n"


def _table(rows: list[PeerOption], *, peers: bool = False) -> str:
    head = "| flag | from | effect | |" if peers else "| flag | effect | |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for row in rows:
        of = f" {', '.join(NAMES[peer] for peer in row.peers)} |" if peers else ""
        flags = ", ".join(f"`{flag}`" for flag in row.flags)
        lines.append(f"| {flags} |{of} {_fate(row)} | {row.text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n\n"


def _fate(row: PeerOption) -> str:
    match row.effect:
        case Effect.MAPPED if row.becomes:
            return f"becomes `--{row.becomes.replace('_', '-')}`"
        case Effect.MAPPED:
            return "becomes several options"
        case Effect.HARMLESS if row.tunes:
            return "ignored, with a warning"
        case Effect.HARMLESS if sorted(map(str, row.same)) == ["False", "True"]:
            return "accepted"
        case Effect.HARMLESS:
            values = row.same if len(row.same) < 6 else (f"{row.same[0]} to {row.same[-1]}",)
            return "accepted: " + ", ".join(f"`{value}`" for value in values)
    return _WORDS[row.effect]


HEAD = """# Flags and keywords of vLLM and SGLang

`ostinato serve` takes the command lines of `vllm serve` and of `python -m sglang.launch_server`; \
`python -m ostinato.launch_server` is the same command. `generate`, `chat`, `verify` and `bench` take the \
engine's flags. `LLM(...)` takes the same names as keywords, with underscores. \
[`engine/peer_options/`](../src/ostinato/engine/peer_options) has the table; \
`python tests/engine/peer_options_document.py` writes this page from it, and a test holds both to the actual \
behaviour.

- **supported**: Ostinato has the same option. **becomes**: it has another name here; giving both names is \
refused.
- **accepted**: for these values the option asks for the existing behaviour; other values are refused. \
**ignored, with a warning**: no result depends on it, and a line says that it has no effect.
- **refused**: by name, with the alternative. Unknown flags are refused as well.

Syntax:

- Names may have dashes or underscores; values follow a space or `=`.
- Lists use spaces or commas (`--cuda-graph-bs 1 2 4`).
- Numbers may be written as `4k` (4000) or `4K` (4096).
- Keys of JSON options may follow a dot (`-cc.cudagraph_mode=FULL`).
- Switches are `--x`, `--no-x` or `--x=false`.
- The model may be a positional argument, before lists of texts: `ostinato serve MODEL --api-key one two`.

"""

if __name__ == "__main__":
    FILE.write_text(written())
