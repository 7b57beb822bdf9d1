"""Drafts from graphs and pages are those of a loop that computes everything again for each of them."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.small_drafts import AUX_LAYERS, PaperHead, head_config, head_weights, save_head
from models.small_models import dense_attend, saved_model
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import IntArray
from ostinato.engine.speculating.eagle_graphs import EagleGraphManager
from ostinato.models.taps import Taps
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

DRAFTS = 4
SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "max_running_requests": 3,
    "chunked_prefill_size": 16,
    "cuda_graph_bs": (3,),
    "cuda_graph_prefill_tokens": (16,),
    "num_pages": 40,
    "enable_prefix_caching": False,
    "enable_cudagraph_gc": True,
}


class Chain(NamedTuple):
    """What was drafted for a row."""

    row: int
    length: int
    last: int
    drafts: list[int]


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[Chain]:
    """All that are drafted, in the order in which they are."""
    found: list[Chain] = []
    run = EagleGraphManager.run

    def noted(self: EagleGraphManager, rows: IntArray, num_drafts: int) -> None:
        run(self, rows, num_drafts)
        state = self._rows
        found.extend(
            Chain(
                row, int(state["lengths"][row]), int(state["last_tokens"][row]), state["drafts"][row].tolist()
            )
            for row in rows.tolist()
        )

    monkeypatch.setattr(EagleGraphManager, "run", noted)
    return found


def naive_heads(method: str, weights: dict[str, Tensor], target: Transformer, text: list[int]) -> list[int]:
    """The drafts behind a text."""
    assert target.lm_head is not None
    paper = PaperHead(method, weights, target.embed_tokens.weight, target.lm_head.weight)
    ids, taps = torch.tensor(text), Taps(AUX_LAYERS)
    hidden = target(ids[:-1], torch.arange(len(text) - 1), dense_attend(target), taps=taps)
    carried = paper.combined(hidden if method == "eagle" else taps.features())
    tokens = ids[1:]
    for _ in range(DRAFTS):
        logits, following = paper(tokens, carried)
        tokens = torch.cat([tokens, paper.to_target(logits[-1:].argmax(-1))])
        carried = torch.cat([carried, following[-1:]])
    return tokens[-DRAFTS:].tolist()


def naive_model(draft: Transformer, text: list[int]) -> list[int]:
    tokens = torch.tensor(text)
    for _ in range(DRAFTS):
        hidden = draft(tokens, torch.arange(len(tokens)), dense_attend(draft))
        tokens = torch.cat([tokens, draft.logits(hidden[-1:]).argmax(-1)])
    return tokens[-DRAFTS:].tolist()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_drafts_are_those_of_a_naive_loop(method: str, chains: list[Chain], tmp_path: Path) -> None:
    """At every acceptance length, which here is a matter of chance: what is accepted becomes the text."""
    saved_model("llama", tmp_path / "target")
    target = load_model(tmp_path / "target", dtype=torch.float32)
    weights = head_weights(method) if method != "draft_model" else {}
    if weights:
        save_head(tmp_path / "draft", head_config(method), weights)
    else:
        saved_model("qwen3", tmp_path / "draft", num_hidden_layers=2)
    asked = {"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": DRAFTS}
    asked |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.3, 0.15]}
    sampling = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    batches = [[list(range(3, 43))], [[1, 2, 3, 4, 5], [90, 8], [7, 7, 7]]]
    with LLM(
        str(tmp_path / "target"), speculative_config={**asked, "disable_adaptive": True}, **SMALL
    ) as llm:
        for prompts in batches:
            chains.clear()
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(given, sampling, use_tqdm=False)
            texts = {
                len(prompt): [*prompt, *output.outputs[0].token_ids]
                for prompt, output in zip(prompts, outputs, strict=True)
            }
            firsts = {chain.row: chain.length for chain in reversed(chains)}
            by_row = {row: texts[length] for row, length in firsts.items()}
            _compare(method, weights, target, tmp_path / "draft", chains, by_row)
        speculation = llm.engine.core.runner.speculation
        assert speculation is not None
        found = speculation.counts.read()
        accepted = (found.num_drafts, *found.accepted_per_position, 0)
        assert all(more > less for more, less in pairwise(accepted)), accepted


def test_a_target_with_windows_gives_no_page_back_that_its_draft_reads(
    chains: list[Chain], tmp_path: Path
) -> None:
    """The target looks back 16 tokens, the draft on all of them, in pages of the same numbers."""
    saved_model("mistral", tmp_path / "target", sliding_window=16, max_position_embeddings=256)
    saved_model("qwen3", tmp_path / "draft", num_hidden_layers=2, max_position_embeddings=256)
    target = load_model(tmp_path / "target", dtype=torch.float32)
    asked = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": DRAFTS}
    options = {**SMALL, "max_model_len": 192, "chunked_prefill_size": 64}
    prompt = [(7 * at) % 90 + 3 for at in range(150)]
    with LLM(
        str(tmp_path / "target"), speculative_config={**asked, "disable_adaptive": True}, **options
    ) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
    text = [*prompt, *output.outputs[0].token_ids]
    _compare("draft_model", {}, target, tmp_path / "draft", chains, {chains[0].row: text})


@torch.no_grad()
def _compare(
    method: str,
    weights: dict[str, Tensor],
    target: Transformer,
    folder: Path,
    chains: list[Chain],
    texts: dict[int, list[int]],
) -> None:
    draft = None if weights else load_model(folder, dtype=torch.float32)
    assert len(chains) > 5
    for chain in chains:
        text = texts[chain.row][: chain.length + 1]
        if len(text) <= chain.length:
            continue  # more was accepted than the request asked for
        assert text[-1] == chain.last
        expected = naive_heads(method, weights, target, text) if draft is None else naive_model(draft, text)
        assert chain.drafts == expected, f"at length {chain.length}"
