"""What one request may cost the others: each field at its largest legal value, times n and prompts, in pairs.

Whatever is asked for, another client's stream has no gap above a second, and the server answers `/health`.
"""

import itertools
import json
import random
import string
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato import SamplingParams
from ostinato.server.openai.cost import check_cost
from ostinato.server.openai.errors import ApiError

from .attacks import Footprint, Witness, settled
from .server_process import ServerProcess

VOCAB = 320
R = random.Random(0)


def words(count: int, length: int) -> list[str]:
    return ["".join(R.choices(string.ascii_letters, k=length)) for _ in range(count)]


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


EVIL = {"^(a+)+$": {"type": "string"}}
NAMED = {"a" * 40 + "!": {"type": "string"}}
LARGEST: dict[str, dict[str, Any]] = {
    "n": {"n": 128},
    "bad_words": {"bad_words": words(1024, 40)},
    "long bad_words": {"bad_words": words(1024, 1024)},
    "logit_bias": {"logit_bias": {str(token): 0.5 for token in range(VOCAB)}},
    "allowed_token_ids": {"allowed_token_ids": list(range(VOCAB))},
    "stop": {"stop": words(16, 4000)},
    "a stop of a megabyte": {"stop": ["a" * 2**20]},
    "stop_token_ids": {"stop_token_ids": list(range(64))},
    "logprobs": {"logprobs": 20},
    "min_tokens": {"min_tokens": 5, "stop": ["b"]},
    "metadata": {"metadata": {str(number): "x" * 100 for number in range(5000)}},
    "guided_choice": {"guided_choice": words(1024, 200)},
    "guided_regex": {"guided_regex": "(a|b|c){1,100}" * 100},
    "guided_json": {"guided_json": {"type": "object", "properties": {w: {} for w in words(1000, 20)}}},
}
"""Fields of a completion."""
PROMPTS = {"prompt": ["a"] * 256}
CHATS: dict[str, dict[str, Any]] = {
    "an expression that backtracks": {
        "tools": [tool({"type": "object", "properties": NAMED, "patternProperties": EVIL})],
        "tool_choice": "required",
    },
    "the same for the one that is chosen": {
        "tools": [tool({"type": "object", "properties": NAMED, "propertyNames": {"pattern": "^(a+)+$"}})],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "brackets": {"tools": [tool({"patternProperties": {"[^" * 15_000: {}}})], "tool_choice": "required"},
    "many patterns": {
        "tools": [tool({"patternProperties": {word: {} for word in words(1200, 30)}})],
        "tool_choice": "required",
    },
    "arguments of earlier calls": {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "[" + "[]," * 10**6 + "0]"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
    },
}


@pytest.fixture
def asked(impatient: ServerProcess) -> ServerProcess:
    impatient.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    return impatient


def ask(server: ServerProcess, path: str, body: dict[str, Any]) -> int:
    """Its status. It is answered, or refused with a reason."""
    answer = server.post(path, {"max_tokens": 4, "temperature": 0, **body}, timeout=120)
    assert answer.status_code in (200, 400, 429), (answer.status_code, answer.text[:300])
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    return int(answer.status_code)


def test_chats_that_cost_much(asked: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}]
    for name, fields in CHATS.items():
        with Witness(asked) as witness:
            ask(asked, "/v1/chat/completions", {"messages": messages, **fields})
        print(name)
        witness.check()


def test_lists_times_completions(asked: ServerProcess) -> None:
    """The product is refused before anything is made of it; a tenth of it is served."""
    body = {"prompt": ["a"] * 32, "n": 128}
    with Witness(asked) as witness:
        assert ask(asked, "/v1/completions", {**body, **LARGEST["logit_bias"]}) == 400
        assert ask(asked, "/v1/completions", {**body, **LARGEST["bad_words"]}) == 400
        assert ask(asked, "/v1/completions", {"prompt": "a", "n": 8, **LARGEST["bad_words"]}) == 200
        ask(asked, "/v1/completions", {"prompt": "a", **LARGEST["long bad_words"]})
    witness.check()
    found = asked.post("/v1/completions", {**body, **LARGEST["allowed_token_ids"]}).json()["error"]
    assert (found["code"], found["param"]) == ("request_too_costly", "allowed_token_ids")


def test_costs_are_those_of_all_completions_in_whatever_order() -> None:
    """Prompts of a request may have parameters of their own, as with SGLang."""
    costly = SamplingParams(allowed_token_ids=list(range(1000)))
    for params in ([costly] * 1100 + [SamplingParams()], [SamplingParams()] + [costly] * 1100):
        asked = [SimpleNamespace(params_of_prompt=each, prompt_ids=[1]) for each in params]
        with pytest.raises(ApiError, match="shorten the lists"):
            check_cost(asked, VOCAB)  # type: ignore[arg-type]
        check_cost(asked[:1000], VOCAB)  # type: ignore[arg-type]


def combinations() -> list[tuple[str, ...]]:
    return [*((name,) for name in LARGEST), *itertools.combinations(LARGEST, 2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prompts", ["one", "many"])
def test_every_field_at_its_largest_and_every_pair(asked: ServerProcess, prompts: str) -> None:
    """A bystander waits for a row at most as long as requests without the fields keep it waiting."""
    before = Footprint.of(asked)
    for names in combinations():
        body: dict[str, Any] = {"prompt": "a"} if prompts == "one" else dict(PROMPTS)
        for name in names:
            body |= LARGEST[name]
        if prompts == "many" and body.get("n"):
            body["prompt"] = ["a"] * 8
        with Witness(asked) as witness:
            ask(asked, "/v1/completions", body)
            time.sleep(0.3)  # a refusal comes at once
        print(names, json.dumps(witness.seen))
        witness.seen["first"] = 0.0  # rows are handed out in the order of arrival
        witness.check()
    asked.wait_until_idle()
    settled(asked, before, 60, memory=0.05)
