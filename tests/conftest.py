"""What makes the whole suite quick, and changes nothing that a test can see."""

import gc
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Set before torch is imported, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_frozen() -> None:
    """Every capture collects garbage, which walks all objects of torch and transformers: half of the time.

    What was there before a module is frozen, as users may do, and a capture leaves it so. That it freezes and
    thaws by itself is for `contract/test_garbage_collection.py`, which begins with nothing frozen.
    """
    gc.collect()
    gc.freeze()
