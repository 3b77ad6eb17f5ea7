"""Messages between two processes: JSON objects, one per line, over a stream socket or a pair of pipes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from typing import Any

from seatrial.base.files import parse_json

LONGEST_BYTES = 1 << 26  # limit of one message: more than any of ours has, still harmless to buffer


class Channel:
    """One end of a connection. A message is a JSON object; nothing is ever unpickled.

    Any thread may send; one at a time may receive.
    """

    def __init__(self, sock: socket.socket | _Stdio) -> None:
        self._socket = sock
        self._rest = b""
        self._waiting = b""  # posted, not yet accepted by the socket
        self._sending = threading.Lock()
        self.closed = False  # the peer has closed its end, and all it sent has been received
        self.greeting = False  # skip invalid lines before the first message: a login script may print

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, both close-on-exec."""
        a, b = socket.socketpair()
        return cls(a), cls(b)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end inherited as `fd`; processes started from here do not inherit it again."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock)

    @classmethod
    def stdio(cls, log: int) -> Channel:
        """The end that is this process's stdin and stdout; from now on prints go to `log` and stdin is empty."""
        channel = cls(_Stdio(os.dup(0), os.dup(1)))
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for fd in (1, 2):
            os.dup2(log, fd)
        return channel

    @classmethod
    def connect(cls, name: str) -> Channel:
        """Connect to the abstract Unix socket `name` of this machine; OSError if there is no listener."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + name)
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def readable(self, timeout_s: float | None) -> bool:
        """Whether there is something to `receive`; waits for it at most `timeout_s`, without limit if None."""
        waiting = select.poll()  # select() does not support descriptors from 1024 on
        waiting.register(self._socket.fileno(), select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))

    def send(self, message: dict[str, Any]) -> bool:
        """Send one message; False if the peer has closed. Blocks while the peer's buffer is full."""
        with self._sending:
            data = self._waiting + _encode(message)
            self._waiting = b""
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def post(self, message: dict[str, Any]) -> bool:
        """Send one message without blocking; False if the peer has closed.

        For a reader that may be stopped. What its buffer does not accept is kept, and sent with the next `post`,
        `flush` or `send`.
        """
        with self._sending:
            self._waiting += _encode(message)
        return self.flush()

    @property
    def behind(self) -> bool:
        """Whether something that was posted has not been accepted yet."""
        return bool(self._waiting)

    def flush(self) -> bool:
        """Send what was posted, as far as possible without blocking; False if the peer has closed."""
        with self._sending:
            try:
                while self._waiting:
                    sent = self._socket.send(self._waiting, socket.MSG_DONTWAIT)
                    self._waiting = self._waiting[sent:]
            except BlockingIOError:
                return True
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without blocking. A line cut short by the sender's death is dropped.

        Raises ValueError for a line that is not a JSON object, or is too long: the peer does not use our protocol.
        """
        while not self.closed:
            try:
                data = self._socket.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
            self._rest += data
            if len(self._rest) > LONGEST_BYTES:
                raise ValueError(f"more than {LONGEST_BYTES} bytes wait in a channel")
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            try:
                messages.append(_decode(line))
            except ValueError:
                if not self.greeting:
                    raise
            else:
                self.greeting = False
        return messages

    def close(self) -> None:
        """Close this end in this process."""
        self._socket.close()


class _Stdio:
    """Two descriptors of any kind, with the socket methods that a Channel uses. The descriptors are non-blocking."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        for fd in (reader, writer):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._reader

    def recv(self, size: int, flags: int) -> bytes:
        return os.read(self._reader, size)

    def send(self, data: bytes, flags: int) -> int:
        return os.write(self._writer, data)

    def sendall(self, data: bytes) -> None:
        waiting = select.poll()
        waiting.register(self._writer, select.POLLOUT)
        rest = memoryview(data)  # slices without copying: a message may have many megabytes
        while rest:
            waiting.poll()
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._writer, rest) :]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    message = parse_json(line)
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {line[:80]!r}")
    return message
