"""vLLM's calls on CUDA, from graphs: heads, beams, yarn, recomputation after a reset, a profile."""

import pytest
import torch

from ostinato import LLM, BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def options(device):
    pytest.importorskip("transformers")
    return {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "num_pages": 256}


def test_heads_judge_as_those_of_transformers(tmp_path, options):
    from engine.vllm_models import judged, judging_model

    reference = judging_model(tmp_path, "Qwen2", 3)
    with LLM(str(tmp_path), **options) as llm:
        for output in llm.classify(["Hello", "a longer text than that one " * 4]):
            expected = judged(reference, output.prompt_token_ids).softmax(0)
            assert torch.allclose(torch.tensor(output.outputs.probs), expected, atol=1e-3)
        assert llm.graph_report().replays


def test_beams_are_those_of_a_straightforward_search(tmp_path, options):
    from engine.test_vllm_api import straightforward_beams
    from engine.vllm_models import text_model

    model = text_model(tmp_path)
    prompt = list(range(20, 45))
    with LLM(model.directory, **options) as llm:
        [output] = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
        expected = straightforward_beams(model, prompt, 3, 5, set(), 1.0)
        assert [beam.tokens for beam in output.sequences] == [ids for ids, _ in expected]


def test_yarn_and_a_reset_in_the_middle(tmp_path, options):
    from engine.conftest import TinyModel
    from engine.vllm_models import LONG

    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    model = TinyModel(tmp_path, "Llama", **{**LONG, "rope_parameters": rope})
    prompt = tuple(range(10, 110))
    expected = model.greedy(prompt, 12)
    with LLM(model.directory, **options) as llm:
        engine = llm.llm_engine
        engine.add_request("a", list(prompt), GREEDY)
        for _ in range(5):
            engine.step()
        engine.reset_prefix_cache(reset_running_requests=True)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == expected
        assert llm.engine.core.scheduler.num_preemptions == 1
        llm.verify()


def test_a_profile_has_kernels_in_it(tmp_path, options):
    import gzip

    from engine.vllm_models import text_model

    (tmp_path / "model").mkdir()
    model = text_model(tmp_path / "model")
    with LLM(model.directory, profiler_config={"torch_profiler_dir": str(tmp_path / "p")}, **options) as llm:
        llm.start_profile()
        llm.generate("Hello", GREEDY)
        file = llm.stop_profile()
    with gzip.open(file, "rt") as trace:
        assert '"cat": "kernel"' in trace.read()
