"""nccl-tests: several runs in a file, tests other than all_reduce, old layouts, runs that never came to their table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import nccl_judge

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
TWO = (FIXTURES / "nccl_two_runs.log").read_text()
ONE, OTHER = TWO.split("# Collective test starting: alltoall_perf")
TESTS, DEBUG = nccl_judge.TOOLS


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.verdict) for f in found if f.verdict != "PASS"]


def test_each_run_of_a_file_is_judged_by_itself() -> None:
    found = TESTS.read(TWO, "n")
    assert worst(found) == "PASS"
    assert [f.measured for f in found if f.code == "NCC002"] == [481.25, 347.83]
    slow = TWO.replace("275.00  481.25", "110.00  192.50")
    assert bad(TESTS.read(slow, "n")) == [("NCC003", "WARN"), ("NCC002", "FAIL")]
    assert bad(TESTS.read(ONE + "# Collective test starting: alltoall_perf" + OTHER[:1400], "n")) != []


def test_a_run_ends_where_memory_ends() -> None:
    assert worst(TESTS.read(ONE, "n")) == "PASS"
    # 17179869184 is the last size of a step of 2 up to 26843545600, and not the last up to 34359738368.
    longer = ONE.replace("# Reducing maxBytes to 26843545600 due to memory limitation\n", "")
    assert bad(TESTS.read(longer, "n")) == [("NCC001", "UNJUDGED")]
    last = next(x for x in ONE.splitlines(keepends=True) if x.strip().startswith("17179869184"))
    assert ("NCC001", "UNJUDGED") in bad(TESTS.read(ONE.replace(last, ""), "n"))
    # Sizes that are rounded down to the number of ranks do not reach the last one, and are all there.
    rounded = ONE.replace("26843545600", "17179869190")
    assert worst(TESTS.read(rounded, "n")) == "PASS"


def renamed(test: str, algbw: str, busbw: str, operation: str, named: bool = True) -> str:
    """The first run as another test's, with these bandwidths at its largest message."""
    text = ONE.replace("all_reduce_perf", test).replace(" sum ", f" {operation:>4}"[:5])
    text = text.replace("275.00  481.25", f"{algbw}  {busbw}").replace("267.00  467.25", f"{algbw}  {busbw}")
    return text if named else "".join(x for x in text.splitlines(keepends=True) if test not in x)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("test", "algbw", "busbw", "operation", "verdict"),
    [
        ("all_gather_perf", "413.13", "361.49", "none", "PASS"),
        ("reduce_scatter_perf", "415.29", "363.38", "sum", "PASS"),
        ("broadcast_perf", "360.20", "360.20", "none", "PASS"),
        ("reduce_perf", "361.10", "361.10", "sum", "PASS"),
        ("sendrecv_perf", "367.20", "367.20", "none", "PASS"),
        ("sendrecv_perf", "290.00", "290.00", "none", "UNJUDGED"),  # nobody knows
        ("alltoall_perf", "290.00", "253.75", "none", "UNJUDGED"),
        ("reduce_scatter_perf", "240.00", "210.00", "sum", "FAIL"),
        ("reduce_perf", "310.00", "310.00", "sum", "WARN"),
    ],
)
def test_other_tests_are_judged_by_what_a_ring_reads(
    test: str, algbw: str, busbw: str, operation: str, verdict: str, named: bool
) -> None:
    found = TESTS.read(renamed(test, algbw, busbw, operation, named), "n")
    # Without their names the others are all one, and what is slow for one may be good for another.
    wanted = verdict if named or verdict == "PASS" else "UNJUDGED"
    assert {f.verdict for f in found if f.code == "NCC002"} == {wanted}


def test_a_slow_all_gather_fails_where_it_is_named() -> None:
    low = renamed("all_gather_perf", "240.00", "210.00", "none")
    assert ("NCC002", "FAIL") in bad(TESTS.read(low, "n"))
    # Without its name it could be an alltoall, of which no floor is known.
    unnamed = renamed("all_gather_perf", "240.00", "210.00", "none", named=False)
    assert ("NCC002", "UNJUDGED") in bad(TESTS.read(unnamed, "n"))


def test_an_empty_column_of_older_versions() -> None:
    older = renamed("alltoall_perf", "397.52", "347.83", "sum", named=False).replace("root", "    ")
    older = re.sub(r"sum +-1", "      ", older)
    assert worst(TESTS.read(older.replace("#wrong", " error"), "n")) == "PASS"
    torn = ONE.replace("481.25       0\n", "481.25\n")  # the last column is lost
    assert ("OUT002", "UNJUDGED") in bad(TESTS.read(torn, "n"))


def test_the_time_of_the_processor_is_a_time() -> None:
    assert worst(TESTS.read(ONE.replace("    time ", " cputime "), "n")) == "PASS"


@pytest.mark.parametrize(
    "end",
    [
        "node9: Test NCCL failure common.cu:1119 'unhandled system error (run with NCCL_DEBUG=INFO for details) / '\n",
        "#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res\n"
        "NCCL failure all_reduce.cu:95 'unhandled cuda error'\n",
    ],
)
def test_a_run_that_failed_before_its_table(end: str) -> None:
    start = ONE[: ONE.index("# Reducing")]
    assert TESTS.matches(start + end)
    assert ("NCC001", "FAIL") in bad(TESTS.read(start + end, "n"))
    assert worst(TESTS.read(start, "n")) == "UNJUDGED"  # it hung, or was ended


def test_hardware_without_nvls_lacks_nothing() -> None:
    said = "".join(
        f"node9:4100{d}:4200{d} [{d}] NCCL INFO NVLS multicast support is not available on dev {d}\n"
        for d in range(3)
    )
    channels = "".join(
        f"node9:4100{d}:4200{d} [{d}] NCCL INFO 4 coll channels, 0 collnet channels, 0 nvls channels, 4 p2p channels\n"
        for d in range(4)
    )
    # The line of the fourth GPU is lost between those of other ranks.
    assert worst(DEBUG.read(said + channels, "n")) == "PASS"
    other = "node9:41003:42003 [3] NCCL INFO NVLS multicast support is available on dev 3\n"
    assert worst(DEBUG.read(said + other + channels, "n")) == "FAIL"


def without(text: str, *starts: str) -> str:
    return "".join(x for x in text.splitlines(keepends=True) if not x.startswith(starts))


NODE = (FIXTURES / "nccl_h100_node.log").read_text()
RATES = re.compile(r"(\d+\.\d\d) +(\d+\.\d\d)(?= +0)")  # algbw and busbw
SLOW = RATES.sub(lambda m: f"{float(m[1]) / 20:.2f} {float(m[2]) / 20:.2f}", NODE)


@pytest.mark.parametrize("kept", [(), (7,), (6, 7), (0,), (0, 7)])
def test_truncated_run_header_is_unjudged_not_a_smaller_run(kept: tuple[int, ...]) -> None:
    """At a twentieth of the bandwidth: one rank that is left over was read as a run of one rank, which has none."""
    gone = [f"#  Rank  {n} " for n in range(8) if n not in kept]
    for text in (without(SLOW, *gone), without(SLOW, "# nThread", *gone)):
        found = TESTS.read(text, "n")
        assert worst(found) == "UNJUDGED"
        assert ("NCC002", "UNJUDGED") in bad(found)
    assert worst(TESTS.read(without(NODE, *gone), "n")) == "UNJUDGED"


def test_ranks_that_threads_and_gpus_do_not_make() -> None:
    gathered = renamed("sendrecv_perf", "367.20", "367.20", "none")
    assert worst(TESTS.read(gathered, "n")) == "PASS"
    text = without(gathered, *(f"#  Rank  {n} " for n in range(5, 8)))
    assert worst(TESTS.read(text.replace("nThread 1 nGpus 1", "nThread 1 nGpus 8"), "n")) == "UNJUDGED"


def test_no_bandwidth_at_all_between_several_ranks_is_a_fault() -> None:
    dead = RATES.sub("0.00 0.00", ONE)
    assert ("NCC002", "FAIL") in bad(
        TESTS.read(dead.replace("NVIDIA H100 80GB HBM3", "NVIDIA Some Other"), "n")
    )
    assert ("NCC002", "FAIL") in bad(TESTS.read(dead, "n"))


def test_lines_of_only_some_ranks_do_not_pass() -> None:
    line = "node9:410:420 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 16 nNodes 1 localRanks 16 localRank 0 MNNVL 0\n"
    channels = (
        "node9:410:420 [0] NCCL INFO 4 coll channels, 0 collnet channels, 0 nvls channels, 4 p2p channels\n"
    )
    assert bad(DEBUG.read(line + channels, "n")) == [("NCC004", "UNJUDGED")]
    assert worst(DEBUG.read(line.replace("16", "1") + channels, "n")) == "PASS"
