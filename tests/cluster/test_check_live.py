"""A real check of real hosts: network namespaces of this machine, with agents, ranks, links and faults of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from seatrial.check.judging.findings import Finding
from seatrial.check.live.conductor import LiveOptions, LiveResult, check_live
from seatrial.check.live.hosts import Host
from seatrial.check.node.node_stage import NodeOptions
from seatrial.launch.netns import Hosts, Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

_MARK = "SEATRIAL_TEST_CHECK"
# What a link carries in these tests: far less than this machine's processors move, so that it is the link that is measured.
RATE_MBIT = 200.0
# What they have is asked, how fast it is not: that is test_check_node's matter.
OPTIONS = LiveOptions(NodeOptions(seconds=20.0, rates=False), timeout_s=60.0)


class Cluster:
    """Hosts to check, and what can be done to one of them."""

    def __init__(self, net: Hosts, folder: Path) -> None:
        self.net, self.mark = net, uuid.uuid4().hex
        self.folder = folder
        self.hosts = [
            Host(
                f"node{n}",
                net.address(n),
                tuple(net.prefix(n)),
                environment={_MARK: f"{self.mark}-{n}", "TMPDIR": str(folder)},
            )
            for n in range(net.count)
        ]
        for n in range(net.count):
            net.slow(n, RATE_MBIT)

    def processes(self, host: int | None = None) -> dict[int, str]:
        """pid -> command line of what runs on `host`, or on any."""
        wanted = f"{_MARK}={self.mark}" + ("" if host is None else f"-{host}\0")
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted.encode() in (entry / "environ").read_bytes() + b"\0":
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def signal_agent(self, host: int, signum: int) -> None:
        """Send a signal to the agent of a host, and to nothing else."""
        agents = [p for p, command in self.processes(host).items() if "check.live.agent" in command]
        assert len(agents) == 1, self.processes(host)
        os.kill(agents[0], signum)

    def check(
        self, at: str = "", then: Callable[[], None] = lambda: None, options: LiveOptions = OPTIONS
    ) -> LiveResult:
        """Check all; once a line of progress begins with `at`, `then` happens, one time. Nothing may be left of it."""
        told: list[str] = []

        def progress(line: str) -> None:
            if at and line.startswith(at) and not any(t.startswith(at) for t in told):
                then()
            told.append(line)
            print(line)  # where a test fails, so that it can be seen how it went

        result = check_live(self.hosts, options, progress)
        print(
            *(f"{f.code} {f.target} {f.message}" for f in result.report.findings if f.verdict == "FAIL"),
            sep="\n",
        )
        print(
            *(f"{f.code} {f.message}" for f in result.report.findings if f.code in ("LIV009", "PAI001")),
            sep="\n",
        )
        assert not at or any(t.startswith(at) for t in told), told
        assert self.processes() == {}
        assert list(self.folder.iterdir()) == []
        return result


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            net = stack.enter_context(Hosts(getattr(request, "param", 5)))
        except Unavailable as error:
            pytest.skip(str(error))
        made = Cluster(net, tmp_path)
        try:
            yield made
        finally:
            for pid in made.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def failed(result: LiveResult) -> set[str]:
    """The nodes that something is said against, other than what all of them lack."""
    return {n for f in result.report.findings if f.verdict == "FAIL" and (n := f.target.node) is not None}


def of(result: LiveResult, code: str) -> list[Finding]:
    return [f for f in result.report.findings if f.code == code]


@pytest.mark.parametrize("cluster", [8], indirect=True)
def test_only_the_link_at_a_tenth_of_the_rate_is_named(cluster: Cluster) -> None:
    cluster.net.slow(5, RATE_MBIT / 10)
    result = cluster.check()
    assert [(b.node, b.kind, b.verdict) for b in result.blames] == [("node5", "nic", "FAIL")]
    assert failed(result) == {"node5"}
    assert result.unsettled == ()
    reached = {f.target.node: f for f in of(result, "PAI001")}
    assert reached.keys() == {f"node{n}" for n in range(8) if n != 5}
    assert {finding.verdict for finding in reached.values()} == {"PASS"}
    # The links are the limit, and what was measured is what they carry, but where the machine was too busy.
    rates = [float(finding.measured or 0) for finding in reached.values()]
    assert median(rates) > 0.8 * RATE_MBIT / 1000
    assert max(rates) < 1.1 * RATE_MBIT / 1000
    assert of(result, "NET007")[0].verdict == "UNJUDGED"  # ib_write_bw: this host shows no RDMA device
    assert result.measured["send_recv"]["n"] == 8
    assert result.measured["send_recv"]["min"] < 0.2 * result.measured["send_recv"]["median"]
    assert {r["nodes"] for r in result.measured["all_reduce"]} == {2, 7}


@pytest.mark.long  # all but one are well in the test of the slow link
def test_hosts_that_are_well_are_not_blamed(cluster: Cluster) -> None:
    result = cluster.check()
    assert result.blames == ()
    assert failed(result) == set()
    assert result.unsettled == ()
    assert len(of(result, "PAI001")) == 5


@pytest.mark.long  # on one host: test_check_agents
def test_a_host_whose_agent_dies_in_the_middle_is_named(cluster: Cluster) -> None:
    result = cluster.check("pairs, round 2", lambda: cluster.signal_agent(4, signal.SIGKILL))
    assert [(b.node, b.kind) for b in result.blames] == [("node4", "node")]
    assert failed(result) == {"node4"}
    (gone,) = of(result, "LIV002")
    assert "SIGKILL" in gone.message


@pytest.mark.long
def test_a_host_that_is_cut_off_in_the_middle_is_named(cluster: Cluster) -> None:
    # Its agent goes on to reply: what starts it does not go over the network between the nodes.
    result = cluster.check("pairs, round 2", lambda: cluster.net.down(2))
    assert [(b.node, b.kind) for b in result.blames] == [("node2", "node")]
    assert failed(result) == {"node2"}
    assert of(result, "LIV003")[0].target.node == "node2"


@pytest.mark.long
def test_a_host_that_is_cut_off_before_the_groups_is_named(cluster: Cluster) -> None:
    result = cluster.check("groups", lambda: cluster.net.down(1))
    assert [(b.node, b.kind) for b in result.blames] == [("node1", "node")]
    assert failed(result) == {"node1"}


@pytest.mark.long  # waits for its silence; one that dies is in the default suite
def test_an_agent_that_hangs_is_named(cluster: Cluster) -> None:
    options = LiveOptions(OPTIONS.node, timeout_s=10.0)
    result = cluster.check("pairs, round 2", lambda: cluster.signal_agent(3, signal.SIGSTOP), options)
    assert [(b.node, b.kind) for b in result.blames] == [("node3", "node")]
    assert failed(result) == {"node3"}


@pytest.mark.ci
def test_unreachable_hosts_and_hosts_unable_to_run_are_named(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster.hosts[0] = Host("node0", cluster.net.address(0), ("ip", "netns", "exec", "no-such-namespace"))
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    second = cluster.hosts[1]
    paths = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**second.environment, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    cluster.hosts[1] = Host(second.name, second.address, second.prefix, environment=environment)
    result = cluster.check()
    assert [(b.node, b.kind) for b in result.blames] == [("node0", "node")]
    assert failed(result) == {"node0", "node1"}
    (reason,) = of(result, "LIV001")
    assert "no-such-namespace" in reason.message
    (unable,) = of(result, "LIV004")
    assert unable.target.node == "node1"
    assert "libtorch.so" in unable.message
