"""The event loop: what is ready is handled, also while sources come and go."""

from __future__ import annotations

import os
import time

from seatrial.base import event_loop
from seatrial.base.event_loop import EventLoop


def test_a_source_that_another_handler_unwatched_is_not_handled() -> None:
    (first, first_in), (second, second_in) = os.pipe(), os.pipe()
    sources, handled = EventLoop(), []

    def handle(mine: int, other: int) -> None:
        handled.append(mine)
        sources.unwatch(other)

    sources.watch(first, lambda: handle(first, second))
    sources.watch(second, lambda: handle(second, first))
    for fd in (first_in, second_in):
        os.write(fd, b"x")
    sources.wait(None)
    assert len(handled) == 1
    sources.close()
    for fd in (first, first_in, second, second_in):
        os.close(fd)


def test_wait_returns_without_a_ready_source() -> None:
    sources = EventLoop()
    sources.wait(0.0)
    sources.close()


def test_a_long_turn_is_continued_by_the_next_call() -> None:
    pipes = [os.pipe() for _ in range(2)]
    sources, handled = EventLoop(), []

    def handle(fd: int) -> None:
        handled.append(fd)
        until = time.monotonic() + event_loop._TURN_S
        while time.monotonic() <= until:
            pass

    for fd, writer in pipes:
        sources.watch(fd, lambda fd=fd: handle(fd))  # type: ignore[misc]
        os.write(writer, b"x")
    sources.wait(None)
    assert len(handled) == 1
    sources.wait(None)
    assert sorted(handled) == sorted(fd for fd, _ in pipes)
    sources.close()
    for pair in pipes:
        for fd in pair:
            os.close(fd)
