"""A start with too little memory says what it needed and had, and which option to set to which value."""

import dataclasses

import pytest
import torch

from ostinato.engine.config import EngineConfig
from ostinato.engine.loading import load as loading
from ostinato.engine.loading import shortage
from ostinato.engine.loading.device_memory import OUTSIDE_GRAPHS, MemoryPlan
from ostinato.engine.loading.load import ModelLoadError, allocate_kv, weight_bytes
from ostinato.engine.loading.shortage import Room
from ostinato.engine.resolved_config import ResolvedConfig, resolve

from .conftest import TinyModel

GIB = 1 << 30
PAGE = 2 << 20


def resolved(**options: object) -> ResolvedConfig:
    config = EngineConfig(max_model_len=1600, max_running_requests=64, device="cpu", **options)  # type: ignore[arg-type]
    return resolve(config, 4096, torch.bfloat16)


PLAN = MemoryPlan(buffers=GIB // 2, activations=GIB // 4, executables=GIB // 8)


def test_the_value_of_mem_fraction_that_helps_is_named_and_helps() -> None:
    config, room = resolved(mem_fraction=0.5), Room(total=20 * GIB, free=11 * GIB)
    told = shortage.no_room_for_kv(config, PLAN, 8 * GIB, PAGE, room)
    for part in ("weights 8.00 GiB", "others 1.00 GiB", "graphs 0.38 GiB", "buffers of steps 0.50 GiB"):
        assert part in told
    assert "Use mem_fraction=0.53" in told
    needed = (config.page_columns + 1) * PAGE
    assert room.allowed(0.53) - PLAN.to_come >= needed > room.allowed(0.52) - PLAN.to_come


def test_where_the_device_is_too_small_other_options_are_named_with_values() -> None:
    config, room = resolved(), Room(total=20 * GIB, free=GIB)
    told = shortage.no_room_for_kv(config, PLAN, 18 * GIB, PAGE, room)
    assert "mem_fraction=0.9 of 20.00 GiB" in told
    assert "Use mem_fraction" not in told
    for part in ("cuda_graph_memory_mb=128", "max_running_requests=16", "chunked_prefill_size=32"):
        assert part in told


def test_pages_that_were_asked_for_and_do_not_fit() -> None:
    told = shortage.too_many_pages(resolved(), 1000, PAGE, Room(20 * GIB, GIB))
    assert "num_pages=1000 takes 1.95 GiB" in told
    assert "at most num_pages=512 fit" in told


def test_a_cache_smaller_than_the_longest_request_is_a_warning_with_values() -> None:
    room = Room(20 * GIB, GIB)
    told = shortage.is_short_of_one_request(resolved(), 51, PAGE, room)
    assert told is not None
    assert "room for 800 tokens" in told
    assert "mem_fraction=0.91 or max_model_len=800" in told
    assert shortage.is_short_of_one_request(resolved(), 101, PAGE, room) is None


def test_a_start_uses_these_words(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without one."""
    placed = loading.place(EngineConfig(tiny.directory, device="cpu", max_model_len=64))
    on_gpu = dataclasses.replace(placed.config, device=torch.device("cuda", 0))
    monkeypatch.setattr(Room, "on", lambda device: Room(total=GIB, free=GIB // 8))
    with pytest.raises(ModelLoadError, match=r"no memory is left for the KV cache on cuda:0: .* Use "):
        allocate_kv(placed.model, on_gpu, PLAN)

    def none_left(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "KVCache", none_left)
    monkeypatch.setattr(Room, "on", lambda device: Room(total=8 * GIB, free=8 * GIB))
    with pytest.raises(ModelLoadError, match=r"num_pages=\d+ takes .* are free on cuda:0"):
        allocate_kv(placed.model, on_gpu, MemoryPlan())
    monkeypatch.setattr("ostinato.engine.loading.load.resolve", lambda *_: on_gpu)
    transformer = loading.Transformer
    monkeypatch.setattr(
        loading,
        "Transformer",
        lambda *given, **more: (transformer if more["device"] == "meta" else none_left)(*given, **more),
    )
    monkeypatch.setattr(loading.triton_start, "begin", lambda: None)
    monkeypatch.setattr(loading, "get_backend", lambda *_: None)
    monkeypatch.setattr(loading, "use_table_of_user", lambda *_: None)
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, device=None, **more: empty(*size, device=device if device == "meta" else "cpu", **more),
    )
    with pytest.raises(ModelLoadError, match=r"weights take .* in torch.float32, and 8.00 GiB of 8.00"):
        loading.place(EngineConfig(tiny.directory))


def test_memory_that_ends_while_weights_are_read_is_told_in_the_same_words(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    placed = loading.place(EngineConfig(tiny.directory, device="cpu", max_model_len=64))
    placed = dataclasses.replace(placed, room=Room(total=8 * GIB, free=GIB))
    monkeypatch.setattr(loading, "fill_model", none_left)
    with pytest.raises(ModelLoadError, match=r"weights take .* in torch.float32, and 1.00 GiB of 8.00"):
        loading.read(placed)


def test_what_weights_will_take_is_what_they_take(tiny: TinyModel) -> None:
    placed = loading.place(EngineConfig(tiny.directory, device="cpu", max_model_len=64))
    taken = sum(parameter.nbytes for parameter in placed.model.parameters())
    assert weight_bytes(placed.model.config, torch.float32) == taken


def test_room_is_kept_for_work_outside_graphs() -> None:
    assert PLAN.to_come == GIB // 2 + GIB // 4 + GIB // 8 + OUTSIDE_GRAPHS
    assert MemoryPlan(buffers=5).to_come == 0, "where the number of pages is given, nothing is sized"
