"""At the agent's door: strangers cost nothing and stop nobody."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
from wired import SECRET, Hub, Pump

from seatrial.base import process
from seatrial.control.net import wire
from seatrial.control.net.acceptor import MOST_WAITING
from seatrial.control.net.wire import Outgoing


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def hub(pump: Pump) -> Iterator[Hub]:
    files = set(os.listdir("/proc/self/fd"))
    hub = Hub(pump)
    pump.ticks.append(hub.acceptor.tick)
    yield hub
    hub.close()
    assert set(os.listdir("/proc/self/fd")) <= files


def stranger(hub: Hub) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", hub.port))
    sock.setblocking(False)
    return sock


def shown_out(sock: socket.socket) -> bool:
    """Whether the other side has closed, after whatever it said."""
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def friend(pump: Pump, hub: Hub) -> None:
    """Somebody who knows the secret gets in."""
    outgoing = Outgoing("127.0.0.1", hub.port, SECRET, {"role": "agent"})
    states: list[str] = []
    pump.ticks.append(advance := lambda: states.append(outgoing.advance()))
    pump.until(lambda: "ready" in states)
    pump.ticks.remove(advance)
    pump.until(lambda: hub.hellos)
    outgoing.close()
    pump.until(lambda: not hub.links)


def test_a_silent_connection_is_closed_in_time(pump: Pump, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)
    silent = [stranger(hub) for _ in range(5)]
    pump.until(lambda: hub.acceptor.deadline is not None)
    pump.until(lambda: all(shown_out(sock) for sock in silent))
    assert hub.acceptor.deadline is None
    friend(pump, hub)
    for sock in silent:
        sock.close()


@pytest.mark.cluster  # slow
@pytest.mark.parametrize(
    "said",
    [
        b"[" * 60_000 + b"\n",
        b'{"nonce": "\\ud800", "hello": {}, "mac": "x"}\n',
        b'{"nonce": "a", "hello": [1], "mac": "\xc3\xbc"}\n',
        b'{"nonce": "a", "hello": {}}\n',
        b"\0" * 70_000,
        b"",
    ],
)
def test_an_invalid_hello_is_refused_and_the_next_is_served(pump: Pump, hub: Hub, said: bytes) -> None:
    sock = stranger(hub)
    pump.until(lambda: hub.acceptor.deadline is not None)
    sock.setblocking(True)
    sock.sendall(said)
    if not said:
        sock.shutdown(socket.SHUT_WR)
    sock.setblocking(False)
    pump.until(lambda: shown_out(sock))
    sock.close()
    assert hub.acceptor.deadline is None
    assert not hub.hellos
    friend(pump, hub)


def test_without_a_free_descriptor_the_door_stays_open_for_later(pump: Pump, hub: Hub) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = stranger(hub)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
    try:
        pump.round()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    pump.until(lambda: hub.acceptor.deadline is not None)
    sock.close()
    pump.until(lambda: hub.acceptor.deadline is None)


def test_many_unauthenticated_connections_do_not_block_a_peer(pump: Pump, hub: Hub) -> None:
    """Each turn of the loop takes some of them, and never more than a few are held."""
    before = len(os.listdir("/proc/self/fd"))
    silent = [stranger(hub) for _ in range(2 * MOST_WAITING)]
    pump.round()
    held = len(os.listdir("/proc/self/fd")) - before - len(silent)
    assert held <= wire.ACCEPT_AT_ONCE, "one turn, not all that wait"
    pump.until(lambda: sum(map(shown_out, silent)) == len(silent) - MOST_WAITING)
    friend(pump, hub)
    for sock in silent:
        sock.close()
    pump.until(lambda: hub.acceptor.deadline is None)


def test_a_coordinator_may_have_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        process.allow_many_files()
        most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
