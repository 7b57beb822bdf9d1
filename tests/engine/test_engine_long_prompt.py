"""A prompt of 10,000 tokens over a ladder that ends at 4,096: right, and every step from a graph.

In the fast command on a CPU all of it is an eighth as long.
"""

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import TinyModel, prompts_of
from .expected_steps import Setup, computed_tokens, sampling_of, service_of
from .greedy_reference import assert_greedy
from .test_engine_greedy import assert_all_back

PROMPT, TOKENS, SHORT = 10_000, 8, 100
SCALES = [1] if torch.cuda.is_available() else [8, pytest.param(1, marks=pytest.mark.slow)]
# On a CPU attention inside a full graph gathers the whole context for each token: minutes at this length.
MODES = ["full-and-piecewise", "full", "piecewise"] if torch.cuda.is_available() else ["full-and-piecewise"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Two layers, for positions up to 16,384."""
    return TinyModel(
        tmp_path_factory.mktemp("long"),
        "Llama",
        max_position_embeddings=16_384,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


def setup_for(mode: str, scale: int) -> Setup:
    return Setup(
        mode=mode,
        decode_rungs=(1, 2),
        token_rungs=(256 // scale, 1024 // scale, 2048 // scale, 4096 // scale),
        running=2,
        budget=4096 // scale,
        length=PROMPT // scale + 240,
        pages=1300,
        caching=False,
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", MODES)
def test_10000_tokens_over_a_ladder_of_4096(model: TinyModel, mode: str, scale: int) -> None:
    long, short = prompts_of((PROMPT // scale, SHORT // scale), seed=3)
    how = setup_for(mode, scale)
    with LLM(model.directory, **how.options) as llm:
        [alone] = llm.generate([long], SamplingParams(temperature=0, max_tokens=TOKENS))
        mixed = "full" if mode == "full" else "piecewise"
        decode = ("piecewise", "mixed", 256 // scale) if mode == "piecewise" else ("full", "decode", 1)
        service = service_of(llm)
        # 4096 + 4096 + 1808 tokens, then a token at a time.
        expected = {
            (mixed, "mixed", 4096 // scale): 2,
            (mixed, "mixed", 2048 // scale): 1,
            decode: TOKENS - 1,
        }
        assert service.replays == expected
        assert service.eager == {}
        assert computed_tokens(llm) == PROMPT // scale + TOKENS - 1
        assert sampling_of(llm).steps == (TOKENS if mode == "piecewise" else 1)
        # Beside another: the end of the long prompt and the whole short one share a step.
        together = llm.generate([long, short], SamplingParams(temperature=0, max_tokens=TOKENS))
        steps = how.steps((PROMPT // scale, SHORT // scale), TOKENS)
        assert service_of(llm).since(service) == how.service(steps)
        assert service_of(llm).eager == {}
        assert_all_back(llm)
    assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
    for prompt, output in zip((long, short), together, strict=True):
        assert_greedy(model.reference, prompt["prompt_token_ids"], output.outputs[0].token_ids)
    assert len(set(alone.outputs[0].token_ids)) > 1


@pytest.mark.slow
def test_the_end_of_a_long_prompt_still_sees_its_beginning(model: TinyModel) -> None:
    """Else the test above could pass with a cache that forgets."""
    [prompt] = prompts_of((PROMPT,), seed=3)
    ids = prompt["prompt_token_ids"]
    other = [*reversed(ids[:5000]), *ids[5000:]]
    with torch.no_grad():
        last = [
            model.reference(torch.tensor([each]), logits_to_keep=1).logits[0, -1] for each in (ids, other)
        ]
    assert (last[0] - last[1]).abs().max() > 1e-2
