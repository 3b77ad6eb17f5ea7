"""perftest: every format of its output, what it means, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import perftest
from seatrial.check.outputs.network import NetworkContext
from seatrial.check.outputs.tool import Lines, ParseError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def text_of(name: str) -> str:
    return (FIXTURES / name).read_text()


def judged(text: str, **known: object) -> list[Finding]:
    assert perftest.matches(text)
    return perftest.judge(perftest.parse(Lines.of(text), "f.txt"), NetworkContext(**known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gbit_s", "rate"),
    [
        ("ib_write_bw_ndr.txt", 391.61, 400),
        ("ib_write_bw_cpu_util.txt", 394.02, 400),
        (
            "ib_write_bw_all_sizes.txt",
            195.54,
            200,
        ),  # "MB/sec" are MiB/s; the largest size counts, not the mean
        ("ib_write_bw_both_directions.txt", 98.2, 100),  # printed: 196.4, the sum of both
        ("ib_read_bw_one_queue.txt", 330.95, 400),
        ("ib_write_bw_new.json", 392.87, 400),
        ("ib_write_bw_old.json", 194.7, 200),  # without quotation marks and unit
    ],
)
def test_healthy_bandwidths_and_what_they_mean(name: str, gbit_s: float, rate: float) -> None:
    (found,) = judged(text_of(name))
    assert (found.code, found.verdict, found.unit) == ("NET004", "PASS", "Gb/s")
    assert found.measured == pytest.approx(gbit_s, abs=0.01)
    assert found.expected is not None
    assert found.expected.value == rate
    assert found.expected.direction == "one direction"
    assert found.expected.size_bytes in (65536, 8388608)
    # Nobody has said what rate the port has, and the finding says so.
    assert "the port's own rate is not in this output" in found.message


@pytest.mark.parametrize(
    ("gbit_s", "rate", "verdict"),
    [
        (391.61, 400.0, "PASS"),
        (391.61, 800.0, "FAIL"),  # a port that is twice as fast
        (391.61, 200.0, "UNJUDGED"),  # more than it can carry: another port's output
        (391.61, 420.0, "PASS"),
        (391.61, 430.0, "WARN"),
        (391.61, 490.0, "FAIL"),
    ],
)
def test_the_rate_of_the_port_decides_where_it_is_known(gbit_s: float, rate: float, verdict: str) -> None:
    (found,) = judged(text_of("ib_write_bw_ndr.txt"), rates_gbit_s={"mlx5_3": rate})
    assert (found.verdict, found.measured) == (verdict, gbit_s)
    (same,) = judged(text_of("ib_write_bw_ndr.txt"), rates_gbit_s={"mlx5_3": 400.0}, port_gbit_s=rate)
    assert same.verdict == verdict


def test_too_slow_for_any_rate_that_carries_it() -> None:
    (found,) = judged(text_of("ib_write_bw_slow.txt"))
    assert (found.verdict, found.measured) == ("FAIL", 251.37)
    assert "63% of 400" in found.message


def test_the_sum_of_both_directions_is_not_a_port_s_rate() -> None:
    # Half of what a 100 Gb/s port carries, as it looks with -b: the printed 98.20 reads like a healthy port.
    text = (
        text_of("ib_write_bw_both_directions.txt").replace("196.40", "98.20").replace("0.374603", "0.187302")
    )
    (found,) = judged(text)
    assert (found.verdict, found.measured) == ("WARN", 49.1)  # 49 of 50 is possible too
    assert judged(text, rates_gbit_s={"mlx5_3": 100.0})[0].verdict == "FAIL"
    assert judged(text, rates_gbit_s={"mlx5_3": 50.0})[0].verdict == "PASS"


def test_small_messages_do_not_fill_a_link() -> None:
    text = text_of("ib_write_bw_ndr.txt").replace(" 65536  ", " 4096   ").replace("0.746937", "11.950989")
    (found,) = judged(text)
    assert found.verdict == "UNJUDGED"
    assert "do not fill a link" in found.why_unjudged


def test_latency() -> None:
    assert [(f.code, f.verdict, f.measured) for f in judged(text_of("ib_send_lat_ib.txt"))] == [
        ("NET005", "PASS", 1.36)
    ]
    assert [f.verdict for f in judged(text_of("ib_send_lat_high.txt"))] == ["WARN"]
    over_ethernet = text_of("ib_send_lat_ib.txt").replace(": IB\n Max", ": Ethernet\n Max")
    (found,) = judged(over_ethernet)
    assert (found.verdict, found.measured) == ("UNJUDGED", 1.36)


@pytest.mark.parametrize(
    ("name", "code", "verdict", "peer"),
    [
        ("ib_write_bw_no_server.txt", "NET006", "FAIL", "node-b"),
        ("ib_write_bw_no_device.txt", "NET007", "UNJUDGED", None),  # Debian's perftest on a host without RDMA
        ("ib_write_bw_port_down.txt", "NET001", "FAIL", None),
    ],
)
def test_one_finding_for_the_cause_of_an_error(name: str, code: str, verdict: str, peer: str | None) -> None:
    (found,) = judged(text_of(name))
    assert (found.code, found.verdict, found.target.peer) == (code, verdict, peer)
    assert len(found.evidence) > 1  # the lines that follow from it


@pytest.mark.parametrize(
    ("line", "code", "verdict"),
    [
        ("IB device mlx5_9 not found", "NET007", "FAIL"),
        ("Couldn't allocate MR", "NET006", "FAIL"),
        (" Failed to modify QP 312 to RTR", "NET006", "FAIL"),
        (" Parser function exited with Error", "NET006", "UNJUDGED"),
        (" Failed status 12: wr_id 0 syndrom 0x81", "NET012", "FAIL"),
    ],
)
def test_error_texts(line: str, code: str, verdict: str) -> None:
    (found,) = judged(line + "\n")
    assert (found.code, found.verdict) == (code, verdict)


def test_a_transfer_that_fails_leaves_no_result() -> None:
    found = judged(text_of("ib_write_bw_retry.txt"))
    assert [(f.code, f.verdict) for f in found] == [("FILE003", "UNJUDGED"), ("NET012", "FAIL")]


def test_runs_that_follow_each_other_are_judged_each() -> None:
    text = text_of("ib_write_bw_ndr.txt") + text_of("ib_write_bw_slow.txt") + text_of("ib_send_lat_ib.txt")
    assert [(f.code, f.verdict) for f in judged(text)] == [
        ("NET004", "PASS"),
        ("NET004", "FAIL"),
        ("NET005", "PASS"),
    ]


def test_interleaved_output_of_server_and_client() -> None:
    lines = text_of("ib_write_bw_all_sizes.txt").splitlines()
    both = [line for line in lines for _ in range(2) if not line.lstrip()[:1].isdigit()]
    rows = [line for line in lines if line.lstrip()[:1].isdigit()]
    text = "\n".join([*both[:-2], *rows, lines[-1], rows[-1], lines[-1], ""])
    (found,) = judged(text)
    assert (found.verdict, found.target.port) == ("PASS", "ib2")
    assert "both ends are the same adapter" in found.message


def test_a_waiting_server_is_not_a_result() -> None:
    found = judged(text_of("ib_write_bw_no_row.txt"))
    assert worst(found) == "UNJUDGED"
    assert "the test did not finish" in found[0].message


def test_no_test_at_all_is_an_error() -> None:
    with pytest.raises(ParseError, match="no perftest test"):
        perftest.parse(Lines.of("hello\n"), "f.txt")
