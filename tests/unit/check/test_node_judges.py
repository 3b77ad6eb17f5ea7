"""What is made of a node's facts: nothing wrong passes, and each thing that is wrong is told, with its code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from node_facts import GIB, PCIS, cpu_node, gpu_node, load

from seatrial.check.judging.compare import Plan
from seatrial.check.judging.findings import Finding
from seatrial.check.node.columns import columns
from seatrial.check.node.judge_load import Peers
from seatrial.check.node.judge_node import inventory_of, judge_node, judge_stage
from seatrial.check.node.node_clock import Offset, judge_offsets, offset_of

Facts = dict[str, Any]
RATE_CODES = {"NOD013", "NOD015", "NOD016", "NOD017", "NOD021", "NOD023", "NOD024"}


def told(found: list[Finding]) -> set[tuple[str, str]]:
    return {(f.code, f.verdict) for f in found if f.verdict != "PASS"}


def alone(facts: Facts) -> set[tuple[str, str]]:
    """What is told of one node but that its rates have no peers."""
    return {t for t in told(judge_node(facts, "n")) if t[0] not in RATE_CODES}


@pytest.mark.parametrize("make", [cpu_node, gpu_node])
def test_a_healthy_node_passes_but_rates_without_peers_do_not(make: Callable[[], Facts]) -> None:
    found = judge_node(make(), "n")
    assert alone(make()) == set()
    rates = [f for f in found if f.code in RATE_CODES]
    assert rates
    assert {f.verdict for f in rates} == {"UNJUDGED"}
    assert all("no floor is known" in f.why_unjudged for f in rates)


@pytest.mark.parametrize("make", [cpu_node, gpu_node])
def test_nodes_that_are_alike_pass(make: Callable[[], Facts]) -> None:
    report = judge_stage({name: make() for name in ("a", "b", "c", "d")})
    assert told(list(report.findings)) == set()
    assert report.verdict == "PASS"
    assert set(report.nodes) == {"a", "b", "c", "d"}


def test_facts_are_json() -> None:
    """An agent sends them as such."""
    facts = gpu_node()
    back = json.loads(json.dumps(facts))
    assert told(judge_node(back, "n")) == told(judge_node(facts, "n"))


def put(path: str, value: Any) -> Callable[[Facts], None]:
    """Sets what lies at "a.b.c"."""

    def change(facts: Facts) -> None:
        *way, last = path.split("/")
        at: Any = facts
        for key in way:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = value

    return change


LIMIT = "limits/limits"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put(f"{LIMIT}/memlock", [64 * 1024, 64 * 1024]), ("NOD003", "FAIL")),
        (put(f"{LIMIT}/memlock", [64 * GIB, 64 * GIB]), ("NOD003", "WARN")),
        (put(f"{LIMIT}/nofile", [256, 4096]), ("NOD004", "WARN")),
        (put("limits/shm", None), ("NOD005", "FAIL")),
        (put("limits/shm", {"size": 64 << 20, "free": 64 << 20}), ("NOD005", "FAIL")),
        (put("limits/shm", {"size": 32 * GIB, "free": 1 << 20}), ("NOD005", "FAIL")),
        (put("limits/shm", {"size": 512 << 20, "free": 512 << 20}), ("NOD005", "WARN")),
        (put("limits/cpu_quota", 4.0), ("NOD006", "WARN")),
        (put("limits/memory_available_bytes", 2 * GIB), ("NOD007", "WARN")),
        (put("limits/memory_available_bytes", None), ("NOD007", "UNJUDGED")),
        (put("limits/overcommit", 2), ("NOD007", "WARN")),
        (put("limits/pids_limit", 500), ("NOD008", "WARN")),
        (put("interface/state", "down"), ("NOD020", "WARN")),
        (put("interface", {"name": "ib9", "problem": "no network device ib9"}), ("NOD020", "FAIL")),
        (put("interface", {"name": None, "problem": "no default route"}), ("NOD020", "UNJUDGED")),
        (put("storage/read_only", True), ("NOD012", "FAIL")),
        (put("storage/writable", False), ("NOD012", "FAIL")),
        (put("storage/errno", "EACCES"), ("NOD012", "FAIL")),
        (put("storage/errno", "ENOSPC"), ("NOD012", "FAIL")),
        (put("storage/free_bytes", GIB), ("NOD012", "WARN")),
        (put("storage/free_inodes", 0), ("NOD012", "FAIL")),
        (put("storage/type", "tmpfs"), ("NOD012", "WARN")),
        (put("storage/wrong_blocks", 1), ("NOD012", "FAIL")),
        (put("storage", {"folder": "/x", "ended": "stuck", "problem": "no end"}), ("NOD002", "FAIL")),
        (put("storage", {"folder": "/x", "ended": "failed", "problem": "killed"}), ("NOD001", "UNJUDGED")),
        (put("gpus/files/nvidia8", "EIO"), ("NOD018", "FAIL")),
        (put("gpus/files/nvidia8", "EPERM"), None),
        (put("gpus/gpus/3/processes", 2), ("NOD019", "WARN")),
        (put("gpus_after/gpus/3/pci", None), ("GPU002", "FAIL")),
        (put("gpus_after", {"problem": "NVML: no end", "ended": "hung"}), ("NOD002", "FAIL")),
        (put("gpus_after", {"problem": "NVML: Unknown Error", "ended": "ok"}), ("NOD001", "UNJUDGED")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(reasons=0x40, sm_mhz=1900)), ("GPU007", "WARN")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(reasons=0x8, sm_mhz=400)), ("GPU007", "FAIL")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(reasons=None)), ("GPU007", "UNJUDGED")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(samples=0)), ("GPU007", "UNJUDGED")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(pcie_width=8)), ("GPU008", "FAIL")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(pcie_gen=1)), ("GPU008", "WARN")),
        (put(f"rates/gpus/{PCIS[2]}/load", load(pcie_gen=None)), ("GPU008", "UNJUDGED")),
        (put(f"rates/gpus/{PCIS[2]}", {"problem": "12 MiB free", "broken": False}), ("NOD019", "UNJUDGED")),
        (put(f"rates/gpus/{PCIS[2]}", {"problem": "CUDA error", "broken": True}), ("NOD022", "FAIL")),
        (put("rates/failed", [{"part": "x", "problem": "CUDA error", "hardware": True}]), ("NOD022", "FAIL")),
        (put("rates/failed", [{"part": "x", "problem": "OOM", "hardware": False}]), ("NOD001", "UNJUDGED")),
        (put("rates/skipped", ["copies between GPUs"]), ("NOD001", "UNJUDGED")),
        (put("rates/ended", "hung"), ("NOD002", "FAIL")),
        (put("rates/ended", "failed"), ("NOD001", "UNJUDGED")),
        (put("gpus/problem", "NVML: Driver/library version mismatch"), ("NOD001", "UNJUDGED")),
        (put("clock/kernel", {"synchronised": False, "offset_s": 0.0, "max_error_s": 16.0}), None),
        (put("kernel/lost", True), ("NOD014", "UNJUDGED")),
        (
            put(
                "calls", [{"name": "nvidia-smi topo -m", "ended": "stuck", "why": "no end", "seconds": 25.0}]
            ),
            ("NOD002", "FAIL"),
        ),
        (
            put("calls", [{"name": "nvidia-smi topo -m", "ended": "absent", "why": "no", "seconds": 0.0}]),
            ("NOD001", "UNJUDGED"),
        ),
        (put("calls", [{"name": "mlxlink mlx5_0", "ended": "absent", "why": "no", "seconds": 0.0}]), None),
    ],
)
def test_each_fault_is_reported(change: Callable[[Facts], None], expected: tuple[str, str] | None) -> None:
    facts = gpu_node()
    change(facts)
    assert alone(facts) == (set() if expected is None else {expected})


def test_what_a_node_without_gpus_need_not_have() -> None:
    facts = cpu_node()
    facts["limits"]["limits"]["memlock"] = [65536, 65536]  # without RDMA
    facts["kernel"]["lost"] = True
    assert alone(facts) == set()
    facts["limits"]["shm"] = None
    assert alone(facts) == {("NOD005", "WARN")}
    facts["limits"]["shm"] = {"size": GIB, "free": GIB}
    facts["interface"]["state"] = "down"
    assert alone(facts) == {("NOD020", "FAIL")}


def test_with_cap_ipc_lock_no_memlock_limit_is_needed() -> None:
    facts = gpu_node()
    facts["limits"]["limits"]["memlock"] = [65536, 65536]
    facts["limits"]["may_lock_all"] = True
    assert alone(facts) == set()


def test_unsynchronised_and_unknown_clock_are_distinguished() -> None:
    facts = cpu_node()
    facts["clock"] |= {"kernel": None, "timedatectl": False}
    assert alone(facts) == {("NOD010", "WARN")}
    facts["clock"]["timedatectl"] = None
    assert alone(facts) == {("NOD010", "UNJUDGED")}
    facts["clock"]["chrony"] = {"source": "pool", "stratum": 3, "offset_s": 0.01, "leap": "Normal"}
    assert alone(facts) == set()


def test_gpus_without_a_driver() -> None:
    facts = cpu_node()
    facts["inventory"]["pci_gpus"] = gpu_node()["inventory"]["pci_gpus"]
    assert alone(facts) == {("NOD018", "WARN")}
    facts["options"]["device"] = "cuda"
    assert alone(facts) == {("NOD018", "FAIL")}
    facts["inventory"]["pci_gpus"] = []
    assert alone(facts) == {("GPU001", "FAIL")}
    facts["options"] |= {"device": "auto", "gpus": 8}
    assert alone(facts) == {("GPU001", "WARN")}
    facts["options"]["gpus"] = None
    facts["inventory"]["pci_gpus"] = [{"pci": "0000:c1:00", "ids": "1002:74a1", "vendor": "AMD"}]
    assert alone(facts) == {("NOD018", "UNJUDGED")}


def test_cuda_that_shows_fewer_gpus_than_the_driver() -> None:
    facts = gpu_node()
    del facts["rates"]["gpus"][PCIS[7]]
    assert alone(facts) == {("NOD022", "UNJUDGED")}
    facts["rates"] |= {"device": "cpu", "gpus": {}}
    assert alone(facts) == {("NOD022", "UNJUDGED")}


def test_slow_node_fails_against_peers_and_busy_node_is_unjudged() -> None:
    nodes = {name: cpu_node() for name in ("a", "b", "c", "slow", "busy")}
    nodes["slow"]["rates"]["cpu"]["gemm_gflop_s"] = 450.0
    nodes["busy"]["rates"]["cpu"] |= {"memory_gb_s": 10.0, "memory_share": 0.3}
    report = judge_stage(nodes)
    bad = {(f.code, f.verdict, f.target.node) for f in report.findings if f.verdict != "PASS"}
    assert bad == {("NOD015", "FAIL", "slow"), ("NOD016", "UNJUDGED", "busy")}
    (slow,) = (f for f in report.findings if f.verdict == "FAIL")
    assert slow.peers_median == 1000.0
    assert slow.deviation == pytest.approx(-0.55)


@pytest.mark.parametrize(("rate", "verdict"), [(0.49, "WARN"), (0.51, "PASS")])
def test_storage_is_uneven_by_nature(rate: float, verdict: str) -> None:
    nodes = {name: cpu_node() for name in "abcd"}
    nodes["a"]["storage"]["write_gb_s"] = 2.0 * rate
    report = judge_stage(nodes)
    (found,) = (f for f in report.findings if f.target.node == "a" and "writing" in f.message)
    assert found.verdict == verdict


def both(facts: Facts, rate: float, *, name: str = "NVIDIA H200") -> Finding:
    """The finding about the slowest pair, which reads `rate`."""
    facts["rates"]["pairs"][9]["both_gb_s"] = rate
    for gpu in (*facts["gpus"]["gpus"], *facts["rates"]["gpus"].values()):
        gpu["name"] = name
    (found,) = (f for f in judge_node(facts, "n", peers=Peers.of([facts])) if f.code == "NOD023")
    return found


@pytest.mark.parametrize(("rate", "verdict"), [(740.0, "PASS"), (670.0, "WARN"), (590.0, "FAIL")])
def test_a_slow_pair_is_found_by_the_other_pairs(rate: float, verdict: str) -> None:
    found = both(gpu_node(), rate)
    assert found.verdict == verdict
    assert found.expected is not None
    assert found.expected.direction == "both directions"
    if verdict != "PASS":
        assert (found.target.gpu, found.target.peer) == (1, "GPU 4")
    assert "reference target of 800 GB/s (no floor) is reached by 0" in found.message


def test_uniformly_slow_gpu_pairs_fail_only_with_a_known_floor() -> None:
    facts = gpu_node()
    for pair in facts["rates"]["pairs"]:
        pair["both_gb_s"] = 400.0
    assert both(facts, 400.0).verdict == "PASS"
    assert both(facts, 400.0, name="NVIDIA H100 80GB HBM3").verdict == "FAIL"
    two = gpu_node(2)
    two["rates"]["pairs"] *= 10
    assert both(two, 740.0, name="A card that nobody knows").message.endswith("the slowest of 10 pairs")


def test_gpus_of_a_switch_that_cannot_reach_each_other() -> None:
    facts = gpu_node()
    facts["rates"]["pairs"][3]["peer_access"] = False
    bad = [f for f in judge_node(facts, "n", peers=Peers.of([facts])) if f.verdict == "FAIL"]
    assert [(f.code, f.target.gpu, f.target.peer) for f in bad] == [("NOD023", 0, "GPU 4")]


def test_a_gpu_that_is_slow_only_under_the_load_of_all() -> None:
    facts = gpu_node()
    facts["rates"]["gpus"][PCIS[1]]["sustained_tflop_s"] = 500.0
    bad = [f for f in judge_node(facts, "n", peers=Peers.of([facts])) if f.verdict == "FAIL"]
    assert [(f.code, f.target.gpu) for f in bad] == [("NOD024", 1)]


def test_a_gpu_that_is_slow_to_the_host_is_named() -> None:
    facts = gpu_node()
    facts["rates"]["gpus"][PCIS[5]]["d2h_gb_s"] = 25.0
    found = judge_node(facts, "n", peers=Peers.of([facts]))
    (bad,) = (f for f in found if f.code == "NOD021" and f.verdict != "PASS")
    assert (bad.verdict, bad.target.gpu, bad.target.pci) == ("FAIL", 5, PCIS[5])


def test_a_node_unlike_its_siblings_and_one_without_gpus() -> None:
    nodes: dict[str, Facts | None] = {name: gpu_node() for name in "abcd"}
    assert nodes["b"] is not None
    nodes["b"]["inventory"]["kernel"] = "6.8.0"
    nodes["e"] = cpu_node()
    nodes["f"] = None
    report = judge_stage(nodes)
    bad = {(f.code, f.verdict, f.target.node) for f in report.findings}
    assert ("CMP001", "WARN", "b") in bad
    assert ("GPU001", "FAIL", "e") in bad
    assert "f" not in report.nodes  # told by who asked it: MSR011


def test_outputs_of_tools_go_to_their_own_readers() -> None:
    facts = gpu_node()
    facts["kernel"]["text"] += (
        f"3,9,100,-;NVRM: Xid (PCI:{PCIS[4]}): 79, pid=1, GPU has fallen off the bus.\n"
    )
    facts["outputs"] = [
        {"tool": "nvidia-smi nvlink -s", "text": "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: <inactive>\n"}
    ]
    report = judge_stage({"n": facts}, plan=Plan(1, 8, "job.toml"))
    bad = {(f.code, f.verdict) for f in report.findings if f.verdict == "FAIL"}
    assert ("XID001", "FAIL") in bad
    assert {j.tool for j in report.judged} == {"node", "kernel log", "nvidia-smi nvlink -s"}
    assert {j.node for j in report.judged} == {"n"}


def test_a_single_clock_is_compared_with_the_conductor_s() -> None:
    (found,) = judge_offsets({"a": Offset(-4.0, 0.001)})
    assert found.verdict == "WARN"
    assert found.message.startswith("clock 4.0 s behind the conductor")


def test_facts_of_another_version_are_not_read() -> None:
    nodes: dict[str, Facts | None] = {"a": cpu_node(), "b": {"version": 99, "something": "else"}}
    report = judge_stage(nodes)
    (found,) = (f for f in report.findings if f.target.node == "b")
    assert (found.code, found.verdict) == ("NOD001", "UNJUDGED")
    assert columns(nodes).answered.tolist() == [True, False]


def test_what_is_not_known_is_not_compared() -> None:
    facts = cpu_node()
    facts["inventory"] |= {"cpu": None, "memory_bytes": None, "system": None}
    facts["inventory"]["packages"] = {}
    assert set(inventory_of(facts)) == {"kernel", "architecture", "CPUs", "NICs"}
    assert inventory_of(None) == {}


def test_the_shortest_round_trip_gives_the_clock_offset() -> None:
    trips = [(100.0, 103.0, 102.0), (200.0, 202.51, 200.02), (300.0, 302.9, 300.5)]
    offset = offset_of(trips)
    assert offset is not None
    assert offset.offset_s == pytest.approx(2.5)
    assert offset.error_s == pytest.approx(0.01)
    assert offset_of([]) is None
    assert offset_of([(5.0, 5.0, 4.0)]) is None  # our own clock was set meanwhile


def test_clock_offsets_are_judged_from_median_within_uncertainty() -> None:
    near = Offset(0.0, 0.001)
    found = judge_offsets(
        {
            "a": near,
            "b": near,
            "c": Offset(0.4, 0.001),
            "slow": Offset(-30.0, 0.01),
            "far": Offset(900.0, 0.01),
            "wide": Offset(3.0, 5.0),
            "gone": None,
        }
    )
    assert {f.target.node: f.verdict for f in found} == {
        "a": "PASS",
        "b": "PASS",
        "c": "PASS",
        "slow": "WARN",
        "far": "FAIL",
        "wide": "PASS",
        "gone": "UNJUDGED",
    }
