"""The address by the route to the peers, in network namespaces: two networks, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from seatrial.launch.netns import Hosts, Unavailable, _call

pytestmark = [pytest.mark.cluster]

ASK = """
import dataclasses, json, sys
from seatrial.base.address import own_addresses, route
from seatrial.base.errors import InputError
peers, bind = json.loads(sys.argv[1])
try:
    print(json.dumps(dataclasses.asdict(route(peers, bind))))
except InputError as error:
    print(json.dumps({"error": error.diagnostics[0].message, "hint": error.diagnostics[0].hint}))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """eth0 is in 10.77/16 and fd77::/64, with a secondary address; eth1, a second network, in 10.88/16 and fd88::/64."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(2))
        except Unavailable as error:
            pytest.skip(str(error))
        a, b = made.name(0), made.name(1)
        _call("ip", "-n", a, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", b)
        for n, name in enumerate((a, b), 1):
            for address, device in (
                (f"fd77::{n}/64", "eth0"),
                (f"10.88.0.{n}/16", "eth1"),
                (f"10.88.9.{n}/16", "eth1"),  # secondary: the same network as the one before
                (f"fd88::{n}/64", "eth1"),
                # The kernel's own ones may not be used until nobody else has answered for a second.
                (f"fe80::{n}/64", "eth0"),
                (f"fe80::{n}/64", "eth1"),
            ):
                more = ["nodad"] if ":" in address else []
                _call("ip", "-n", name, "address", "add", address, "dev", device, *more)
            _call("ip", "-n", name, "link", "set", "eth1", "up")
        yield made


def ask(hosts: Hosts, *peers: str, bind: str | None = None) -> dict[str, str]:
    """What host 0 says."""
    done = subprocess.run(
        [*hosts.prefix(0), sys.executable, "-c", ASK, json.dumps([peers, bind])],
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("peer", "address", "interface"),
    [
        ("10.77.0.2", "10.77.0.1", "eth0"),
        ("10.88.0.2", "10.88.0.1", "eth1"),
        ("fd77::2", "fd77::1", "eth0"),
        ("fd88::2", "fd88::1", "eth1"),
    ],
)
def test_the_interface_that_leads_to_the_peer(hosts: Hosts, peer: str, address: str, interface: str) -> None:
    found = ask(hosts, peer)
    assert found == {"address": address, "interface": interface, "reason": f"the route to {peer}"}


def test_link_local_peers_are_reached_with_their_scope(hosts: Hosts) -> None:
    for interface in ("eth0", "eth1"):
        found = ask(hosts, f"fe80::2%{interface}")
        assert found["interface"] == interface
        assert found["address"].startswith("fe80::")
        assert found["address"].endswith(f"%{interface}")


def test_peers_without_route_or_on_loopback_are_passed_over(hosts: Hosts) -> None:
    found = ask(hosts, "192.168.9.9", "no-such-host.invalid", "127.0.1.1", "10.88.0.2")
    assert (found["address"], found["reason"]) == ("10.88.0.1", "the route to 10.88.0.2")


def test_address_fallbacks_without_a_route_to_a_peer(hosts: Hosts) -> None:
    assert ask(hosts) == {
        "address": "10.77.0.1",
        "interface": "eth0",
        "reason": "the first address available (no other host is known, and there is no default route)",
    }
    assert ask(hosts, "127.0.0.1", "::1") == {
        "address": "127.0.0.1",
        "interface": "lo",
        "reason": "all peers are on this host: 127.0.0.1, ::1",
    }
    name = hosts.name(0)
    for family, gateway, address in (("-6", "fd88::2", "fd88::1"), ("-4", "10.88.0.2", "10.88.0.1")):
        _call("ip", "-n", name, family, "route", "add", "default", "via", gateway)
        found = ask(hosts, "no-such-host.invalid")
        assert (found["address"], found["interface"]) == (address, "eth1")
        assert found["reason"] == "the default route (no address or no route for no-such-host.invalid)"
    for family in ("-6", "-4"):
        _call("ip", "-n", name, family, "route", "del", "default")


@pytest.mark.parametrize(
    ("bind", "address", "interface"),
    [
        ("eth1", "10.88.0.1", "eth1"),
        ("10.88.9.1", "10.88.9.1", "eth1"),
        ("10.88.9.0/24", "10.88.9.1", "eth1"),
        ("fd88::/64", "fd88::1", "eth1"),
        ("FD88:0::1", "fd88::1", "eth1"),
        ("10.88.0.0/16", "10.88.0.1", "eth1"),
    ],
)
def test_bind_overrides_the_route(hosts: Hosts, bind: str, address: str, interface: str) -> None:
    found = ask(hosts, "10.77.0.2", bind=bind)
    assert found == {"address": address, "interface": interface, "reason": f'cluster.bind = "{bind}"'}


def test_bind_interface_uses_its_address_of_the_peers_family(hosts: Hosts) -> None:
    assert ask(hosts, "fd88::2", bind="eth1")["address"] == "fd88::1"
    assert ask(hosts, "10.88.0.2", bind="eth1")["address"] == "10.88.0.1"


@pytest.mark.parametrize("bind", ["eth7", "10.99.0.0/16", "10.88.0.2", "not an interface/12"])
def test_bind_that_matches_nothing_lists_the_addresses(hosts: Hosts, bind: str) -> None:
    found = ask(hosts, "10.77.0.2", bind=bind)
    assert f'has no address or interface "{bind}"' in found["error"]
    for there in (
        "lo 127.0.0.1/8",
        "eth0 10.77.0.1/16",
        "eth1 10.88.0.1/16",
        "eth1 10.88.9.1/16",
        "eth1 fd88::1/64",
    ):
        assert there in found["hint"]


def test_a_host_with_nothing_but_loopback(hosts: Hosts) -> None:
    name = hosts.name(0)
    for device in ("eth0", "eth1"):
        _call("ip", "-n", name, "address", "flush", "dev", device)
    assert ask(hosts, "10.77.0.2") == {
        "address": "127.0.0.1",
        "interface": "lo",
        "reason": "the first address available (no address or no route for 10.77.0.2, and there is no default route)",
    }
