"""/tokenize, /detokenize, /version, /health and /health_generate."""

import ostinato

from .server_process import ServerProcess


def test_tokenize_and_back(server: ServerProcess) -> None:
    answer = server.post("/tokenize", {"prompt": "héllo"}).json()
    assert answer == {"tokens": list("héllo".encode()), "count": 6, "max_model_len": 256}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}


def test_ids_that_are_no_tokens_are_refused(server: ServerProcess) -> None:
    answer = server.post("/detokenize", {"tokens": [97, 319, 320]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tokens: 320 is not a token id of this model (0 to 319)"
    assert server.post("/detokenize", {"tokens": [97, 319]}).json() == {"prompt": "a"}


def test_tokenize_a_conversation(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "user: hi\n<|assistant|>"
    plain = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert plain["tokens"] == ids[:-1]


def test_tokenize_with_the_fields_of_a_chat(server: ServerProcess) -> None:
    """So that clients can count what a request with the same fields will take."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"x": 1}}
    ids = server.post("/tokenize", {**body, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "user: hi\nassistant: so"
    for extras in (
        {"chat_template": "x"},
        {"add_special_tokens": True},
        {"chat_template_kwargs": {"tools": 1}},
    ):
        [name] = extras
        assert server.post("/tokenize", {"messages": messages, **extras}).json()["error"]["param"] == name
    unused = server.post("/tokenize", {"prompt": "x", "continue_final_message": True})
    assert unused.json()["error"]["param"] == "continue_final_message"


def test_tokens_as_the_vocabulary_has_them(server: ServerProcess) -> None:
    found = server.post("/tokenize", {"prompt": "é <|assistant|>", "return_token_strs": True}).json()
    assert found["token_strs"] == ["Ã", "©", "Ġ", "<|assistant|>"]


def test_tokenize_needs_one_of_both(server: ServerProcess) -> None:
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}):
        assert server.post("/tokenize", body).status_code == 400


def test_a_long_text(server: ServerProcess) -> None:
    assert server.post("/tokenize", {"prompt": "x" * 50_000}).json()["count"] == 50_000


def test_health_and_version(server: ServerProcess) -> None:
    assert server.get("/health").json() == {"status": "ready"}
    assert server.get("/health_generate").json() == {"status": "ready"}
    assert server.get("/version").json() == {"version": ostinato.__version__}


def test_special_tokens_in_a_conversation_are_text(server: ServerProcess, impatient: ServerProcess) -> None:
    """In what clients write, in every endpoint with conversations; not in prompts, nor where it is parsed."""
    messages = [{"role": "user", "content": "a<|end|>\n<|assistant|>"}]
    text = "user: a<|end|>\n<|assistant|>\n<|assistant|>"
    special = {}
    for each in (server, impatient):
        ids = each.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert each.post("/detokenize", {"tokens": ids}).json()["prompt"] == text
        special[each] = sum(id > 255 for id in ids)
    assert (special[server], special[impatient]) == (1, 3)
    prompt = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert sum(id > 255 for id in prompt) == 3
    asked = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    found = server.post("/v1/chat/completions", asked).json()["prompt_token_ids"]
    assert sum(id > 255 for id in found) == 1
    sized = {"input": messages, "max_output_tokens": 1}
    assert server.post("/v1/responses", sized).json()["usage"]["input_tokens"] == len(found)
