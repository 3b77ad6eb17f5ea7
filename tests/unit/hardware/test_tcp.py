"""What the kernel says of TCP connections, against one that is slowed on purpose by its reader."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from seatrial.hardware.tcp import Connection, connections

CHUNK = 1 << 16


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0))
        return near, server.accept()[0]


def mine() -> Connection:
    """The connection of the sending end."""
    return next(c for c in connections() if (c.here, c.there) == ("127.0.0.3", "127.0.0.2"))


@pytest.mark.parametrize("pause_s", [0.0, 0.005])
def test_bytes_and_the_time_in_which_they_waited(pause_s: float) -> None:
    near, far = pair()
    size = 100 * CHUNK

    def read() -> None:
        left = size
        while left:
            left -= len(far.recv(CHUNK))
            time.sleep(pause_s)

    with near, far:
        reader = threading.Thread(target=read)
        reader.start()
        begin = time.monotonic()
        near.sendall(bytes(size))
        reader.join()
        took = time.monotonic() - begin
        time.sleep(0.05)  # an idle connection is not busy
        found = mine()
    assert found.sent_bytes == pytest.approx(size, abs=1)  # the handshake counts as one
    assert found.busy_s <= took + 0.02
    if pause_s:
        # Until all but what the sockets' buffers hold had been read.
        assert found.busy_s > 0.3 * took
        assert found.bytes_per_s is not None
        assert found.bytes_per_s < size / (0.3 * took)


def test_other_descriptors_are_passed_over() -> None:
    before = len(connections())
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
        socket.socket(),
    ):
        assert len(connections()) == before


def test_nothing_was_sent() -> None:
    near, far = pair()
    with near, far:
        assert mine().bytes_per_s in (None, 0.0)
