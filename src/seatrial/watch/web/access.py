"""Who may read: the token required on non-loopback addresses, sessions, and the accepted Host names."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
import time
from collections import deque
from hashlib import sha256
from pathlib import Path

from seatrial.base.errors import InputError
from seatrial.base.files import open_file

COOKIE = "seatrial_session"
_TOKEN_BYTES = 24
_LONGEST_TOKEN = 200
# Wrong tokens per address and window of seconds; ten times as many over all addresses.
_FAILURES, _WINDOW_S = 5, 60.0
_MOST_SESSIONS = 1000


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def answers_to(host: str | None) -> bool:
    """Whether a request with this Host header is served.

    Against DNS rebinding: a page of another site can point its own host name at our address, but cannot make a browser
    send an IP address or one of this machine's names.
    """
    if not host:
        return False
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = socket.gethostname().lower()
        return name.lower() in {"localhost", own, own.partition(".")[0]}


def make_token(path: Path) -> tuple[str, bool]:
    """The token in `path` and whether it was just created, with mode 600. Raises InputError if others can read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _token_in(path), False
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        with open(fd, "w", encoding="ascii") as file:
            file.write(token + "\n")
        return token, True
    except OSError as error:
        raise InputError(f"{path}: cannot write the token: {error.strerror}") from error


def _token_in(path: Path) -> str:
    with open(open_file(path), encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        token = file.read(_LONGEST_TOKEN).strip()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(
            f"{path} can be read by others", hint="remove it: the next start creates a new token"
        )
    if len(token) < _TOKEN_BYTES:
        raise InputError(f"{path} has no token", hint="remove it: the next start creates one")
    return token


class Access:
    """The sessions. Without a token everybody has access."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else sha256(token.encode()).digest()
        self._sessions: dict[str, None] = {}  # oldest first
        self._failed: dict[str, deque[float]] = {}

    @property
    def open(self) -> bool:
        return self._digest is None

    def allows(self, session: str | None) -> bool:
        """Whether `session`, the cookie's value, is a valid session."""
        return self.open or (session is not None and session in self._sessions)

    def is_right(self, token: str, address: str) -> bool:
        """Whether `token` is right. Raises PermissionError after too many wrong ones from `address`, or in total."""
        now = time.monotonic()
        for key, most in ((address, _FAILURES), ("", 10 * _FAILURES)):
            failed = self._failed.setdefault(key, deque(maxlen=10 * _FAILURES))
            while failed and failed[0] < now - _WINDOW_S:
                failed.popleft()
            if len(failed) >= most:
                raise PermissionError("too many wrong tokens: wait a minute")
        digest = sha256(token.encode("utf-8", errors="replace")).digest()
        if self._digest is not None and hmac.compare_digest(digest, self._digest):
            return True
        self._failed[address].append(now)
        self._failed[""].append(now)
        # Drop addresses without failures in the window.
        self._failed = {key: times for key, times in self._failed.items() if times}
        return False

    def log_in(self, token: str, address: str) -> str | None:
        """A new session if `token` is right; None if not. Raises as `is_right`."""
        if not self.is_right(token, address):
            return None
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(_TOKEN_BYTES)
        self._sessions[session] = None
        return session
