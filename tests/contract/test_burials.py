"""What must not be destroyed while a graph is recorded."""

import gc
import weakref

from ostinato.graphs.burials import burials_postponed, bury_later


class Slots:
    pass


class Mortal:
    def __init__(self):
        self.slots = Slots()

    def __del__(self):
        bury_later(self.slots)


def test_what_dies_while_recording_is_kept_until_then():
    mortal = Mortal()
    slots = weakref.ref(mortal.slots)
    with burials_postponed():
        with burials_postponed():
            del mortal
            gc.collect()
        assert slots() is not None
    assert slots() is None


def test_what_dies_at_another_time_is_gone_at_once():
    mortal = Mortal()
    slots = weakref.ref(mortal.slots)
    del mortal
    gc.collect()
    assert slots() is None
