"""What the engine process says about the memory of the device adds up."""

import pytest
import torch

from ostinato import LLM

pytest.importorskip("msgspec", reason="the server's messages")

from ostinato.server.engine_process.intake import Intake
from ostinato.server.engine_process.statistics import StatisticsTaker
from server.scripted_model import write_scripted_model


def test_memory_adds_up(tmp_path, device):
    small = {"max_model_len": 64, "max_running_requests": 4, "num_pages": 40, "cuda_graph_bs": (4,)}
    with LLM(str(write_scripted_model(tmp_path)), device="cuda", **small) as llm:
        statistics = StatisticsTaker(
            llm, Intake(llm.engine.core.scheduler, lambda group, number: None, None)
        ).take()
        size, free = statistics.device_bytes
        assert size == torch.cuda.mem_get_info(device)[1]
        assert sum(statistics.memory_bytes.values()) < size - free < size
        assert statistics.page_size == 16
