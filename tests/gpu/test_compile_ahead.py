"""Compiling without launching, on CUDA."""

import torch

from ostinato.kernels.compiling.compile_ahead import compiling_only
from ostinato.kernels.decode_inputs import request_rows
from ostinato.kernels.norms import rows


def test_nothing_runs_while_kernels_are_only_compiled_but_indices_are_right(device: torch.device) -> None:
    lengths = torch.tensor([0, 7, 40], dtype=torch.int32, device=device)
    last_tokens, began = (torch.tensor(values, device=device) for values in ([0, 11, 12], [0]))
    places = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    x, weight = torch.ones(3, 64, device=device), torch.ones(64, device=device)
    for _ in range(2):  # whether they are compiled or not
        with compiling_only(device):
            found = request_rows.begin_decode(places, lengths, last_tokens, began)
            rows.rms_norm(x, weight, 1e-6)
        assert found.input_ids.tolist() == [0, 12, 11]
        assert found.query_lens.tolist() == [0, 1, 1]
        assert began.item() == 0
    assert lengths.tolist() == [0, 9, 42]
    assert found.positions.tolist() == [0, 41, 8]
    assert torch.allclose(rows.rms_norm(x, weight, 1e-6), x)
