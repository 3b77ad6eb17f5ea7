"""Network namespaces as separate hosts: they reach each other, can be cut and slowed, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.launch import netns
from seatrial.launch.netns import Hosts, Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

PORT = 20900
AMOUNT = 2_000_000  # bytes: 0.8 s at 20 Mbit/s

# Sends back what it is sent, so that one clock measures both directions.
ECHO = f"""
import socket, sys
server = socket.create_server((sys.argv[1], {PORT}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)
"""

# Connects and sends AMOUNT bytes there and back; the seconds it took, or what went wrong, as JSON.
SEND = f"""
import json, socket, sys, threading, time
try:
    with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as connection:
        begin = time.monotonic()
        writer = threading.Thread(target=connection.sendall, args=(b"x" * {AMOUNT},))
        writer.start()
        left = {AMOUNT}
        while left:
            left -= len(connection.recv(1 << 16))
        writer.join()
        print(json.dumps({{"seconds": time.monotonic() - begin}}))
except OSError as error:
    print(json.dumps({{"error": type(error).__name__}}))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3))
        except Unavailable as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture
def echo(hosts: Hosts) -> Iterator[None]:
    """An echo server on each host."""
    servers = []
    for host in range(hosts.count):
        command = [*hosts.prefix(host), sys.executable, "-c", ECHO, hosts.address(host)]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
    yield
    for server in servers:
        server.kill()
        server.communicate()


def send(hosts: Hosts, sender: int, receiver: int, timeout_s: float = 10.0) -> dict[str, Any]:
    done = subprocess.run(
        [*hosts.prefix(sender), sys.executable, "-c", SEND, hosts.address(receiver), str(timeout_s)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"st-{os.getpid()}*")) if folder.is_dir() else []


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.usefixtures("echo")
def test_hosts_reach_each_other_until_one_is_cut(hosts: Hosts) -> None:
    for sender, receiver in ((0, 1), (1, 2), (2, 0)):
        assert "seconds" in send(hosts, sender, receiver)
    hosts.down(1)
    assert send(hosts, 0, 1, 0.5) == {"error": "TimeoutError"}  # nobody is told: it is a pulled cable
    assert send(hosts, 1, 2, 0.5) == {"error": "TimeoutError"}
    assert "seconds" in send(hosts, 0, 2)
    assert "seconds" in send(hosts, 1, 1), "inside the host nothing has changed"
    hosts.up(1)
    assert "seconds" in send(hosts, 0, 1)


@pytest.mark.usefixtures("echo")
def test_a_slowed_link_carries_its_rate_in_both_directions(hosts: Hosts) -> None:
    free = send(hosts, 0, 1)["seconds"]
    hosts.slow(1, 20)
    ideal = 8 * AMOUNT / 20e6
    for sender, receiver in ((0, 1), (1, 0)):
        # The best of three: the machine may stop for a moment, the link is never faster than it is.
        slow = min(send(hosts, sender, receiver)["seconds"] for _ in range(3))
        # What is in the bucket goes at once, and each direction has one; headers and acknowledgements cost a little.
        assert 0.9 * ideal < slow < 1.5 * ideal
    assert send(hosts, 0, 2)["seconds"] < ideal / 2, "other links are as they were"
    hosts.fast(1)
    hosts.fast(2)  # was never slowed
    assert free < ideal / 2
    assert send(hosts, 0, 1)["seconds"] < ideal / 2


def test_a_process_in_a_host_is_our_own_child(hosts: Hosts) -> None:
    """`ip netns exec` becomes the command: the bond to the parent, descriptors and environment hold."""
    reader, writer = os.pipe()
    program = "import os, sys; os.write(int(sys.argv[1]), f'{os.getpid()} {os.getppid()} {os.environ[\"M\"]}'.encode())"
    command = [*hosts.prefix(0), sys.executable, "-c", program, str(writer)]
    with subprocess.Popen(command, pass_fds=(writer,), env={**os.environ, "M": "mark"}) as child:
        os.close(writer)
        assert select.select([reader], [], [], 20)[0]
        assert os.read(reader, 64).decode() == f"{child.pid} {os.getpid()} mark"
    os.close(reader)


@pytest.mark.usefixtures("hosts")
def test_nothing_is_left_also_after_an_exception() -> None:
    before, links = namespaces(), interfaces()

    def use() -> None:
        with Hosts(2) as more:
            assert len(namespaces()) == len(before) + 3
            assert interfaces() == links, "this machine's own network is not touched"
            more.slow(0, 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert namespaces() == before


@pytest.mark.usefixtures("hosts")
def test_hosts_of_a_killed_maker_are_removed_by_the_next() -> None:
    program = (
        "import os; from seatrial.launch.netns import Hosts; Hosts(1).__enter__(); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as maker:
        maker.wait()
    left = [p.name for p in Path("/run/netns").glob(f"st-{maker.pid}-*")]
    assert len(left) == 2
    inside = subprocess.Popen(["ip", "netns", "exec", f"st-{maker.pid}-0", "sleep", "1000"])
    try:
        # Until it is inside: `ip` becomes the command only then.
        while b"sleep" not in Path(f"/proc/{inside.pid}/cmdline").read_bytes().split(b"\0")[0]:
            assert inside.poll() is None
        netns.remove_orphans()
        assert Path(f"/run/netns/st-{maker.pid}-0").exists(), "somebody lives in it"
        assert not Path(f"/run/netns/st-{maker.pid}-hub").exists()
    finally:
        inside.kill()
        inside.wait()
    with Hosts(1):
        assert not list(Path("/run/netns").glob(f"st-{maker.pid}-*"))


def test_half_made_hosts_are_removed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    call, calls = netns._call, []

    def fail_later(*arguments: str) -> str:
        calls.append(arguments)
        if len(calls) == 12:
            raise Unavailable("as the test asked")
        return call(*arguments)

    monkeypatch.setattr(netns, "_call", fail_later)
    with pytest.raises(Unavailable, match="as the test asked"), Hosts(3):
        raise AssertionError
    assert namespaces() == before


def test_without_root_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), Hosts(1):
        raise AssertionError


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda name, path=None: None)
    with pytest.raises(Unavailable, match=r"`ip` \(iproute2\) is not installed"), Hosts(1):
        raise AssertionError


def test_addresses() -> None:
    hosts = Hosts(300)
    assert [hosts.address(i) for i in (0, 254, 255, 299)] == [
        "10.77.0.1",
        "10.77.0.255",
        "10.77.1.0",
        "10.77.1.44",
    ]
