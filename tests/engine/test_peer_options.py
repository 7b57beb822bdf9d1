"""The table of vLLM's and SGLang's options: what it says is what happens, and docs/flags.md says the same."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from ostinato.cli.main import app
from ostinato.engine.config import EngineConfig
from ostinato.engine.peer_options.option import Effect, PeerOption
from ostinato.engine.peer_options.translation import BY_NAME, ROWS, translated
from ostinato.engine.vllm_api.llm_options import llm_options
from ostinato.graphs.errors import ConfigError
from ostinato.server.config import ServerConfig

from . import peer_options_document as document

ENGINE_OPTIONS = {field.name for field in fields(EngineConfig)}
SERVE = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
SERVER_OPTIONS = {field.name for field in fields(ServerConfig)}


def serve_options(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `ostinato serve` would give the engine and the server for a command line."""
    given = SERVE.make_context("serve", list(arguments)).params
    from ostinato.cli.serve import ENGINE, SERVER

    engine = {f.name: f.value(given[f.name]) for f in ENGINE if given[f.name] not in (None, ())}
    server = {f.name: f.value(given[f.name]) for f in SERVER if given[f.name] not in (None, ())}
    return engine, server


def command_line(row: PeerOption, folder: Path) -> list[str]:
    (folder / "template").write_text("{{ messages }}")
    places = {"{model}": str(folder), "{folder}": str(folder), "{template}": str(folder / "template")}
    example = places.get(row.example, row.example)
    values = example.split() if row.kind == "ints" else [example] if example else []
    return [row.flags[0], *values, *row.along.split()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_true(row: PeerOption, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = command_line(row, tmp_path)
    caplog.set_level(logging.WARNING, "ostinato.engine")
    if row.effect is Effect.REFUSED:
        asks_for_nothing = row.example == "{}"
        with pytest.raises(ConfigError, match=f"{arguments[0]} is not supported: .{{8,}}"):
            serve_options(arguments[0], *(['{"a": 1}'] if asks_for_nothing else arguments[1:]))
        return
    engine, server = serve_options(*arguments)
    # What comes out is accepted by those who get it.
    EngineConfig(**engine)
    ServerConfig(**server)
    if row.effect is Effect.HARMLESS:
        assert engine == server == {}
        assert row.same or row.tunes
        assert bool(caplog.records) == bool(row.tunes and _value(row) not in row.same)
        return
    got = {**engine, **server}
    if row.effect is Effect.ACTS:
        assert row.name in (SERVER_OPTIONS if row.is_servers else ENGINE_OPTIONS)
        assert set(got) == {row.name}
    else:
        assert row.name not in ENGINE_OPTIONS | SERVER_OPTIONS
        assert set(got) == {row.becomes or "cuda_graph_mode"}
    assert not caplog.records


def _value(row: PeerOption) -> Any:
    if row.kind == "flag":
        return True
    return {"int": int, "float": float, "json": json.loads}.get(row.kind, str)(row.example)


def test_a_row_is_no_other_options_name() -> None:
    """An option of ours is never refused or ignored because a peer has one of that name."""
    without_effect = {row.name for row in ROWS if row.effect in (Effect.HARMLESS, Effect.REFUSED)}
    assert len(without_effect) > 100
    assert not without_effect & (ENGINE_OPTIONS | SERVER_OPTIONS)


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_of_the_forty_most_used_thirty_do_not_stop_the_start(peer: str) -> None:
    names = document.MOST_USED[peer]
    assert len(names) == len(set(names)) >= 40
    rows = [BY_NAME[name] for name in names]
    assert all(peer in row.peers for row in rows)
    assert sum(not row.stops_the_start for row in rows) >= 30


def test_keywords_of_vllm_are_understood() -> None:
    given = {
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enforce_eager": True,
        "trust_remote_code": True,
        "tensor_parallel_size": 1,
        "swap_space": 4,
        "hf_overrides": {},
        "quantization": None,
        "dtype": "half",
        "max_model_len": 64,
        "seed": 3,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2], "level": 3},
        "enable_lora": False,
    }
    assert translated(given) == {
        "mem_fraction": 0.5,
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
        "enable_lora": False,
        "disable_cuda_graph": True,
        "dtype": "float16",
        "max_model_len": 64,
        "seed": 3,
        "cudagraph_capture_sizes": (1, 2),
    }


def test_paths_types_and_devices_may_be_objects() -> None:
    given = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "tokenizer": Path("a/b")}
    config, _ = llm_options(Path("a"), given)
    assert (config.model, config.dtype, config.device, config.tokenizer) == ("a", "bfloat16", "cpu", "a/b")


def test_a_model_may_have_sglangs_name() -> None:
    assert llm_options(None, {"model_path": "a/b"})[0].model == "a/b"
    with pytest.raises(ConfigError, match="give model or model_path, not both"):
        llm_options("a/b", {"model_path": "c/d"})


def test_kernels_of_others_are_accepted_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("FLASH_ATTN", "flashinfer", "fa3"):
        caplog.clear()
        assert translated({"attention_backend": name}) == {"attention_backend": "auto"}
        assert f"attention_backend {name} does not exist here: auto is used" in caplog.text
    assert translated({"attention_backend": "torch_native"}) == {"attention_backend": "torch"}
    assert translated({"attention_backend": "nonsense"}) == {"attention_backend": "nonsense"}


def test_names_of_our_own_and_of_nobody_pass() -> None:
    given = {"mem_fraction": 0.5, "steps_ahead": 0, "no_such_thing": 1}
    assert translated(given) == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size can only be 1, not 2: one engine uses one GPU"),
        ({"long_prefill_token_threshold": 2048}, "can only be 0, not 2048: .* target_itl_ms cuts them"),
        ({"max_num_partial_prefills": 2}, "max_num_partial_prefills can only be 1, not 2"),
        ({"max_long_partial_prefills": 4}, "max_long_partial_prefills can only be 1, not 4"),
        ({"quantization": "awq"}, "quantization is not supported: weights are"),
        ({"hf_overrides": str}, "hf_overrides must be a mapping of fields of config.json, not a function"),
        ({"rope_theta": 1e6}, "rope_theta is not supported: give hf_overrides"),
        ({"host": "0.0.0.0"}, "host is an option of the server"),
        ({"mem_fraction": 0.5, "gpu_memory_utilization": 0.6}, "give mem_fraction or gpu_memory_utilization"),
        ({"compilation_config": "x"}, "compilation_config must be an object or a level"),
        ({"compilation_config": {"x": 1}}, "compilation_config: 'x' is not supported"),
    ],
)
def test_keywords_that_cannot_be_had_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(given)


def test_the_document_says_the_same() -> None:
    assert document.FILE.read_text() == document.written(), (
        "docs/flags.md is not what the table says: write it with python tests/engine/peer_options_document.py"
    )
