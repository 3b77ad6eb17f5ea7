"""Serves the web application until interrupted."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from seatrial.base.errors import InputError
from seatrial.record.folder import RunFolder
from seatrial.watch.web.access import Access, is_loopback
from seatrial.watch.web.app import application
from seatrial.watch.web.runs import Runs

_NICE = 5  # a run on the same machine has priority
_GRACE_S = 1  # for responses in progress at shutdown; streams are ended before
_KEEP_ALIVE_S = 30


class Server(uvicorn.Server):
    """Ends the streams first on shutdown: uvicorn would wait for them."""

    runs: list[Runs]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for runs in self.runs:
            runs.end()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError if the address cannot be used."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(256)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            hint="choose another with --port or --host",
        ) from error
    return listening


def serve(
    chosen: Sequence[RunFolder],
    root: Path,
    listening: socket.socket,
    token: str | None,
    *,
    new: bool,
    kept: Path,
) -> None:
    """Serve until SIGINT or SIGTERM. `new`: the token was just created and is printed; else its file `kept` is."""
    host, port = listening.getsockname()[:2]
    assert token is not None or is_loopback(host)
    os.nice(_NICE)
    made: list[Runs] = []
    app = application(lambda: Runs(chosen, root, asyncio.get_running_loop()), Access(token), made)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        limit_concurrency=2000,
    )
    server = Server(config)
    server.runs = made
    name = f"[{host}]" if ":" in host else host
    where = f"http://{name}:{port}/"
    if token is not None:
        # In the fragment, which browsers do not send, so it is in no log.
        where = f"{where}#token={token}" if new else f"{where} (token: see {kept})"
    print(f"serving on {where}", file=sys.stderr, flush=True)
    if is_loopback(host):
        print(
            f"from another machine: ssh -L {port}:localhost:{port} {socket.gethostname()}",
            file=sys.stderr,
            flush=True,
        )
    server.run(sockets=[listening])
