"""Options for speculation. Several of a peer's options set one of Ostinato's, `speculative_config`."""

from typing import Any

from ostinato.graphs.errors import ConfigError

from .option import Fragment, PeerOption, acts, harmless, mapped, refused

_ALGORITHMS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NGRAM": "ngram"}
_USUAL_DRAFTS = 3
"""Default number of drafts of SGLang's algorithms."""
_A_MODEL = "--speculative-algorithm STANDALONE --speculative-draft-model x"
_NO_TRIE = "the request's own text is searched; there is no trie"


def _part(key: str) -> Any:
    return lambda value: {"speculative_config": Fragment({key: value})}


def _algorithm(value: Any) -> dict[str, Any]:
    method = _ALGORITHMS.get(str(value).upper())
    if method is None:
        raise ConfigError(f"speculative_algorithm {value!r} is not supported: use {', '.join(_ALGORITHMS)}")
    part = Fragment({"method": method}, usual={"num_speculative_tokens": _USUAL_DRAFTS})
    return {"speculative_config": part}


def _draft_tokens(value: int) -> dict[str, Any]:
    """SGLang counts the token before the drafts among the verified ones."""
    return {"speculative_config": Fragment({"num_speculative_tokens": value - 1})}


def _load_format(value: str) -> dict[str, Any]:
    return {"speculative_config": Fragment({"draft_load_config": {"load_format": value}})}


def _of_config(name: str, peer: str, kind: str, example: str, key: str, **details: Any) -> PeerOption:
    more = {"convert": _part(key), **details}
    return mapped(name, peer, kind, example, "speculative_config", f"its {key}", **more)


SPECULATION: tuple[PeerOption, ...] = (
    acts(
        *("speculative_config", "vllm", "json", '{"method": "ngram", "num_speculative_tokens": 2}'),
        "methods ngram, draft_model, eagle, eagle3; see speculation.md",
    ),
    _of_config("spec_method", "vllm", "text", "ngram", "method", along="--spec-tokens 2"),
    _of_config("spec_model", "vllm", "text", "x", "model", along="--spec-tokens 2"),
    _of_config("spec_tokens", "vllm", "int", "3", "num_speculative_tokens", along="--spec-method ngram"),
    refused("speculative_model", "vllm", "text", "x", "give speculative_config"),
    mapped(
        *("speculative_algorithm", "sglang", "text", "NGRAM", "speculative_config"),
        "its method: EAGLE, EAGLE3, STANDALONE (draft_model), NGRAM",
        convert=_algorithm,
    ),
    _of_config(
        *("speculative_draft_model_path", "sglang", "text", "x", "model"),
        shorts=("--speculative-draft-model",),
        along="--speculative-algorithm STANDALONE",
    ),
    _of_config("speculative_draft_model_revision", "sglang", "text", "main", "revision", along=_A_MODEL),
    _of_config(
        *("speculative_draft_load_format", "sglang", "text", "dummy", "draft_load_config"),
        convert=_load_format,
        along=_A_MODEL,
    ),
    _of_config(
        "speculative_num_steps",
        "sglang",
        "int",
        "3",
        "num_speculative_tokens",
        along="--speculative-algorithm NGRAM",
    ),
    _of_config(
        *("speculative_num_draft_tokens", "sglang", "int", "4", "num_speculative_tokens"),
        convert=_draft_tokens,
        along="--speculative-algorithm NGRAM",
    ),
    harmless("speculative_eagle_topk", "sglang", "int", "1", "drafts are a chain, not a tree", same=(1,)),
    harmless(
        *("speculative_use_rejection_sampling", "sglang", "flag", ""),
        "a draft is accepted only if the model would have drawn it",
        same=(True, False),
    ),
    harmless(
        *("speculative_accept_threshold_single", "sglang", "float", "1.0", "only exact matches are accepted"),
        same=(1.0,),
    ),
    harmless(
        *("speculative_accept_threshold_acc", "sglang", "float", "1.0", "only exact matches are accepted"),
        same=(1.0,),
    ),
    refused("speculative_token_map", "sglang", "text", "x", "EAGLE-3 heads have their own, d2t"),
    harmless(
        *("speculative_adaptive", "sglang", "flag", "", "the number of drafts adapts automatically"),
        same=(True, False),
    ),
    refused(
        "speculative_adaptive_config", "sglang", "text", "x", "the number of drafts adapts automatically"
    ),
    harmless(
        *("speculative_attention_mode", "sglang", "text", "prefill", "each shape has one kernel"),
        tunes=True,
    ),
    harmless(
        *("speculative_draft_attention_backend", "sglang", "text", "fa3", "the model's backend"), tunes=True
    ),
    refused("speculative_draft_model_quantization", "sglang", "text", "fp8", "drafts have the model's dtype"),
    harmless("speculative_ngram_min_bfs_breadth", "sglang", "int", "1", _NO_TRIE, tunes=True),
    harmless("speculative_ngram_max_bfs_breadth", "sglang", "int", "10", _NO_TRIE, tunes=True),
    harmless("speculative_ngram_match_type", "sglang", "text", "BFS", _NO_TRIE, tunes=True),
    harmless("speculative_ngram_max_trie_depth", "sglang", "int", "18", _NO_TRIE, tunes=True),
    harmless("speculative_ngram_capacity", "sglang", "int", "10000000", _NO_TRIE, tunes=True),
    refused("speculative_ngram_external_corpus_path", "sglang", "text", "/x", _NO_TRIE),
)
