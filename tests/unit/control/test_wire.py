"""Connections prove that both sides know the secret, and carry only what was signed."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from seatrial.control.net.wire import BlockingLink, Incoming, Link, Listener, Outgoing, WireRefused, dial

SECRET = b"s" * 32


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", SECRET)
    yield found
    found.close()


def accept(listener: Listener) -> Incoming:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        assert selector.select(5)
    (incoming,) = listener.accept()
    return incoming


def prove(incoming: Incoming) -> str:
    """Advance until it is over; what came of it."""
    with selectors.DefaultSelector() as selector:
        selector.register(incoming, selectors.EVENT_READ)
        while (progress := incoming.advance()) == "wait":
            assert selector.select(5), "nothing came"
    return progress


def serve(listener: Listener, then: Callable[[Incoming, str], None]) -> threading.Thread:
    def body() -> None:
        incoming = accept(listener)
        then(incoming, prove(incoming))
        incoming.close()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def connected(listener: Listener) -> tuple[Link, BlockingLink]:
    """Our event loop's end and a blocking end of one connection."""
    links = []
    thread = serve(listener, lambda i, _: links.append(Link(i.sock.dup(), i._keys)))  # type: ignore[arg-type]
    session = dial("127.0.0.1", listener.port, SECRET, {"role": "test"}, 5)
    thread.join()
    return links[0], session


def received(link: Link) -> list[dict[str, object]]:
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        assert selector.select(5)
    return link.receive()


def test_messages_and_raw_bytes_in_both_directions(listener: Listener) -> None:
    heard = []

    def talk(incoming: Incoming, progress: str) -> None:
        assert progress == "ready"
        heard.append(incoming.hello)
        session = incoming.session(5)
        heard.append(session.receive())
        session.send({"b": 2})
        session.sock.sendall(b"raw bytes")
        session.send({"c": 3})

    thread = serve(listener, talk)
    session = dial("127.0.0.1", listener.port, SECRET, {"role": "snapshot", "node": 3}, 5)
    session.send({"a": 1})
    assert session.receive() == {"b": 2}
    assert session.sock.recv(9, socket.MSG_WAITALL) == b"raw bytes"
    assert session.receive() == {"c": 3}
    thread.join()
    session.close()
    assert heard == [{"role": "snapshot", "node": 3}, {"a": 1}]


def test_a_client_without_the_secret_is_refused(listener: Listener) -> None:
    came = []
    thread = serve(listener, lambda incoming, progress: came.append((progress, incoming.hello, incoming.why)))
    with pytest.raises(WireRefused):
        dial("127.0.0.1", listener.port, b"another", {"role": "agent"}, 5)
    thread.join()
    assert came == [("refused", {}, "it does not know this run's secret")]


def test_a_server_without_the_secret_is_refused() -> None:
    false = Listener("127.0.0.1", b"another")
    thread = serve(false, lambda incoming, progress: None)
    with pytest.raises(WireRefused):
        dial("127.0.0.1", false.port, SECRET, {"role": "agent"}, 5)
    thread.join()
    false.close()


@pytest.mark.parametrize(
    "said", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"nonce": 1}\n', b"\xff\xfe\n"]
)
def test_another_protocol_is_refused(listener: Listener, said: bytes) -> None:
    came = []
    thread = serve(listener, lambda incoming, progress: came.append(progress))
    with socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(said)
        thread.join()
    assert came == ["refused"]


def test_a_first_line_without_end_is_refused(listener: Listener) -> None:
    came = []
    thread = serve(listener, lambda incoming, progress: came.append(incoming.why))
    with socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(b"x" * 2_000_000)
        thread.join()
    assert came == ["a first line without an end"]


def test_an_address_without_listener_is_reported_at_once() -> None:
    free = Listener("127.0.0.1", SECRET)
    port = free.port
    free.close()
    with pytest.raises(WireRefused, match="Connection refused"):
        dial("127.0.0.1", port, SECRET, {}, 5)
    outgoing = Outgoing("127.0.0.1", port, SECRET, {})
    assert outgoing.advance() in ("wait", "refused")
    outgoing.close()


@pytest.mark.parametrize("change", ["text", "again", "mac", "unsigned"])
def test_altered_or_replayed_line_closes_the_connection(listener: Listener, change: str) -> None:
    link, session = connected(listener)
    line = session._keys.sign({"order": 1})
    altered = {
        "text": line.replace(b"1}", b"2}"),
        "again": line + line,
        "mac": (b"0" if line[:1] != b"0" else b"1") + line[1:],
        "unsigned": b'{"order": 1}\n',
    }[change]
    session.sock.sendall(altered)
    messages = received(link)
    assert messages == ([{"order": 1}] if change == "again" else [])
    assert link.closed
    session.close()
    link.close()


@pytest.mark.cluster  # slow
def test_what_the_socket_does_not_take_is_sent_later(listener: Listener) -> None:
    link, session = connected(listener)
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    big = {"text": "x" * 5_000_000}
    link.send(big)
    assert link.events & selectors.EVENT_WRITE
    got = []
    thread = threading.Thread(target=lambda: got.append(session.receive()))
    thread.start()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_WRITE)
        while link.events & selectors.EVENT_WRITE:
            assert selector.select(5)
            link.flush()
    thread.join()
    assert got == [big]
    session.close()
    link.close()


def test_the_end_of_the_other_side_is_the_end(listener: Listener) -> None:
    link, session = connected(listener)
    session.send({"last": True})
    session.close()
    messages = []
    while not link.closed:
        messages += received(link)
    assert messages == [{"last": True}]
    link.send({"into": "the void"})
    link.close()


def test_round_trip_excludes_the_peers_processing_time(
    listener: Listener,
) -> None:
    """On a busy host an agent answers late. That is no fault of the network."""
    link, session = connected(listener)
    for number in range(20):
        link.send({"beat": number})
    time.sleep(0.3)  # is the test: nobody reads, and nobody answers
    assert 0 < link.round_trip_s < 0.1
    session.close()
    link.close()
    assert link.round_trip_s == 0.0, "unknown"
