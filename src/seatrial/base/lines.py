"""Messages between processes of one machine: JSON objects, one a line, over a stream socket."""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any

from seatrial.base.files import parse_json

LONGEST_BYTES = 1 << 26  # of one message: more than any of ours has, less than would hurt


class Channel:
    """One end of a connection. A message is a JSON object; nothing is ever unpickled.

    Any thread may send; one at a time may receive.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""
        self._waiting = b""  # posted, and not yet taken by the socket
        self._sending = threading.Lock()
        self.closed = False  # the other side is gone, and all it said has been received

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends. Neither is inherited by a process that is executed."""
        a, b = socket.socketpair()
        return cls(a), cls(b)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end that was inherited as `fd`; processes started from here do not inherit it again."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock)

    @classmethod
    def connect(cls, name: str) -> Channel:
        """Connected to the abstract Unix socket `name` of this machine; OSError if nobody listens there."""
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
        """Whether there is something to `receive`, waiting for it at most `timeout_s`, None for ever."""
        waiting = select.poll()  # select() takes no descriptor from 1024 on
        waiting.register(self._socket.fileno(), select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))

    def send(self, message: dict[str, Any]) -> bool:
        """Send one message; False if nobody is there to read it. Waits while the other side's buffer is full."""
        with self._sending:
            data = self._waiting + _encode(message)
            self._waiting = b""
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def post(self, message: dict[str, Any]) -> bool:
        """Send one message without ever waiting; False if nobody is there to read it.

        For a reader that may be stopped. What its buffer does not take is kept, and goes with the next `post`,
        `flush` or `send`.
        """
        with self._sending:
            self._waiting += _encode(message)
        return self.flush()

    def flush(self) -> bool:
        """Send what was posted, as far as that needs no waiting; False if nobody is there to read it."""
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
        """The messages that have arrived, without waiting. A line torn by the sender's death is dropped.

        Raises ValueError for a line that is no JSON object, or longer than any message: the other side is not ours.
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
        return [_decode(line) for line in lines]

    def close(self) -> None:
        """Close this end in this process."""
        self._socket.close()


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    message = parse_json(line)
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {line[:80]!r}")
    return message
