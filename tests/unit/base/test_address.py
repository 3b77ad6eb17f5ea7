"""The address by the route, as far as it can be seen without networks of one's own (tests/cluster/test_address.py)."""

from __future__ import annotations

import socket

import pytest

from seatrial.base.address import own_addresses, route
from seatrial.base.errors import InputError


def test_every_address_has_an_interface_that_is_there() -> None:
    names = {name for _, name in socket.if_nameindex()}
    own = own_addresses()
    assert {each.interface for each in own} <= names
    assert ("lo", "127.0.0.1", 8) in {(each.interface, each.address, each.prefix) for each in own}


def test_peers_on_loopback_are_on_this_host() -> None:
    found = route(["127.0.0.1", "127.0.1.1"])
    assert (found.address, found.interface) == ("127.0.0.1", "lo")
    assert found.reason == "all peers are on this host: 127.0.0.1, 127.0.1.1"


def test_own_name_on_loopback_does_not_decide_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has it at 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.example.org")
    assert "no other host is known" in route(["localhost"]).reason


def test_a_bind_that_matches_nothing_is_bad_input() -> None:
    with pytest.raises(InputError, match='no address or interface "eth77"') as caught:
        route([], "eth77")
    assert "lo 127.0.0.1/8" in (caught.value.diagnostics[0].hint or "")
