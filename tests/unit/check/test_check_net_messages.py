"""perftest, ibstat, mlxlink and the fabric manager: messages and layouts beside those of their own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Verdict, worst
from seatrial.check.outputs import fabric_log, ibstat, mlxlink, perftest
from seatrial.check.outputs.registry import recognise

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
NDR = (FIXTURES / "ib_write_bw_ndr.txt").read_text()
PORTS = (FIXTURES / "ibstat_four_ndr.txt").read_text()
LINK = (FIXTURES / "mlxlink_ndr.txt").read_text()


def verdict(text: str) -> Verdict:
    return judge_pieces(pieces_of(text.encode(), "f.txt", None)).verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unable to create QP.\nFailed to create QP.\n Couldn't create IB resources\n", "FAIL"),
        (" Failed to modify QP 122273 to RTR\n Unable to Connect the HCA's through the link\n", "FAIL"),
        ("Couldn't allocate MR with error=93\nfailed to create mr\n Couldn't create IB resources\n", "FAIL"),
        ("CUDA DMA-BUF cannot be used without CUDA\n Parser function exited with Error\n", "UNJUDGED"),
        (" Connection type mismatch: local=RC, remote=UC\n", "UNJUDGED"),
    ],
)
def test_errors_of_perftest(text: str, expected: str) -> None:
    assert [tool.name for tool in recognise(text)] == ["perftest"]
    assert verdict(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Mar  4 08:15:00 node7 sshd[88]: accept() failed: too many open files\n" * 4,
        "Mar  4 08:15:00 node7 app[88]: Completion with error, retrying; is an invalid option\n" * 4,
        "[   12.000001] foo: API version mismatch\n" * 4,
    ],
)
def test_another_program_s_log_is_not_perftest_s(text: str) -> None:
    assert [tool.name for tool in recognise(text)] == ["kernel log"]


def test_a_test_that_runs_until_it_is_ended_has_no_closing_line() -> None:
    row = next(x for x in NDR.splitlines(keepends=True) if x.strip().startswith("65536"))
    begun = NDR[: NDR.index(row)]
    assert verdict(begun + row * 2) == "UNJUDGED"
    assert verdict(begun + row * 5) == "PASS"
    # 391.61 Gb/s, 0.746937 million messages: one reading of half of it is the one that counts.
    half = row.replace("391.61", "195.80").replace("0.746937", "0.373459")
    assert half != row
    (tool,) = perftest.TOOLS
    (found,) = tool.read(begun + row * 3 + half + row, "f")
    assert found.measured == pytest.approx(195.8)


def test_a_prompt_before_ibstat_is_not_damage_but_a_field_is() -> None:
    assert verdict("[root@node7 ~]# ibstat\n" + PORTS) == "PASS"
    assert verdict("$ ibstat\n\n" + PORTS) == "PASS"
    for begun in ("\t\tLink layer: InfiniBand\n", "A 'mlx5_9'\n", "ate: 400\n"):
        assert worst(ibstat.TOOLS[0].read(begun + PORTS, "i")) == "UNJUDGED", begun


def test_half_the_lanes_may_be_a_split_port_a_quarter_fails() -> None:
    (tool,) = mlxlink.TOOLS
    for width, expected in (("2x", "WARN"), ("1x", "FAIL")):
        found = tool.read(re.sub(r": 4x", f": {width}", LINK.replace("IB-NDR", "IB-HDR")), "m")
        assert [f.verdict for f in found if f.measured == width] == [expected]


def test_mlxlink_that_ends_in_its_own_versions_is_cut_off() -> None:
    whole = LINK.rstrip() + "\n\nTool Information\n----------------\nFirmware Version     : 28.39.1002\n"
    assert verdict(whole) == "UNJUDGED"
    assert verdict(whole + "MFT Version          : mft 4.26.1-3\n") == "PASS"


def test_a_fatal_error_of_nvlink_5_fails() -> None:
    (tool,) = fabric_log.TOOLS
    text = (
        "[Mar 04 2025 08:15:00] [ERROR] [tid 202] Fabric Manager detected GPU NVL {} error on :\n"
        "moduleId : 3\ngpuGuid : 0xED0A8727AFC3C6F9\nportNum : 4\n"
    )
    assert worst(tool.read(text.format("Fatal"), "f")) == "FAIL"
    assert worst(tool.read(text.format("Non-fatal"), "f")) == "WARN"
