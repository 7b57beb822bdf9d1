"""A model whose greedy answer is known: each token has one successor, whatever came before it.

Its embeddings are one-hot, its layers add nothing, and its output layer is the table of successors.
Printable ASCII counts on ("a" is followed by "bcdef..."); a chat is answered with a greeting, and with a tool
call where there are tools and none has answered yet.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch

END = "<|end|>"
GREETING = ["Hello", " w", b"\xc3", b"\xa9", "rld"]
"""The é comes in two tokens, each of them half a character."""
TOOL_CALL = [
    "Let me look.",
    "\n<tool_",
    "call>\n",
    '{"name": "get_',
    'weather", ',
    '"arguments": {"city":',
    ' "Paris',
    '"}}\n</tool_call>',
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|tools|>' if tools and messages[-1].role != 'tool' else '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|assistant|>", "<|tools|>", END]
SIZE = 320


def write_scripted_model(directory: Path, max_positions: int = 512) -> Path:
    """Write config, weights and tokenizer; the directory."""
    vocabulary, successor = _vocabulary_and_successors()
    _write_tokenizer(directory, vocabulary)
    _write_weights(directory, successor)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": vocabulary[END],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def counted(start: str, count: int) -> str:
    """What the model says after `start`: the printable characters that follow, round and round."""
    first = ord(start) - 32
    return "".join(chr(32 + (first + step) % 95) for step in range(1, count + 1))


def _vocabulary_and_successors() -> tuple[dict[str, int], list[int]]:
    from ostinato.text.token_bytes import _byte_alphabet

    letters = {byte: letter for letter, byte in _byte_alphabet().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    for text in (*(part for part in (*GREETING, *TOOL_CALL) if isinstance(part, str)), *SPECIAL):
        spelled = text if text in SPECIAL else "".join(letters[byte] for byte in text.encode())
        vocabulary[spelled] = len(vocabulary)

    def number(part: str | bytes) -> int:
        if isinstance(part, bytes):
            return part[0]
        spelled = part if part in SPECIAL else "".join(letters[byte] for byte in part.encode())
        return vocabulary[spelled]

    successor = [(token + 1) % 256 for token in range(SIZE)]
    successor[126] = 32
    for script in (["<|assistant|>", *GREETING, END], ["<|tools|>", *TOOL_CALL, END]):
        for part, following in pairwise(script):
            successor[number(part)] = number(following)
    return vocabulary, successor


def _write_tokenizer(directory: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _write_weights(directory: Path, successor: list[int]) -> None:
    from safetensors.torch import save_file

    output = torch.zeros(SIZE, SIZE)
    # At temperature 1 the successor is all but certain, at 2 another token comes one time in five.
    output[successor, torch.arange(SIZE)] = 0.8
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": torch.eye(SIZE),
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": output,
        layer + "input_layernorm.weight": torch.ones(SIZE),
        layer + "post_attention_layernorm.weight": torch.ones(SIZE),
        layer + "self_attn.q_proj.weight": torch.zeros(64, SIZE),
        layer + "self_attn.k_proj.weight": torch.zeros(32, SIZE),
        layer + "self_attn.v_proj.weight": torch.zeros(32, SIZE),
        layer + "self_attn.o_proj.weight": torch.zeros(SIZE, 64),
        layer + "mlp.gate_proj.weight": torch.zeros(16, SIZE),
        layer + "mlp.up_proj.weight": torch.zeros(16, SIZE),
        layer + "mlp.down_proj.weight": torch.zeros(SIZE, 16),
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
