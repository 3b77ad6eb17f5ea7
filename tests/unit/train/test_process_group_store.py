"""The store of a process group: its address, and that ranks connect to it."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from seatrial.parallel.store import serve_store

TIMEOUT = timedelta(seconds=10)


def test_the_store_listens_on_one_address_only() -> None:
    store = serve_store("127.0.0.1", 0, TIMEOUT)
    client = TCPStore("127.0.0.1", store.port, None, is_master=False, timeout=TIMEOUT)
    client.set("a", "1")
    assert store.get("a") == b"1"
    with pytest.raises(ConnectionRefusedError):
        # Another address of this host: whoever listens on every interface listens there too.
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_the_port_is_free_after_the_store_is_released() -> None:
    store = serve_store("127.0.0.1", 0, TIMEOUT)
    port = store.port
    with pytest.raises(OSError, match="in use") as taken:
        serve_store("127.0.0.1", port, TIMEOUT)
    assert taken.value.errno == errno.EADDRINUSE
    del store
    again = serve_store("127.0.0.1", port, TIMEOUT)
    assert again.port == port


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        serve_store("192.0.2.1", 0, TIMEOUT)
