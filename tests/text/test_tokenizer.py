"""Tokenizer files as models ship them, and chat templates rendered as transformers renders them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.text.errors import TokenizerError
from ostinato.text.gguf_tokenizer import tokenizer_files
from ostinato.text.tokenizer import Tokenizer

from .small_tokenizers import CORPUS, KINDS, byte_level, gguf_metadata, write_files

TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    {%- generation %}
<|{{ message.role }}|>
{{ message.content | trim }}{{ eos_token }}
    {%- endgeneration %}
{%- endfor %}
{%- if tools %}
{{ tools | tojson }}
{%- endif %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "skip"},
    {"role": "user", "content": "Où est <b>'x'</b>?"},
]
TOOLS = [{"type": "function", "function": {"name": "é", "parameters": {"b": 1, "a": "<&>"}}}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
    }
    files = {"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": json.dumps(config)}
    return write_files(files, tmp_path)


def test_special_tokens_and_ends_of_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert Tokenizer.from_directory(directory).eos_token_ids == (2, 7)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_prompts_equal_those_of_transformers(directory: Path, prompt: bool, tools: Any) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt) == expected
    ids = tokenizer.encode_chat(MESSAGES, tools=tools, add_generation_prompt=prompt)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("content", ["Well, ", " Well,\n", "Well"])
def test_a_message_that_goes_on_ends_as_with_transformers(directory: Path, content: str, cuts: bool) -> None:
    """Where a template cuts off blanks, one at the end would be what the model has never seen there."""
    from transformers import AutoTokenizer

    template = TEMPLATE if cuts else TEMPLATE.replace(" | trim", "")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    found = Tokenizer.from_directory(directory).apply_chat_template(
        messages, template=template, add_generation_prompt=False, continue_final_message=True
    )
    assert found == expected


def test_templates_by_name_and_in_a_file(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "tools"
    (directory / "chat_template.jinja").write_text("{{ mood }} file")
    assert Tokenizer.from_directory(directory).apply_chat_template(MESSAGES, mood="fine") == "fine file"


def test_a_refusal_of_the_template_reaches_the_user(directory: Path) -> None:
    with pytest.raises(TokenizerError, match="refused the messages: unknown role pirate"):
        Tokenizer.from_directory(directory).apply_chat_template([{"role": "pirate", "content": "arr"}])


def test_templates_run_in_a_sandbox(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(TokenizerError, match="refused the messages"):
        Tokenizer.from_directory(directory).apply_chat_template(MESSAGES)


def test_broken_and_absent_files_are_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="chat template is broken"):
        Tokenizer.from_directory(directory).apply_chat_template(MESSAGES)
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.from_directory(directory).apply_chat_template(MESSAGES)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(directory)


def test_what_no_text_can_be_written_with_is_refused_at_once(directory: Path) -> None:
    """A server would start with it, and fail at every request."""
    layout = json.loads((directory / "tokenizer.json").read_text()) | {"decoder": None}
    (directory / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(TokenizerError, match=f"{directory}: a tokenizer with decoder None is not supported"):
        Tokenizer.from_directory(directory)


def test_loading_imports_neither_torch_nor_transformers(directory: Path) -> None:
    code = (
        "import sys; from ostinato.text.tokenizer import Tokenizer; "
        f"Tokenizer.from_directory({str(directory)!r}).encode_chat([{{'role': 'user', 'content': 'x'}}]); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_survives_gguf(kind: str, tmp_path: Path) -> None:
    rebuilt = Tokenizer.from_directory(write_files(tokenizer_files(gguf_metadata(kind)), tmp_path))
    original = KINDS[kind]()
    assert rebuilt.eos_token_ids == (2,)
    begin = [1] if kind == "sentencepiece" else []

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(st.text(max_size=30), st.sampled_from([*CORPUS, "a </s> b <tool é>  c"])))
    def encodes_the_same(text: str) -> None:
        assert rebuilt.encode(text) == begin + original.encode(text).ids

    encodes_the_same()


@pytest.mark.parametrize(
    ("change", "before", "behind"),
    [
        ({}, [], []),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_texts_of_gguf_begin_and_end_as_with_llama_cpp(
    change: dict[str, Any], before: list[int], behind: list[int], tmp_path: Path
) -> None:
    """Most files of Llama 3 do not say that texts begin with a token, and llama.cpp knows it."""
    more = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    metadata = gguf_metadata("byte-level") | more
    tokenizer = Tokenizer.from_directory(write_files(tokenizer_files(metadata), tmp_path))
    plain = byte_level().encode("brown").ids
    assert tokenizer.encode("brown") == before + plain + behind
    assert tokenizer.encode_pair("brown", "brown") == 2 * (before + plain + behind)
    assert tokenizer.encode("brown", add_special_tokens=False) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported; supported are gpt-2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_rebuilt_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_files(gguf_metadata("byte-level") | change)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "Ġdogs", "!!", "Ċ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "4", "Ġdogs", "!!Ċ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "Ġdogs", "!!Ċ"]),
        ("gpt-2", ["I", "'m", "Ġ1234", "Ġdogs", "!!", "Ċ"]),
    ],
)
def test_each_pre_tokenizer_splits_in_its_way(pre: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer as Backend

    files = tokenizer_files(gguf_metadata("byte-level") | {"tokenizer.ggml.pre": pre})
    split = Backend.from_str(files["tokenizer.json"]).pre_tokenizer.pre_tokenize_str("I'm 1234 dogs!!\n")
    assert [piece for piece, _ in split] == pieces
