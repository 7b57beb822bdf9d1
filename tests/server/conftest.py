"""A scripted model and servers that serve it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .scripted_model import write_scripted_model
from .server_process import ServerProcess


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model's directory."""
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def sleepy(model: Path) -> Iterator[ServerProcess]:
    """One server whose memory comes and goes, with hostile contents, for tests that leave it awake; it was
    started as trainers start vLLM, so that whoever may use it is its admin."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_SERVER_DEV_MODE", "1")
        started = ServerProcess(model, "--enable-sleep-mode", "--hostile-wake")
    with started as server:
        yield server


@pytest.fixture(scope="session")
def impatient(model: Path) -> Iterator[ServerProcess]:
    """One server that waits neither for grammars nor for trainers for long; logprobs are those that TRL asks
    for, and weights are for who has the key `secret`. It reads special tokens wherever they stand."""
    grammars = ("--grammar-compile-seconds", "1.5", "--grammar-mask-seconds", "0.5")
    trainers = ("--weight-transfer-timeout", "4", "--admin-key", "secret")
    logprobs = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
    special = ("--content-special-tokens", "parse")
    with ServerProcess(model, *grammars, *trainers, *logprobs, *special) as server:
        yield server


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with ServerProcess(model) as server:
        yield server


@pytest.fixture(scope="session")
def keyed(model: Path) -> Iterator[ServerProcess]:
    """One server with two keys, `one` and `two`, and the admin's, `three`."""
    with ServerProcess(model, "--api-key", "one", "--api-key", "two", "--admin-key", "three") as server:
        yield server
