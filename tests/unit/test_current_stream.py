"""The current stream is looked up again only when it is another one."""

import pytest
import torch

from ostinato.graphs import CurrentStream


@pytest.mark.parametrize("index", [1, None])
def test_a_stream_is_named_once_until_it_changes(monkeypatch: pytest.MonkeyPatch, index: int | None) -> None:
    raw, asked = 5, list[int]()

    def named(device: int) -> object:
        asked.append(device)
        return object()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: raw, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", named)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    current = CurrentStream(torch.device("cuda", index) if index is not None else torch.device("cuda"))
    first = current.get()
    assert current.get() is first
    raw = 6
    assert current.get() is not first
    assert asked == [1, 1]
