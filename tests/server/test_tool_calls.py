"""Tool calls in text, however the text is cut into pieces."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.server.openai.tool_calls.formats import kind_of_model
from ostinato.server.openai.tool_calls.llama import LlamaToolCalls
from ostinato.server.openai.tool_calls.parser import ToolCallParser
from ostinato.server.openai.tool_calls.qwen import QwenToolCalls

Calls = list[tuple[str, str]]


def llama() -> LlamaToolCalls:
    return LlamaToolCalls(frozenset({"f", "g"}))


def read(make: Callable[[], ToolCallParser], pieces: list[str]) -> tuple[str, Calls]:
    parser, content = make(), ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for parsed in (*map(parser.push, pieces), parser.finish()):
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.index not in names, "a name comes once"
                names[call.index] = call.name
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert list(names) == list(range(len(names)))
    assert parser.num_calls == len(names)
    return content, [(names[index], arguments[index]) for index in names]


QWEN = [
    ("just text ", "just text ", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        'Look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<", "b": {"c": [1]}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "g"}\n</tool_call>\n',
        "Look.",
        [("f", '{"a": "}\\"<", "b": {"c": [1]}}'), ("g", '{"x": 1}')],
    ),
    ("<tool_call>nonsense</tool_call> more", "<tool_call>nonsense</tool_call> more", []),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call> and so', "and so", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\"</tool_call>, <tool_call>"}}\n</tool_call>\nso',
        "so",
        [("f", '{"a": "\\"</tool_call>, <tool_call>"}')],
    ),
    (
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    (  # a string that was never closed ends with its line
        '<tool_call>\n{"name": "f", "arguments": {"a": "cut}\n</tool_call>\nso',
        "so",
        [("f", '{"a": "cut}\n')],
    ),
    ('<tool_call>no "</tool_call> more', '<tool_call>no "</tool_call> more', []),
    ('a <tool <b <tool_call>{"na', 'a <tool <b <tool_call>{"na', []),
    ('<tool_call>{"name": "\\q", "arguments": {}}</tool_call>', None, []),
]
LLAMA = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ('{"type": "function", "name": "f", "parameters": {"q": "}"}}\n', "", [("f", '{"q": "}"}')]),
    ('{"x": 1} is an object', '{"x": 1} is an object', []),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('I say {"name": "f"', 'I say {"name": "f"', []),
    ('{"parameters": {"a": [1, {"b": 2}]}, "name": "g"}', "", [("g", '{"a": [1, {"b": 2}]}')]),
]
CASES = [(QwenToolCalls, *case) for case in QWEN] + [(llama, *case) for case in LLAMA]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_calls_are_found_in_whole_answers(
    make: Callable[[], ToolCallParser], text: str, content: str | None, calls: Calls
) -> None:
    found_content, found_calls = read(make, [text])
    assert found_content == (text if content is None else content)
    assert found_calls == calls


@given(case=st.sampled_from(CASES), data=st.data())
def test_calls_do_not_depend_on_how_the_text_is_cut(case: tuple, data: st.DataObject) -> None:
    make, text, _, _ = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make, pieces) == read(make, [text])


@given(
    pieces=st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", ', "{", "}", '"', "x", " "])
    )
)
def test_any_text_ends_in_something(pieces: list[str]) -> None:
    for make in (QwenToolCalls, llama):
        content, calls = read(make, pieces)
        assert content or calls or not "".join(pieces).strip()


def test_arguments_stream_as_they_are_written() -> None:
    parser = QwenToolCalls()
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    assert "".join(call.arguments for call in parser.push("one ").calls) == "one "
    assert "".join(call.arguments for call in parser.push("two").calls) == "two"


def test_the_kind_is_found_in_the_tokenizer_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert kind_of_model(tmp_path) == "none"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|python_tag|>"}))
    assert kind_of_model(tmp_path) == "llama"
    (tmp_path / "chat_template.jinja").write_text("<tool_call>")
    assert kind_of_model(tmp_path) == "qwen"
