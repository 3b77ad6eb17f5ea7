"""Channels: several threads that send, a reader that does not read, a stranger that talks nonsense."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from seatrial.base.lines import Channel


def read(channel: Channel, n: int) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    while len(messages) < n:
        assert select.select([channel], [], [], 20)[0]
        messages += channel.receive()
    return messages


def test_a_process_is_reached_by_an_abstract_name() -> None:
    name = f"seatrial-test-{os.getpid()}-{secrets.token_hex(4)}"
    with pytest.raises(ConnectionRefusedError):
        Channel.connect(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen(1)
        channel = Channel.connect(name)
        other = Channel(server.accept()[0])
    channel.send({"a": 1})
    assert read(other, 1) == [{"a": 1}]
    channel.close()
    other.close()


def test_messages_of_several_threads_are_not_mixed() -> None:
    a, b = Channel.pair()
    text = "x" * 50_000  # more than one write

    def say(i: int) -> None:
        for n in range(20):
            a.send({"from": i, "n": n, "text": text})

    threads = [threading.Thread(target=say, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    messages = read(b, 80)
    for thread in threads:
        thread.join()
    for i in range(4):
        assert [m["n"] for m in messages if m["from"] == i] == list(range(20))
    a.close()
    b.close()


def test_post_never_blocks_and_delivers_when_there_is_room() -> None:
    a, b = Channel.pair()
    sent = [{"n": n, "text": "x" * 10_000} for n in range(200)]  # far more than a buffer holds
    for message in sent:
        assert a.post(message)
    got = b.receive()
    assert 0 < len(got) < len(sent)
    while len(got) < len(sent):
        assert a.flush()
        got += b.receive()
    assert got == sent
    b.close()
    assert not a.post({"to": "nobody"})
    a.close()


def test_posted_messages_precede_later_sent_ones() -> None:
    a, b = Channel.pair()
    posted = [{"n": n, "text": "x" * 10_000} for n in range(100)]
    for message in posted:
        a.post(message)
    late = threading.Thread(target=a.send, args=({"n": 100},))
    late.start()
    assert [m["n"] for m in read(b, 101)] == list(range(101))
    late.join()
    a.close()
    b.close()


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\n", b"[1, 2]\n", b"7\n"])
def test_an_invalid_message_is_refused(line: bytes) -> None:
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(line)
    with pytest.raises(ValueError, match=r"."):
        channel.receive()
    raw.close()
    channel.close()


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.base.lines.LONGEST_BYTES", 10_000)
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(b"x" * 20_000)
    with pytest.raises(ValueError, match="10000 bytes"):
        channel.receive()
    raw.close()
    channel.close()


def test_stdin_and_stdout_as_a_channel(tmp_path: Path) -> None:
    """Over a socket pair and over two pipes, more than they hold; what the process prints goes elsewhere."""
    code = (
        "import os, sys; from seatrial.base.lines import Channel; c = Channel.stdio(2)\n"
        "print('a library prints', flush=True); assert not sys.stdin.read()\n"
        "while not c.closed:\n"
        "  c.readable(None)\n"
        "  for m in c.receive(): c.send(m)\n"
    )
    sent = [{"n": n, "text": "x" * 100_000} for n in range(20)]
    data = b"".join(json.dumps(m).encode() + b"\n" for m in sent)
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run([sys.executable, "-c", code], input=data, stdout=subprocess.PIPE, stderr=log)
        ours, theirs = Channel.pair()
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=log
        )
        theirs.close()
        sender = threading.Thread(target=lambda: [ours.send(m) for m in sent])
        sender.start()
        assert read(ours, len(sent)) == sent
        sender.join()
        ours.close()
        assert child.wait() == 0
    assert (done.returncode, done.stdout) == (0, data)
    assert (tmp_path / "log").read_text() == "a library prints\n" * 2


def test_login_output_is_skipped_only_before_the_first_message() -> None:
    raw, other = socket.socketpair()
    channel = Channel(other)
    channel.greeting = True
    raw.sendall(b'Welcome to {\n7\n{"a": 1}\n')
    assert channel.receive() == [{"a": 1}]
    raw.sendall(b"Goodbye\n")
    with pytest.raises(ValueError, match=r"."):
        channel.receive()
    raw.close()
    channel.close()
