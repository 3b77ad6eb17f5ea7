"""The parts of a live check that need no process: who is cut off, which worlds run at once, what ranks and tools have said."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.address import interface_towards
from seatrial.check.blame.infer import Readings, Thresholds
from seatrial.check.blame.localise import GroupReadings, localise
from seatrial.check.blame.nodes import Bools, Floats, Ints, NodeStage
from seatrial.check.blame.rounds import GroupRound, Round
from seatrial.check.live import ib_pair, live_judge
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import Reply
from seatrial.check.live.live_ranks import Outcome, RankGroup, Sum, batches, outcome
from seatrial.check.live.live_rates import measured
from seatrial.check.live.nccl_lines import topology_lines
from seatrial.check.live.reach import cut_off, partners, reach

# -- who reaches whom


@settings(max_examples=40)
@given(st.integers(3, 64), st.data())
def test_only_the_host_that_is_cut_off_is_found(nodes: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, nodes - 1))
    tries = partners(range(nodes))
    reached = [(a, b) for a, others in tries.items() for b in others if lost not in (a, b)]
    assert cut_off(range(nodes), reached) == ({lost} if nodes > 2 else set())
    assert max(len(others) for others in tries.values()) <= nodes.bit_length()


def test_without_a_majority_no_host_counts_as_cut_off() -> None:
    assert cut_off([0, 1], []) == set()
    assert cut_off([0, 1, 2, 3], [(0, 1), (2, 3)]) == set()
    assert cut_off([0, 1, 2, 3], [(0, 1), (1, 2)]) == {3}
    assert cut_off([], []) == set()


def test_one_failed_connection_cuts_no_host_off() -> None:
    tries = partners(range(8))
    pairs = [(a, b) for a, others in tries.items() for b in others]
    for failed in pairs:
        assert cut_off(range(8), [p for p in pairs if p != failed]) == set()


def test_connection_refused_counts_as_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        here = msg.Endpoint("127.0.0.1", port)
        found = reach([here, msg.Endpoint("no-such-host.invalid", port)], 5.0)
    assert found.reached == [True, False]
    assert "not known" in found.why[1]
    assert reach([here], 5.0).reached == [True]  # refused: its kernel has answered
    assert reach([], 5.0) == msg.Reached([], [])


def test_the_interface_is_the_one_that_leads_there() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None


# -- worlds of ranks


def group(*members: int, ranks: int = 1, **more: Any) -> RankGroup:
    return RankGroup(members, ((0,) if ranks == 1 else tuple(range(ranks)),) * len(members), **more)


def test_groups_on_one_machine_run_one_after_another() -> None:
    worlds = [group(0, 1), group(2, 3), group(4, 5)]
    assert batches(worlds, ["a", "b", "c", "d", "e", "f"]) == [[0, 1, 2]]
    assert batches(worlds, ["a", "b", "b", "c", "d", "e"]) == [[0, 2], [1]]
    assert batches(worlds, ["a"] * 6) == [[0], [1], [2]]


def told(rank: int, measured: msg.Measured | None = None, failed: str = "") -> Reply[msg.RanksEnded]:
    return Reply(msg.RanksEnded([msg.RankResult(rank, measured or msg.Measured(), failed, [])]))


def rate(sender: int, receiver: int, gbit_s: float) -> msg.Flow:
    return msg.Flow(sender, receiver, gbit_s, 65536)


def sums(*seconds: float, wrong: int = 0) -> list[msg.AllReduces]:
    return [msg.AllReduces(1000, list(seconds), wrong)]


WAYS = ((0, 1, 0), (1, 0, 1))


def test_replies_of_two_ranks_become_one_result() -> None:
    one = msg.Measured([rate(1, 0, 8.0)], sums(1e-6, 3e-6, 2e-6))
    other = msg.Measured([rate(0, 1, 9.0)], sums(2e-6, 1e-6, 2e-6))
    pair = group(4, 7, flows=WAYS)
    result = outcome(pair, {4: told(0, one), 7: told(1, other)})
    assert result.whole
    assert [f.gbit_s for f in result.direction(0)] == [9.0]
    assert [f.gbit_s for f in result.direction(1)] == [8.0]
    (total,) = result.sums
    # Of each repeat the slower rank: 2, 3 and 2 µs.
    assert (total.seconds, total.repeats) == (2e-6, 3)
    assert total.busbw(2) == pytest.approx(0.5)  # 1000 bytes in 2 µs, times 2 (n - 1) / n


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5", "other"),
        ("DistStoreError: wait timeout after 2000ms, keys: /0//cpu//0/1", "other"),
        ("no data received for 15 s", "other"),
        ("DistBackendError: NCCL error in: ..., remote process exited or there was a network error", "other"),
        ("was killed by SIGKILL", "own"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "own"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", "own"),
    ],
)
def test_a_failure_is_the_hosts_own_or_its_partners(text: str, whose: str) -> None:
    result = outcome(
        group(4, 7, flows=WAYS), {4: told(0, failed=text), 7: told(1, failed="Connection reset by peer")}
    )
    assert not result.whole
    assert result.own == ({4: text} if whose == "own" else {})
    assert result.silent == {}


def test_what_was_measured_before_a_failure_counts() -> None:
    part = msg.Measured([rate(0, 1, 9.0)])
    silent: Reply[msg.RanksEnded] = Reply(None, "its agent was killed by SIGKILL", alive=False)
    result = outcome(group(4, 7, flows=WAYS), {4: told(0, part, failed="timeout"), 7: silent})
    assert [f.gbit_s for f in result.direction(0)] == [9.0]
    assert result.direction(1) == []
    assert result.silent == {7: "its agent was killed by SIGKILL"}


def test_a_group_whose_first_rank_fails_is_incomplete() -> None:
    assert not outcome(group(4, 7), {4: told(0, failed="x")}).whole
    assert not outcome(group(4, 7), {4: told(0)}).whole  # the other one was never asked


def test_an_all_reduce_without_all_ranks_is_none() -> None:
    result = outcome(group(4, 7), {4: told(0, msg.Measured([], sums(1.0)))})
    assert result.sums == []


def test_wrong_sums_are_reported_with_all_members() -> None:
    bad = Outcome(group(0, 1), sums=[Sum(4096, 1e-3, 3, 5)])
    (finding,) = live_judge._wrong([bad], ["a", "b"])
    assert (finding.code, finding.verdict, finding.measured) == ("LIV006", "FAIL", 5)
    assert "a, b" in finding.message


# -- ib_write_bw

NO_DEVICE = " Did not detect devices \n If device exists, check if driver is up\n Unable to find the Infiniband/RoCE device\n"
RATE = """\
                    RDMA_Write BW Test
 Device         : mlx5_0
 Number of qps   : 4
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    52345            0.00               391.83             0.005839
---------------------------------------------------------------------------------------
"""


def test_ib_write_bw_without_devices_is_unjudged_with_the_reason() -> None:
    (finding,) = ib_pair.without_devices(msg.ToolResult(1, err=NO_DEVICE), "node1")
    assert (finding.code, finding.verdict, finding.target.node) == ("NET007", "UNJUDGED", "node1")
    assert "Did not detect devices" in finding.message
    (missing,) = ib_pair.without_devices(msg.ToolResult(None), "node1")
    assert missing.verdict == "UNJUDGED"
    assert "not installed" in missing.why_unjudged


def test_ib_write_bw_rate_refusal_and_down_port_differ() -> None:
    assert ib_pair.end_result(msg.ToolResult(0, RATE), "a").gbit_s == pytest.approx(391.83)
    refused = ib_pair.end_result(msg.ToolResult(1, err="Couldn't connect to 10.0.0.2:18515\n"), "a")
    assert (refused.gbit_s, refused.blocked, refused.findings) == (
        None,
        False,
        (),
    )  # which end it was, others tell
    down = ib_pair.end_result(msg.ToolResult(1, err=" Port number 1 state is Down\n"), "a")
    assert down.blocked
    assert [f.code for f in down.findings] == ["NET001"]
    cut = ib_pair.end_result(msg.ToolResult(-9, RATE[: RATE.index("391")]), "a")
    assert cut.gbit_s is None


def test_client_command_differs_only_by_the_server_address() -> None:
    server = ib_pair.command("mlx5_3/1", 20000, None)
    assert server[:5] == ["ib_write_bw", "-d", "mlx5_3", "-i", "1"]
    assert ib_pair.command("mlx5_3/1", 20000, "10.0.0.2") == [*server, "10.0.0.2"]


# -- NCCL's lines


def test_only_topology_lines_of_nccl_s_log_are_kept() -> None:
    text = (
        "node1:11:11 [0] NCCL INFO Bootstrap : Using eth0\n"
        "node1:11:12 [0] NCCL INFO Using network IB\n"
        "node1:11:12 [0] NCCL INFO comm 0x1 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0\n"
        "node1:11:12 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels\n"
        "Using network, says somebody else\n"
    )
    assert [line.split("INFO ")[1][:9] for line in topology_lines(text)] == [
        "Using net",
        "comm 0x1 ",
        "24 coll c",
    ]
    assert topology_lines("\x00\xff\nx\n") == []


# -- localising hosts without GPUs, on one rail


class FewHosts:
    """A bench of hosts with no GPU or one, and one rail: a reading is the product of both ends' shares."""

    def __init__(
        self, shares: list[float], *, slots: int = 0, rate: float = 10.0, dead: frozenset[int] = frozenset()
    ) -> None:
        self.share, self.rate, self.slots, self.dead = np.array(shares), rate, slots, dead
        self.rounds = 0

    def nodes(self, which: Ints) -> NodeStage:
        n, g = len(which), self.slots
        none: dict[str, Floats] = {name: np.full((n, g), np.nan) for name in ("gemm", "hbm", "h2d")}
        return NodeStage(
            names=tuple(f"n{i}" for i in which),
            answered=np.ones(n, dtype=bool),
            slots=tuple(f"0000:{i:02x}:00" for i in range(g)),
            present=np.ones((n, g), dtype=bool),
            rates=none | {"p2p": np.full((n, g, g), np.nan)},
            links_down={},
            links=0,
            uncorrectable={},
            devices=("eth0",),
            port_up=np.ones((n, 1), dtype=bool),
            counters={},
            nvlink={},
            kernel_log={},
        )

    def pairs(self, round_: Round) -> Readings:
        self.rounds += 1
        value = self.share[round_.pairs].min(axis=1) * self.rate
        alive: Bools = np.logical_not(np.isin(round_.pairs, list(self.dead)))
        value = np.where(alive.all(axis=1), value, np.nan)
        return Readings(value[:, None], np.where(round_.collective, value / 8, np.nan), alive)

    def groups(self, round_: GroupRound) -> GroupReadings:
        busbw = [self.share[g].min() * self.rate / 8 for g in round_.groups]
        return GroupReadings(np.array(busbw), np.ones(len(self.share), dtype=bool))

    def answer(self, which: Ints) -> Bools:
        return np.logical_not(np.isin(which, list(self.dead)))


def names(bench: FewHosts) -> list[str]:
    return [f"n{i}" for i in range(len(bench.share))]


SHARED = Thresholds(suspect=0.5, broken=0.4, shared=True)


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize("thresholds", [Thresholds(), SHARED])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 17])
def test_a_slow_host_is_named_whatever_its_place(count: int, thresholds: Thresholds, slots: int) -> None:
    for slow in {0, 1, count // 2, count - 1}:
        bench = FewHosts([0.1 if n == slow else 1.0 for n in range(count)], slots=slots)
        report = localise(bench, names(bench), thresholds=thresholds)
        assert [(b.node, b.kind) for b in report.blames] == [(f"n{slow}", "nic")], (count, slow)
        assert report.unsettled == ()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_hosts_alike_are_not_blamed(count: int) -> None:
    bench = FewHosts([1.0] * count)
    report = localise(bench, names(bench))
    assert report.blames == ()
    assert not [f for f in report.findings if f.verdict in ("FAIL", "WARN")]


def test_a_link_that_carries_nothing_is_named() -> None:
    bench = FewHosts([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    (blame,) = localise(bench, names(bench)).blames
    assert (blame.node, blame.verdict) == ("n2", "FAIL")
    assert "no data gets through" in blame.why[0]


def test_hosts_a_third_apart_on_a_busy_machine_are_not_blamed() -> None:
    bench = FewHosts([1.0, 0.7, 0.65, 0.9, 0.6, 1.0])
    report = localise(bench, names(bench), thresholds=SHARED)
    assert report.blames == ()
    assert report.unsettled == ()


def test_stages_that_were_not_asked_for_are_not_measured() -> None:
    bench = FewHosts([1.0, 0.1, 1.0, 1.0])
    report = localise(bench, names(bench), stages=("node",))
    assert (bench.rounds, report.blames, report.case) == (0, (), None)
    report = localise(bench, names(bench), stages=("pair",))
    assert (report.rounds.group, [b.node for b in report.blames]) == (0, ["n1"])
    assert not [f for f in report.findings if f.code == "MSR008"]


def test_a_host_that_cannot_run_ranks_takes_part_in_nothing() -> None:
    bench = FewHosts([1.0, 1.0, 0.0, 1.0, 1.0])
    stage = bench.nodes(np.arange(5))
    stage.able = np.array([n != 2 for n in range(5)])
    bench.nodes = lambda which: stage  # type: ignore[method-assign]
    report = localise(bench, names(bench))
    assert report.blames == ()
    assert report.unsettled == ()


def test_port_rate_is_the_reference_when_all_hosts_are_slow() -> None:
    bench = FewHosts([0.5] * 6)
    report = localise(bench, names(bench), None, 10.0)
    assert [(b.kind, b.node) for b in report.blames] == [("leaf", None)]


def test_every_node_that_is_cleared_has_a_reading_to_compare() -> None:
    bench = FewHosts([1.0, 1.0, 0.1, 0.98, 1.0, 1.0])
    case = localise(bench, names(bench)).case
    assert case is not None
    found = {f.target.node: f for f in live_judge.pairs(case, [], "gloo")}
    assert sorted(n or "" for n in found) == ["n0", "n1", "n3", "n4", "n5"]
    assert {f.verdict for f in found.values()} == {"PASS"}
    assert found["n3"].deviation == pytest.approx(-0.02, abs=0.005)


def test_two_nodes_have_no_peers() -> None:
    bench = FewHosts([1.0, 1.0])
    case = localise(bench, names(bench)).case
    assert case is not None
    assert {f.verdict for f in live_judge.pairs(case, [], "gloo")} == {"UNJUDGED"}


def test_the_rates_for_the_planner_have_their_meaning() -> None:
    bench = FewHosts([1.0] * 4)
    report = localise(bench, names(bench))
    flows = msg.Measured([rate(1, 0, 8.0), rate(0, 1, 9.0)], sums(2e-6))
    played = outcome(group(0, 1, flows=WAYS), {0: told(0, flows), 1: told(1, msg.Measured([], sums(1e-6)))})
    found = measured(bench.nodes(np.arange(4)), report, [played], "gloo", rdma=False)
    assert found["send_recv"] == {
        "median": 8.0,
        "min": 8.0,
        "n": 2,
        "unit": "Gb/s",
        "direction": "one direction",
        "algorithm": "gloo send and receive",
        "size_bytes": 65536,
    }
    (one,) = found["all_reduce"]
    assert (one["nodes"], one["ranks"], one["size_bytes"], one["median"]) == (2, 2, 1000, 0.5)
    assert "rail" not in found
