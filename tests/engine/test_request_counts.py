"""When requests left the queue, with one before them whose grammar is still being compiled."""

from types import SimpleNamespace

from ostinato.engine.delivery.request_counts import RequestCounts
from ostinato.engine.outputs import RequestTimes
from ostinato.engine.scheduling.request import RequestStatus


def test_a_grammar_that_takes_long_makes_no_one_elses_wait_longer() -> None:
    counts = RequestCounts()
    parked = SimpleNamespace(adapter=None, grammar=object(), status=RequestStatus.WAITING)
    plain = SimpleNamespace(adapter=None, grammar=None, status=RequestStatus.RUNNING)
    times = {"parked": RequestTimes(queued_ts=1.0), "plain": RequestTimes(queued_ts=2.0)}
    counts.queued(parked, times["parked"])
    counts.queued(plain, times["plain"])
    counts.began(3.0)
    assert (times["parked"].scheduled_ts, times["plain"].scheduled_ts) == (0.0, 3.0)
    parked.status = RequestStatus.RUNNING
    counts.began(9.0)
    counts.began(12.0)
    assert (times["parked"].scheduled_ts, times["plain"].scheduled_ts) == (9.0, 3.0)
