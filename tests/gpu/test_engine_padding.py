"""Row 0 and page 0 on CUDA, where decode graphs advance the state of rows themselves."""

from engine.conftest import tiny  # noqa: F401
from engine.test_engine_padding import *  # noqa: F403
