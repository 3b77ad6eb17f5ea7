"""The address and the network interface by which this host reaches its peers. IPv4 and IPv6; no packet is sent."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seatrial.base.errors import InputError

# linux/rtnetlink.h, linux/netlink.h, linux/if_addr.h
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type

# Addresses for documentation (RFC 5737, RFC 3849): packets to them leave by the default route.
_ANYWHERE = ("203.0.113.1", "2001:db8::1")
_ANY_PORT = 9


@dataclass(frozen=True)
class Route:
    """The address peers reach this host at (link-local IPv6 with its "%interface"), and why it was chosen."""

    address: str
    interface: str
    reason: str


@dataclass(frozen=True)
class LocalAddress:
    """An address of this host, as `ip address` lists it."""

    interface: str
    address: str  # without "%interface"
    prefix: int

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.address)

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Sort key: addresses that others are likelier to reach come first; IPv4 before IPv6."""
        return self.ip.is_loopback, self.ip.is_link_local, self.ip.version == 6

    def route(self, reason: str) -> Route:
        scoped = self.ip.version == 6 and self.ip.is_link_local
        return Route(f"{self.address}%{self.interface}" if scoped else self.address, self.interface, reason)


def own_addresses() -> list[LocalAddress]:
    """Every address of this host, secondary ones too, in the kernel's order (netlink, RTM_GETADDR)."""
    found: list[LocalAddress] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = netlink.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind != _RTM_NEWADDR:  # NLMSG_DONE
                    return found
                found += _own(data[_HEADER.size : length])
                data = data[(length + 3) & ~3 :]


def _own(message: bytes) -> Iterator[LocalAddress]:
    family, prefix, _flags, _scope, index = _ADDRESS.unpack_from(message)
    values: dict[int, bytes] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        values[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]
    # On a point-to-point link IFA_ADDRESS is the address of the other end.
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if family in (socket.AF_INET, socket.AF_INET6) and packed:
        yield LocalAddress(socket.if_indextoname(index), socket.inet_ntop(family, packed), prefix)


def route(peers: Sequence[str], bind: str | None = None) -> Route:
    """The address by which this host reaches `peers` (names or addresses), or the one selected by `bind`.

    `bind` is an address, a CIDR or an interface name. Peers are tried in order until one is reached by a route other
    than loopback; peers without a known address or route are skipped. If none qualifies: the default route, else any
    address; loopback if all peers are on it, or there is nothing else. Raises InputError if `bind` matches nothing.
    """
    own = own_addresses()
    loopback: list[str] = []  # peers that are reached over it
    missed: list[str] = []
    towards: tuple[LocalAddress, str] | None = None
    us = socket.gethostname().partition(".")[0]
    # Our own name last, and it does not prove that all peers are on one host: Debian's /etc/hosts maps it to loopback.
    for peer in sorted(peers, key=lambda name: name.partition(".")[0] == us):
        found = _towards(peer, own)
        if found is None:
            missed.append(peer)
        elif not found.ip.is_loopback:
            towards = found, peer
            break
        elif peer.partition(".")[0] != us:
            loopback.append(peer)
    if bind is not None:
        matching = _matching(bind, own)
        best = towards[0] if towards is not None and towards[0] in matching else matching[0]
        return best.route(f'cluster.bind = "{bind}"')
    if towards is not None:
        return towards[0].route(f"the route to {towards[1]}")
    if loopback and not missed:
        return _first(own, loopback=True).route(f"all peers are on this host: {_some(loopback)}")
    why = f"no address or no route for {_some(missed)}" if missed else "no other host is known"
    for anywhere in _ANYWHERE:
        found = _towards(anywhere, own)
        if found is not None and not found.ip.is_loopback:
            return found.route(f"the default route ({why})")
    return _first(own).route(f"the first address available ({why}, and there is no default route)")


def interface_towards(address: str) -> str | None:
    """The network interface that packets to `address` leave by; None if the kernel has no route."""
    found = _towards(address, own_addresses())
    return None if found is None else found.interface


def _towards(peer: str, own: Sequence[LocalAddress]) -> LocalAddress | None:
    """Our source address for packets to `peer`; None if it has no known address or no route."""
    try:
        places = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return None
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as s:
                s.connect(place)  # sends nothing: the kernel only looks up the route
                name = s.getsockname()
        except OSError:
            continue
        address = name[0].partition("%")[0]
        scope = socket.if_indextoname(name[3]) if family == socket.AF_INET6 and name[3] else None
        for each in own:
            if each.address == address and scope in (None, each.interface):
                return each
        if ipaddress.ip_address(address).is_loopback:  # 127.0.1.1 and its like belong to no interface
            return LocalAddress("lo", address, 8)
    return None


def _matching(bind: str, own: Sequence[LocalAddress]) -> list[LocalAddress]:
    """Our addresses that match `bind`, the best first; InputError if there is none."""
    found = [each for each in own if each.interface == bind]
    if not found:
        wanted, _, scope = bind.partition("%")
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            pass  # the name of an interface that this host does not have
        else:
            found = [each for each in own if each.ip in network and scope in ("", each.interface)]
    if not found:
        there = ", ".join(f"{each.interface} {each.address}/{each.prefix}" for each in own)
        raise InputError(
            f'this host ({socket.gethostname()}) has no address or interface "{bind}"',
            hint=f"there are: {there or 'none'}",
        )
    return sorted(found, key=lambda each: each.rank)


def _first(own: Sequence[LocalAddress], *, loopback: bool = False) -> LocalAddress:
    if not own:
        raise InputError(
            "this host has no network address at all",
            hint="is the loopback interface up? `ip link set lo up`",
        )
    return sorted(own, key=lambda each: (each.ip.is_loopback != loopback, *each.rank))[0]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
