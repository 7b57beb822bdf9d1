"""What makes the whole suite quick, and changes nothing that a test can see."""

import gc
import importlib
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from frozen_objects import FrozenObjects

ROOT = Path(__file__).parents[1]

FORBIDS_BYTE_CODE = os.environ.pop("PYTHONDONTWRITEBYTECODE", "") != ""
"""As images for one use do. There every worker, and each of the many processes that tests start, would
compile all sources anew; so it is kept all the same, and removed at the end."""
if FORBIDS_BYTE_CODE:
    sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Set before torch is imported, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ONE_WORKER = "server"
"""All files of this folder go to one worker, and first: they share servers that another would start again."""

# A worker takes whole files. Those that take longest come first, and leave short ones to fill the gaps with.
LONGEST_FIRST = (
    "kernels/test_lora.py",
    "project/test_checks.py",
    "kernels/test_triton_kernels.py",
    "kernels/test_cuda_emulated_wide.py",
    "kernels/test_cuda_emulated.py",
    "kernels/test_cuda_emulator.py",
    "kernels/test_cuda_sources.py",
    "contract/test_no_trace.py",
    "kernels/test_cuda_emulated_prompt_products.py",
    "kernels/test_filters.py",
    "kernels/test_queries.py",
    "kernels/test_asking_rows.py",
    "kernels/test_cuda_prompt_sources.py",
    "kernels/test_cuda_emulated_prompts.py",
    "contract/test_changes_are_noticed.py",
    "engine/test_verify.py",
    "kernels/test_cascade.py",
    "contract/test_training.py",
    "kernels/test_cuda_emulated_few_tokens.py",
    "kernels/test_speculation.py",
    "engine/test_engine_structured.py",
    "kernels/test_cuda_decode_tiles.py",
    "kernels/test_cuda_emulated_lora.py",
    "engine/test_failed_steps.py",
    "engine/test_engine_greedy.py",
    "contract/test_training_surroundings.py",
    "kernels/test_cuda_lora_sources.py",
    "tools/test_bench_commands.py",
    "contract/test_training_optimizers.py",
    "contract/test_strangers_code.py",
    "engine/test_grammar_processes.py",
    "tape/test_tape_collectives.py",
    "engine/test_engine_cascade.py",
    "engine/test_plain_sampling.py",
    "engine/test_token_rules.py",
    "engine/test_lora.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # Else xdist would begin with the files that have most tests.
    config.option.loadscopereorder = False
    FrozenObjects().count_once()


def pytest_unconfigure(config: pytest.Config) -> None:
    if FORBIDS_BYTE_CODE and not hasattr(config, "workerinput"):
        for folder in (ROOT / "src", ROOT / "tests"):
            for kept in list(folder.rglob("__pycache__")):
                shutil.rmtree(kept, ignore_errors=True)


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

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return -1 if folder == ONE_WORKER else places.get(f"{folder}/{item.path.name}", len(places))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: the worker with the servers mostly waits for them."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See `ONE_WORKER`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(super()._split_scope(nodeid))
            return str(file.parent if file.parent.name == ONE_WORKER else file)

    return Files(config, log)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_frozen() -> None:
    """Every capture collects garbage, which walks all objects of torch and transformers: half of the time.

    What was there before a module is frozen, as users may do, and a capture leaves it so. That it freezes and
    thaws by itself is for `contract/test_garbage_collection.py`, which begins with nothing frozen.
    """
    gc.collect()
    gc.freeze()
