"""While the engine's thread waits for a device that does not answer, its process says that it lives."""

import time

import pytest
import torch

zmq = pytest.importorskip("zmq")


def test_the_heart_beats_while_a_thread_waits_for_the_device() -> None:
    from ostinato.server.engine_process.heartbeat import Heartbeat
    from ostinato.server.wire.messages import Beat, decode_event

    context = zmq.Context()
    heard = context.socket(zmq.PULL)
    heard.bind("inproc://beats")
    heart = Heartbeat(context, "inproc://beats")
    heart.at_work()
    heart.start()
    began = time.monotonic()
    torch.cuda._sleep(6_000_000_000)  # about three seconds of a kernel
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    beats = []
    while heard.poll(0):
        beats.append(decode_event(heard.recv()))
    assert waited > 1.5
    assert all(isinstance(beat, Beat) for beat in beats)
    assert len(beats) >= waited / 0.5 - 2
    assert beats[-1].step_seconds > waited - 1.0
    heard.close(linger=0)
    context.term()
