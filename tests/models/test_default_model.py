"""SmolLM2-135M-Instruct with its real weights; fetched into the user's cache if it is not there yet."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ostinato.models.errors import DownloadError
from ostinato.models.locate import locate_model
from ostinato.models.weights import load_model
from ostinato.text.tokenizer import Tokenizer

from .small_models import all_logits, dense_attend

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return locate_model(None)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_knows_the_capital_of_france(directory: Path) -> None:
    model, tokenizer = load_model(directory, dtype=torch.float32), Tokenizer.from_directory(directory)
    prompt = tokenizer.encode_chat(QUESTION)
    end = tokenizer.token_id("<|im_end|>")
    answer = [*tokenizer.encode("The capital of France is Paris."), end]
    # Greedy decoding, all steps at once: each token of the answer is the likeliest after those before it.
    ids = torch.tensor(prompt + answer)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), dense_attend(model))
        assert model.logits(hidden[len(prompt) - 1 : -1]).argmax(-1).tolist() == answer


@pytest.mark.slow
def test_logits_and_prompts_equal_those_of_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer.from_directory(directory)
    prompt = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(QUESTION) == prompt
    assert tokenizer.encode_chat(QUESTION) == theirs(prompt, add_special_tokens=False)["input_ids"]

    ids = torch.tensor(tokenizer.encode_chat(QUESTION))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    logits = all_logits(load_model(directory, dtype=torch.float32), ids)
    # Logits reach 38 here; in fp32 two orders of summation differ by about 1e-4.
    assert (logits - expected).abs().max() < 5e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_a_warm_load_imports_neither_gguf_nor_transformers(directory: Path) -> None:
    code = (
        "import sys; from ostinato.models.locate import locate_model; "
        "from ostinato.models.weights import load_model; load_model(locate_model(None)); "
        "assert not {'gguf', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
