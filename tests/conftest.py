"""What makes the whole suite quick, and changes nothing that a test can see."""

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Set before torch is imported, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A worker takes whole files. Those that take longest come first, and leave short ones to fill the gaps with.
LONGEST_FIRST = (
    "engine/test_failed_steps.py",
    "server/test_attacks.py",
    "engine/test_verify.py",
    "server/test_faults.py",
    "server/test_grammar_attacks.py",
    "server/test_hung_engine.py",
    "project/test_checks.py",
    "engine/test_engine_structured.py",
    "kernels/test_triton_kernels.py",
    "kernels/test_cuda_emulated.py",
    "kernels/test_cuda_sources.py",
    "kernels/test_filters.py",
    "kernels/test_cuda_emulated_wide.py",
    "engine/test_engine_greedy.py",
    "engine/test_engine_cascade.py",
    "engine/test_plain_sampling.py",
    "server/test_limits_and_keys.py",
    "kernels/test_cuda_emulator.py",
    "server/test_fuzzing.py",
    "server/test_page.py",
    "tools/test_bench_commands.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # Else xdist would begin with the files that have most tests.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Pytest compiles every test file in its own way, and every worker imports all of them. In a fresh clone
    each begins at another place, and finds what the others have compiled when it comes there."""
    worker, here = getattr(session.config, "workerinput", None), Path(__file__).parent
    if worker is None or here not in [Path(argument).resolve() for argument in session.config.args]:
        return
    folders = [path.parent for path in here.glob("*/__init__.py") if path.parent.name != "gpu"]
    files = [path for folder in sorted(folders) for path in sorted(folder.glob("test_*.py"))]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    # A conftest may say what else is to be compiled in pytest's way.
    settings = [path for folder in folders for path in folder.glob("conftest.py")]
    for path in (*settings, *files[first:], *files[:first]):
        with suppress(BaseException):  # collecting it tells what is wrong
            importlib.import_module(f"{path.parent.name}.{path.stem}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(f"{item.path.parent.name}/{item.path.name}", len(places)))


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_frozen() -> None:
    """Every capture collects garbage, which walks all objects of torch and transformers: half of the time.

    What was there before a module is frozen, as users may do, and a capture leaves it so. That it freezes and
    thaws by itself is for `contract/test_garbage_collection.py`, which begins with nothing frozen.
    """
    gc.collect()
    gc.freeze()
