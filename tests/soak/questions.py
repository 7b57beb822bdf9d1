"""What clients ask during a soak: every kind of request, in a fixed number of variants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.conftest import TinyModel, write_byte_tokenizer
from models.small_adapters import ALL, write_adapter

KEYS = ("first-key", "second-key")
ADMIN_KEY = "operator-key"
NAME = "soaked"
ADAPTERS = ("sql", "law")
FLAGS = (
    *("--served-model-name", NAME, "--port", "0", "--max-model-len", "384"),
    *("--max-running-requests", "6", "--num-pages", "80", "--chunked-prefill-size", "32"),
    *("--cuda-graph-bs", "1,6", "--cuda-graph-prefill-tokens", "16,32"),
    *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--dtype", "float32"),
    *("--enable-sleep-mode", "--restart-engine", "--disable-log-stats", "--client-timeout", "5"),
    *(part for key in KEYS for part in ("--api-key", key)),
    *("--admin-key", ADMIN_KEY),
)
"""Pages for a few requests only, and one adapter at a time: both come and go all the time."""
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|turn|>{% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}, "c": {"maximum": 999, "minimum": 0}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA["properties"]["c"]["type"] = "integer"  # type: ignore[index]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"]},
    },
}


@dataclass(frozen=True, eq=False)
class Question:
    """One request, which has one right answer."""

    name: str
    path: str
    body: Any
    """JSON; or bytes that are sent as they are."""
    status: int = 200
    can_stream: bool = False
    key: str = KEYS[0]

    @property
    def content(self) -> bytes:
        """What is sent."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def streaming(self) -> Question:
        """Asks the same for a stream."""
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        return Question(f"{self.name}, streamed", self.path, {**self.body, **fields}, key=self.key)


def write_model(place: Path) -> list[str]:
    """Writes a small random model and two adapters; returns the flags of a server for them."""
    model = TinyModel(place / "model", "Llama", max_position_embeddings=512, vocab_size=259)
    write_byte_tokenizer(place / "model", characters=256)
    config = place / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    modules = []
    for seed, name in enumerate(ADAPTERS):
        write_adapter(place / name, model.reference, seed=seed, rank=4 + seed, targets=ALL)
        modules.append(f"{name}={place / name}")
    return ["--model", str(place / "model"), *FLAGS, "--lora-modules", *modules]


SHARED = "The quick brown fox jumps over the lazy dog, again and again, and nobody counts how often. "
"""What many prompts begin with."""
ANSWERED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 4},
    "filtered": {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "biased": {"logit_bias": {"5": 6.0, "9": 6.5}},
    "three choices": {"n": 3, "temperature": 1.0, "seed": 12},
    "log probabilities": {"logprobs": 3, "temperature": 0.8, "seed": 1},
    "log probabilities of the prompt": {"prompt_logprobs": 2, "echo": True},
    "stop strings": {"stop": ["e", "Q", "12"], "temperature": 1.0, "seed": 8},
    "stop tokens": {"stop_token_ids": list(range(0, 60, 5)), "temperature": 1.0, "seed": 6},
    "few allowed": {"allowed_token_ids": [3, 5, 7, 9, 11], "bad_words": ["&(", "*"]},
    "expression": {"guided_regex": "[0-9]{1,9}"},
    "grammar": {"guided_grammar": 'root ::= "a" root | "b"', "temperature": 1.0, "seed": 3},
    "choice": {"guided_choice": ["yes", "no", "perhaps"]},
    "salted": {"cache_salt": "mine"},
}


def _completions() -> list[Question]:
    found = []
    for number, (kind, fields) in enumerate(ANSWERED.items()):
        for variant in range(4):
            prompt = SHARED[: (0, 33, 70, 90)[variant]] + f"{kind} {variant}" * (1 + variant)
            body = {"prompt": prompt, "max_tokens": 5 + 7 * variant, "temperature": 0.0, **fields}
            name = (NAME, ADAPTERS[0], NAME, ADAPTERS[1])[(number + variant) % 4]
            streams = not {"prompt_logprobs", "echo"} & fields.keys()
            asked = Question(
                kind, "/v1/completions", {**body, "model": name}, can_stream=streams, key=KEYS[variant % 2]
            )
            found.append(asked)
    return found


def _chats() -> list[Question]:
    found = []
    kinds: dict[str, dict[str, Any]] = {
        "chat": {},
        "chat, two choices": {"n": 2, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2},
        "chat, schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "temperature": 1.0,
            "seed": 2,
        },
        "chat, tool": {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "seed": 4},
        "chat, tools": {"tools": [TOOL], "parallel_tool_calls": False},
    }
    for kind, fields in kinds.items():
        for variant in range(2):
            messages = [{"role": "user", "content": SHARED[: 60 * variant] + kind}]
            if variant:
                messages += [{"role": "assistant", "content": "So?"}, {"role": "user", "content": "Go on."}]
            body = {"messages": messages, "max_tokens": 60, "temperature": 0.0, **fields}
            found.append(Question(kind, "/v1/chat/completions", body, can_stream=True, key=KEYS[variant]))
    return found


def _others() -> list[Question]:
    sampling = {"temperature": 0, "max_new_tokens": 9}
    messages = [{"role": "user", "content": "tokens?"}]
    return [
        Question("vectors", "/v1/embeddings", {"input": ["one", "two " * 20], "pooling": "mean"}),
        Question("vectors by an adapter", "/v1/embeddings", {"input": [SHARED], "model": ADAPTERS[1]}),
        Question("scores", "/score", {"text_1": "sea", "text_2": ["sky", SHARED]}),
        Question("responses", "/v1/responses", {"input": "so", "temperature": 0, "max_output_tokens": 20}),
        Question("generate", "/generate", {"text": SHARED, "sampling_params": sampling}),
        Question("prompts", "/v1/completions", {"prompt": ["a", "b", SHARED], "temperature": 0}),
        Question("tokens", "/tokenize", {"messages": messages}),
        Question("long text", "/tokenize", {"prompt": "long " * 15_000}),
    ]


def _mistakes() -> list[Question]:
    completion = {"prompt": "a", "max_tokens": 4}

    def wrong(what: str, status: int = 400, **fields: Any) -> Question:
        return Question(what, "/v1/completions", {**completion, **fields}, status)

    return [
        wrong("an unknown field", made_up=1),
        wrong("a number too large", top_p=7),
        wrong("a longer answer than fits", max_tokens=5000),
        wrong("a longer prompt than fits", prompt=SHARED * 9),
        wrong("an expression that is none", guided_regex="(("),
        wrong("a grammar that is none", guided_grammar="root ::= ("),
        wrong("an unknown model", 404, model="nobody"),
        wrong("bad words without end", bad_words=["a" * 60_000] * 3),
        wrong("too many choices", n=100_000, temperature=1.0),
        Question("no JSON", "/v1/completions", b'{"prompt": ', 400),
        Question("half a character", "/v1/completions", b'{"prompt": "\\ud800"}', 400),
        Question("deep", "/v1/completions", b"[" * 5000, 400),
        Question("no such place", "/v1/nowhere", {}, 404),
        Question("no key", "/v1/completions", completion, 401, key="guessed"),
        Question("no operator", "/sleep?level=1", None, 401),
    ]


def all_questions() -> list[Question]:
    """Each whole; and as a stream where it can be one."""
    whole = [*_completions(), *_chats(), *_others(), *_mistakes()]
    return [*whole, *(question.streaming() for question in whole if question.can_stream)]


def as_client(key: str) -> dict[str, str]:
    """The header of who has a key."""
    return {"Authorization": f"Bearer {key}"}
