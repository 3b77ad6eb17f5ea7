"""Messages between agents: JSON lines over TCP, mutually authenticated by the run's secret, every line signed.

    server  {"nonce"}                      client  {"nonce", "hello", "mac"}                  server  {"mac"}

Afterwards each line is `HMAC-SHA256 of (its number, its text)`, a space, the text. The keys differ by direction and
connection, so that a recorded line cannot be replayed elsewhere. Messages can be read in transit, but not forged or
changed. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import selectors
import socket
import struct
import time
from typing import Any, Literal

Message = dict[str, Any]
Progress = Literal["wait", "ready", "refused"]

_NONCE_BYTES = 16
_MAC_HEX = 64
_HANDSHAKE_BYTES = 1 << 18  # longest line from an unauthenticated connection
_LINE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 16  # one read: more costs a memory mapping for each
HANDSHAKE_S = 5.0
ACCEPT_AT_ONCE = 16  # so that repeated connections cannot monopolise the event loop
# Offset of tcpi_rtt (microseconds) in struct tcp_info, linux/tcp.h: eight bytes, then 4-byte fields.
_RTT_AT = 8 + 15 * 4
_compact = json.JSONEncoder(separators=(",", ":")).encode


class WireRefused(ConnectionError):
    """The other side does not know this run's secret, or does not speak this protocol."""


class _Keys:
    """The signing keys of one connection, as used by one of its sides."""

    def __init__(self, secret: bytes, server_nonce: str, client_nonce: str, *, server: bool) -> None:
        both = f"{server_nonce}|{client_nonce}"
        to_client, to_server = (_mac(secret, f"{way}|{both}").encode() for way in ("to client", "to server"))
        self._send, self._receive = (to_client, to_server) if server else (to_server, to_client)
        self._sent = self._received = 0

    def sign(self, message: Message) -> bytes:
        text = _compact(message)
        mac = _mac(self._send, f"{self._sent}|{text}")
        self._sent += 1
        return f"{mac} {text}\n".encode()

    def check(self, line: bytes) -> Message:
        mac, _, rest = line.partition(b" ")
        text = rest.decode(errors="replace")
        expected = _mac(self._receive, f"{self._received}|{text}")
        if not hmac.compare_digest(mac, expected.encode()):
            raise WireRefused("a line that is not signed with this run's secret")
        self._received += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise WireRefused("a line that is not a JSON object")
        return message


def _mac(secret: bytes, text: str) -> str:
    return hmac.digest(secret, text.encode(), "sha256").hex()


class BlockingLink:
    """An authenticated connection with blocking calls, for child processes that have nothing else to do."""

    def __init__(self, sock: socket.socket, keys: _Keys, timeout_s: float | None) -> None:
        sock.settimeout(timeout_s)
        self.sock = sock  # between messages it may carry raw bytes: nothing is read ahead
        self._keys = keys

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError."""
        self.sock.sendall(self._keys.sign(message))

    def receive(self) -> Message:
        """The next message. Raises WireRefused, ConnectionError at the end of the stream, TimeoutError."""
        return self._keys.check(_read_line(self.sock, _LINE_BYTES))

    def close(self) -> None:
        self.sock.close()


class Link:
    """An authenticated connection for an event loop; no call blocks."""

    def __init__(self, sock: socket.socket, keys: _Keys, rest: bytes = b"") -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair in a test has no such option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.closed = False  # nothing more can be received or sent
        self.why = ""  # why it was closed, if known
        self.heard = time.monotonic()  # when something was last received
        self._keys = keys
        self._in = rest
        self._out = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """Events to register with a selector."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    @property
    def round_trip_s(self) -> float:
        """The kernel's estimate of the round-trip time to the peer, from TCP acknowledgements; 0 if unknown.

        It does not depend on how busy the processes at either end are.
        """
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
        except OSError:  # disconnected, or a socket pair in a test
            return 0.0
        return float(struct.unpack_from("=I", info, _RTT_AT)[0]) / 1e6

    def send(self, message: Message) -> None:
        """Send one message, as far as the socket accepts it now; `flush` sends the rest."""
        if not self.closed:
            self._out += self._keys.sign(message)
            self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        try:
            while self._out and not self.closed:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error.strerror or str(error))

    def receive(self) -> list[Message]:
        """The messages that have arrived, without blocking. A line that is not signed ends the connection."""
        while not self.closed:
            try:
                data = self.sock.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._end(error.strerror or str(error))
                break
            if not data:
                self._end("connection closed")
                break
            self._in += data
            if len(data) < _CHUNK_BYTES:
                break  # no more data yet; an end of the stream is found by the next call
        messages = []
        if b"\n" in self._in:
            *lines, self._in = self._in.split(b"\n")
            self.heard = time.monotonic()
            for line in lines:
                try:
                    messages.append(self._keys.check(line))
                except (WireRefused, ValueError) as error:
                    self._end(str(error))
                    break
        if len(self._in) > _LINE_BYTES:
            self._end("a line without an end")
        return messages

    def unread(self) -> bool:
        """Whether data has arrived that was not received yet."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def refuse(self, why: str) -> None:
        """End the connection for both sides; `close` is still to follow."""
        self._end(why)
        with contextlib.suppress(OSError):  # the other side has disconnected
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end("closed here")
        self.sock.close()

    def _end(self, why: str) -> None:
        if not self.closed:
            self.closed, self.why = True, why


class _Handshake:
    """One side of the authentication handshake, non-blocking; call `advance` when its socket is ready."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.why = ""
        self.deadline = time.monotonic() + HANDSHAKE_S
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES).hex()
        self._in = b""
        self._unsent = b""
        self._keys: _Keys | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """Events to register with a selector."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def close(self) -> None:
        self.sock.close()

    def _put(self, message: Message) -> None:
        """Send a line, as far as the socket accepts it. After BlockingIOError `advance` sends the rest."""
        self._unsent += _encode(message)
        self._push()

    def _push(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def link(self) -> Link:
        """The connection for an event loop, once `advance` has returned "ready"."""
        assert self._keys is not None
        return Link(self.sock, self._keys, self._in)

    def session(self, timeout_s: float | None = None) -> BlockingLink:
        """The connection for a process of its own, once `advance` has returned "ready"."""
        assert self._keys is not None
        assert not self._in
        return BlockingLink(self.sock, self._keys, timeout_s)

    def _line(self) -> Message | None:
        """The next line of the other side. Reads no further than its end: what follows may be for another reader."""
        while b"\n" not in self._in:
            peeked = self.sock.recv(_HANDSHAKE_BYTES, socket.MSG_PEEK)
            if not peeked:
                raise WireRefused("it closed the connection")
            end = peeked.find(b"\n") + 1
            self._in += self.sock.recv(end or len(peeked))
            if len(self._in) > _HANDSHAKE_BYTES:
                raise WireRefused("a first line without an end")
        line, self._in = self._in, b""
        message = json.loads(line)
        if not isinstance(message, dict):
            raise WireRefused("a first line that is not a JSON object")
        return message

    def _refuse(self, why: str) -> Progress:
        self.why = why
        return "refused"


class Incoming(_Handshake):
    """A connection that a peer opened to us; its `hello` is trusted once `advance` has returned "ready"."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        super().__init__(sock, secret)
        self.hello: Message = {}
        self._greeted = False

    def advance(self) -> Progress:
        """Continue the handshake as far as possible without blocking."""
        try:
            if not self._greeted:
                self._greeted = True
                self._put({"nonce": self._nonce})
            self._push()
            message = self._line()
            assert message is not None
            theirs, hello = str(message["nonce"]), message["hello"]
            expected = _mac(self._secret, f"client|{self._nonce}|{theirs}|{json.dumps(hello)}")
            if not hmac.compare_digest(str(message["mac"]), expected):
                return self._refuse("it does not know this run's secret")
            self.hello = dict(hello)
            self._keys = _Keys(self._secret, self._nonce, theirs, server=True)
            self._put({"mac": _mac(self._secret, f"server|{theirs}|{self._nonce}")})
        except BlockingIOError:
            return "wait"
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return self._refuse(str(error))
        return "ready"


class Outgoing(_Handshake):
    """A connection that we open."""

    def __init__(self, address: str, port: int, secret: bytes, hello: Message) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__(socket.socket(family, socket.SOCK_STREAM), secret)
        self.peer = f"{address}:{port}"
        self._hello = hello
        self.connected = False  # the kernel at the other end has accepted it
        self._theirs: str | None = None
        try:
            self.sock.connect((address, port))
        except BlockingIOError:
            pass
        except OSError as error:
            self.why = error.strerror or str(error)
        except (ValueError, OverflowError) as error:  # from a damaged record: invalid address or port
            self.why = str(error)

    @property
    def nothing_listens(self) -> bool:
        """Whether the connection was refused: its process has certainly exited."""
        return self.why == os.strerror(errno.ECONNREFUSED)

    @property
    def greeted(self) -> bool:
        """Whether our hello has been sent, or is being sent."""
        return self._theirs is not None

    @property
    def events(self) -> int:
        """Events to register with a selector."""
        return super().events if self.connected else selectors.EVENT_WRITE

    def advance(self) -> Progress:
        """Continue the handshake as far as possible without blocking."""
        if self.why:
            return "refused"
        try:
            if not self.connected:
                error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    return self._refuse(os.strerror(error))
                self.sock.getpeername()  # OSError ENOTCONN while still connecting
                self.connected = True
            if self._theirs is None:
                greeting = self._line()
                assert greeting is not None
                self._theirs = str(greeting["nonce"])
                proof = _mac(self._secret, f"client|{self._theirs}|{self._nonce}|{json.dumps(self._hello)}")
                self._put({"nonce": self._nonce, "hello": self._hello, "mac": proof})
            self._push()
            answer = self._line()
            assert answer is not None
            expected = _mac(self._secret, f"server|{self._nonce}|{self._theirs}")
            if not hmac.compare_digest(str(answer["mac"]), expected):
                return self._refuse("it does not know this run's secret")
            self._keys = _Keys(self._secret, self._theirs, self._nonce, server=False)
        except BlockingIOError:
            return "wait"
        except OSError as error:
            if not self.connected and error.errno == 107:  # ENOTCONN: still connecting
                return "wait"
            return self._refuse(error.strerror or str(error))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return self._refuse(str(error))
        return "ready"


class Listener:
    """The listening socket that peers connect to."""

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        """Listen on `port` of `address`, 0 for a free one. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, port))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self._secret = secret
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> list[Incoming]:
        """Accept some pending connections, the others next time; none is authenticated yet."""
        found: list[Incoming] = []
        while len(found) < ACCEPT_AT_ONCE:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                # No pending connection; or the error of one that failed before it was accepted, which Linux reports
                # here; or no free descriptor: then pending connections are accepted once there is one.
                break
            found.append(Incoming(sock, self._secret))
        return found

    def close(self) -> None:
        self._socket.close()


def dial(address: str, port: int, secret: bytes, hello: Message, timeout_s: float) -> BlockingLink:
    """Connect and authenticate, blocking at most `timeout_s`. Raises WireRefused, TimeoutError or another OSError."""
    deadline = time.monotonic() + timeout_s
    outgoing = Outgoing(address, port, secret, hello)
    with selectors.DefaultSelector() as selector:
        while (progress := outgoing.advance()) == "wait":
            selector.register(outgoing, outgoing.events)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            selector.unregister(outgoing)
            if not ready:
                outgoing.close()
                raise TimeoutError(f"{address}:{port} did not answer within {timeout_s:g} s")
    if progress == "refused":
        outgoing.close()
        raise WireRefused(f"{address}:{port}: {outgoing.why}")
    return outgoing.session(timeout_s)


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(sock: socket.socket, limit: int) -> bytes:
    line = b""
    while True:
        peeked = sock.recv(1 << 16, socket.MSG_PEEK)
        if not peeked:
            raise ConnectionError("the other side closed the connection")
        end = peeked.find(b"\n") + 1
        line += sock.recv(end or len(peeked))
        if end:
            return line[:-1]
        if len(line) > limit:
            raise WireRefused("a line without an end")
