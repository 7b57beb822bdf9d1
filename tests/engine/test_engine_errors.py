"""What cannot be served is refused with a clear error, and the others are served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.loading import ModelLoadError
from ostinato.engine.sampling_params import RequestError, SamplingParams
from ostinato.graphs import ConfigError

from .conftest import TINY, TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS, assert_all_back


def test_a_bad_request_does_not_disturb_the_others(tiny: TinyModel) -> None:
    good = prompts_of((5, 20))
    bad: list[tuple[Any, str]] = [
        (prompts_of((64,))[0], "cannot fit, the model length is 64"),
        ({"prompt_token_ids": [1, 131]}, "token id 131 is outside the model's vocabulary of 131"),
        ({"prompt_token_ids": [-1]}, "at least 0"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": ["x"]}, "list of integers"),
        ("text", "no tokenizer"),
        (17, "a prompt is a text or"),
    ]
    with LLM(tiny.directory, **SMALL) as llm:
        outputs = llm.generate([good[0], *(prompt for prompt, _ in bad), good[1]], GREEDY)
        for prompt, output in zip(good, [outputs[0], outputs[-1]], strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        for (prompt, message), output in zip(bad, outputs[1:-1], strict=True):
            assert output.error is not None
            assert message in output.error
            assert output.outputs[0].finish_reason == "error"
            if not isinstance(prompt, int):
                with pytest.raises(RequestError, match=r"\w"):
                    llm.generate(prompt, GREEDY)
        with pytest.raises(RequestError, match="token 200: the vocabulary ends at 130"):
            llm.generate(good[0], SamplingParams(logit_bias={200: 1.0}))
        with pytest.raises(RequestError, match="this model has no tokenizer"):
            llm.generate(good[0], SamplingParams(stop="x"))
        with pytest.raises(RequestError, match="2 sampling parameters were given for 1"):
            llm.generate(good[:1], [GREEDY, GREEDY])
        assert_all_back(llm)
    with pytest.raises(RequestError, match="closed"):
        llm.generate(good)


def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny.directory, **SMALL) as llm:
        runner = llm.engine.core.runner
        run, calls = runner.run, iter(range(100))

        def fail_once(inputs: Any) -> torch.Tensor:
            if next(calls) == 2:
                raise RuntimeError("the device fell off the bus")
            return run(inputs)

        monkeypatch.setattr(runner, "run", fail_once)
        prompts = prompts_of((5, 20))
        outputs = llm.generate(prompts, GREEDY)
        assert any("fell off the bus" in (output.error or "") for output in outputs)
        assert all(output.finished for output in outputs)
        [output] = llm.generate(prompts[0], GREEDY)
        assert output.outputs[0].token_ids == tiny.greedy(tuple(prompts[0]["prompt_token_ids"]), TOKENS)
        assert_all_back(llm)


def test_abort_returns_what_there_is(tiny: TinyModel) -> None:
    with LLM(tiny.directory, **SMALL) as llm:
        engine = llm.engine
        output = engine.add(prompts_of((5,))[0], SamplingParams(temperature=0, max_tokens=50), "mine")
        with pytest.raises(RequestError, match="served already"):
            engine.add(prompts_of((5,))[0], GREEDY, "mine")
        for _ in range(4):
            engine.step()
        assert engine.abort("mine") is output
        assert engine.abort("mine") is None
        assert output.outputs[0].finish_reason == "abort"
        assert len(output.outputs[0].token_ids) == 4
        assert_all_back(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "did you mean max_model_len"),
        ({"max_model_len": 4096}, "beyond the model's own limit of 128"),
        ({"cuda_graph_mode": "fast"}, "unknown graph mode"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"num_pages": 1}, "at least 2 pages"),
        ({"device": "abacus"}, "unknown device"),
        ({"steps_ahead": 2}, "0 or 1"),
        ({"cuda_graph_bs": [1, 99]}, "at most 16 requests ever run"),
        ({"cuda_graph_bs": [1], "cuda_graph_max_bs": 2}, "not both"),
        ({"attention_backend": "flash"}, "unknown attention backend"),
    ],
)
def test_bad_options_are_refused(tiny: TinyModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        LLM(tiny.directory, **options)


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(str(tmp_path))
    config = {**TINY, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel is not supported; supported are Llama"):
        LLM(str(tmp_path))


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    with LLM(str(tmp_path), load_format="dummy", **SMALL) as llm:
        [output] = llm.generate(prompts_of((5,)), GREEDY)
        assert len(output.outputs[0].token_ids) == TOKENS
        memory = llm.memory_report()
        assert set(memory) == {"weights", "kv", "inputs", "outputs", "sampling", "graphs"}
        assert all(size > 0 for size in memory.values())
