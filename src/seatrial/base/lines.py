"""Messages between processes of one machine: JSON objects, one a line, over a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any


class Channel:
    """One end of a socket pair. A message is a JSON object; nothing is ever unpickled."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""
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

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Send one message; False if nobody is there to read it. Waits while the other side's buffer is full."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting. A line torn by the sender's death is dropped."""
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
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end in this process."""
        self._socket.close()
