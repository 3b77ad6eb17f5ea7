"""Messages and signals between the processes of one machine."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue


def test_messages_arrive_whole_and_in_order() -> None:
    a, b = Channel.pair()
    sent = [{"n": i, "text": "line\nbreak " * i} for i in range(50)]
    for message in sent:
        assert a.send(message)
    assert b.receive() == sent
    assert b.receive() == []
    assert not b.closed
    a.close()
    assert b.receive() == []
    assert b.closed
    assert not b.send({"to": "nobody"})
    b.close()


def test_a_message_in_pieces_waits_and_a_torn_one_is_dropped() -> None:
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(b'{"a"')
    assert channel.receive() == []
    raw.sendall(b': 1}\n{"torn')
    assert channel.receive() == [{"a": 1}]
    raw.close()
    assert channel.receive() == []
    assert channel.closed
    channel.close()


def test_signals_are_queued_and_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    queue = SignalQueue((signal.SIGUSR1,))
    assert queue.read() == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert select.select([queue], [], [], 10)[0] == [queue]
    assert queue.read() == [signal.SIGUSR1]
    queue.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        queue = SignalQueue((signal.SIGUSR1,))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert queue.read() == []
        queue.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended_in_words(status: int, text: str) -> None:
    assert process.status_text(status) == text


def test_the_process_table_knows_this_process() -> None:
    assert process.living()[os.getpid()] == os.getppid()
    assert os.getpid() in process.descendants(os.getppid())
    assert process.marked("no/such/mark") == set()
