"""Long-lived objects leave the garbage collector once, in a process of its own so that no other test is
spared."""

import subprocess
import sys

PROGRAM = """
import gc
from ostinato.server.garbage import NEW_OBJECTS, spare_long_lived_objects

alive = [[] for _ in range(10_000)]
before = gc.get_freeze_count()
spare_long_lived_objects()
spared = gc.get_freeze_count()
assert spared >= before + 10_000, (before, spared)
assert gc.get_threshold()[0] == NEW_OBJECTS
later = [[] for _ in range(10_000)]
spare_long_lived_objects()
assert gc.get_freeze_count() <= spared, "an engine that starts again must not freeze what requests hold"
"""


def test_what_is_alive_is_spared_and_only_once():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
