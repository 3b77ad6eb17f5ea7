"""The words of a report: which nodes first, numbers and names as ranges, what to do about each finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Finding, Target, codes
from seatrial.check.judging.report import Judged, Report
from seatrial.check.ranges import listed, shortened
from seatrial.check.reports import report_html, report_json, report_nagios
from seatrial.check.reports.adapters import orders, reasons
from seatrial.check.reports.report_table import lead, table, targets

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def of(*findings: Finding) -> Report:
    """Each finding an output of its node."""
    return Report(tuple(Judged(f"{f.target.node}.txt", f.target.node, "t", (f,)) for f in findings))


def down(node: str | None, **where: object) -> Finding:
    return Finding("NET001", "FAIL", Target(node=node, **where), "down")  # type: ignore[arg-type]


def good(node: str) -> Finding:
    return Finding("NET001", "PASS", Target(node=node), "up")


def lines(report: Report) -> list[str]:
    wanted = orders("slurm", reasons(report))
    return [text for text, _ in table(report, wanted, width=100)]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["n3", "n7"], ["n3", "n7"]),
        (["n1", "n2", "n3", "n7"], ["n[1-3]", "n7"]),
        (["n1", "n2"], ["n1", "n2"]),
        ([f"n{i:02d}" for i in (10, 9, 8)], ["n[08-10]"]),
        (["n9", "n10", "n11"], ["n[9-11]"]),
        (["n1", "n01", "n2", "n3"], ["n01", "n[1-3]"]),
        (["mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "mlx5_2/2"], ["mlx5_[0-2]/1", "mlx5_2/2"]),
        (["login", "a-b"], ["a-b", "login"]),
        (["1", "2", "3"], ["1", "2", "3"]),
        (["n1", "n1", "n2"], ["n1", "n2"]),
        ([], []),
    ],
)
def test_names_with_numbers_are_shortened(names: list[str], short: list[str]) -> None:
    assert shortened(names) == short


def test_lists_of_numbers_are_ranges() -> None:
    assert listed(range(8)) == "0-7"
    assert listed([0, 1, 3, 5, 6, 7]) == "0, 1, 3, 5-7"
    assert listed([0, 2, 4, 6, 8], 2) == "0, 2 and 3 more"
    assert listed([0, 1, 2, 3, 8, 10, 12], 2) == "0-3, 8 and 2 more"
    assert listed(["25.781", "26.562"]) == "25.781, 26.562"
    assert listed([]) == ""


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ([Target("n1", gpu=g, pci=f"0000:{g:02x}:00") for g in range(8)], "n1 GPUs 0-7"),
        ([Target("n1", gpu=g) for g in (0, 1, 5)], "n1 GPUs 0-1,5"),
        ([Target("n1", gpu=3, pci="0000:3b:00")], "n1 GPU 3 (0000:3b:00)"),
        ([Target(n, gpu=3) for n in ("n1", "n2", "n3", "n7")], "n[1-3] GPU 3, n7 GPU 3"),
        ([Target(n, gpu=g) for n in ("n1", "n2", "n3") for g in range(4)], "n[1-3] GPUs 0-3"),
        ([Target("n1", gpu=2, link=k) for k in range(6)], "n1 GPU 2 NVLinks 0-5"),
        ([Target("n1", port=f"mlx5_{k}/1") for k in range(4)], "n1 mlx5_[0-3]/1"),
        ([Target("n1", port=f"mlx5_{k}/1") for k in (0, 2)], "n1 mlx5_0/1, n1 mlx5_2/1"),
        ([Target(f"n{i}") for i in range(1, 252)], "n[1-251]"),
        ([Target()], ""),
        ([Target(gpu=g) for g in range(8)], "GPUs 0-7"),
        ([Target(f"n{i}x{i}", gpu=0) for i in range(0, 40, 4)], "n0x0 GPU 0, n4x4 GPU 0, n8x8 GPU 0, n12x12 GPU 0, n16x16 GPU 0, n20x20 GPU 0, n24x24 GPU 0, n28x28 GPU 0 and 2 more"),
    ],
)  # fmt: skip
def test_what_a_group_is_about(about: list[Target], text: str) -> None:
    assert targets([Finding("NET001", "FAIL", t, "down") for t in about]) == text


def test_a_report_leads_with_the_nodes_that_failed() -> None:
    report = of(down("n3"), good("n1"), down("n7"), good("n2"))
    assert lead(report) == "2 of 4 nodes failed: n3, n7"
    assert lines(report)[0] == "2 of 4 nodes failed: n3, n7"
    page = report_html.page(report)
    assert page.index("2 of 4 nodes failed: n3, n7") < page.index("Findings")
    assert (
        page.index(">n3</span>")
        < page.index(">n7</span>")
        < page.index(">n1</span>")
        < page.index("Findings")
    )
    assert "2 of 4 nodes failed: n3, n7" in report_nagios.line(report, strict=False)[0]


def test_lead_line_when_nothing_failed_or_no_node_is_named() -> None:
    assert lead(of(good("n1"), good("n2"))) == ""
    suspect = Finding("NET005", "WARN", Target("n2"), "slow")
    assert lead(of(good("n1"), suspect)) == "1 of 2 nodes suspect: n2"
    unread = Finding("FILE001", "UNJUDGED", Target("n1"), "x", why_unjudged="x")
    assert lead(of(unread, good("n2"), good("n3"))) == "1 of 3 nodes not judged: n1"
    found = down(None)
    nameless = Report((Judged("a/ibstat.txt", None, "t", (found,)), Judged("b", None, "t", (good("x"),))))
    assert lead(nameless) == "1 of 2 outputs failed: a/ibstat.txt"
    assert lead(Report((), (found,))) == ""


def test_equal_passes_are_one_line() -> None:
    one = [Finding("GPU011", "PASS", Target("n1", gpu=g), "nothing wrong in 9 sections") for g in range(8)]
    assert (
        lines(Report((Judged("f", "n1", "t", tuple(one)),)))[0]
        == "PASS      GPU011  n1 GPUs 0-7: nothing wrong in 9 sections"
    )
    assert report_html.page(of(*one)).count("nothing wrong in 9 sections") == 1


def test_orders_that_would_be_refused_show_the_reason() -> None:
    many = of(*(down(f"n{i}") for i in range(251)), *(good(f"m{i}") for i in range(100)))
    said = " ".join(" ".join(lines(many)).split())
    why = "--apply would refuse: 251 of 351 nodes would be removed, more than half: first check for a common cause; use --force to proceed"
    assert why in said
    wanted = orders("slurm", reasons(many))
    assert "--apply would refuse: 251 of 351 nodes" in report_html.page(many, wanted)
    assert '"apply_refused": "251 of 351 nodes would be removed' in report_json.text(many, wanted)
    few = of(down("n1"), *(good(f"m{i}") for i in range(3)))
    assert "would refuse" not in " ".join(lines(few))
    assert '"apply_refused": null' in report_json.text(few, orders("slurm", reasons(few)))


def test_the_same_thing_to_do_is_pointed_to_and_not_left_out() -> None:
    a, b = down("n1"), Finding("NET001", "FAIL", Target("n2"), "polling")
    text = lines(of(a, b, good("n3"), good("n4")))
    assert sum("action    " in line for line in text) == 2
    assert sum("action    as above" in line for line in text) == 1


def test_every_code_has_an_action_for_unjudged() -> None:
    for code in codes().values():
        said = Finding(code.code, "UNJUDGED", Target(), "x", why_unjudged="x").action
        assert not re.match(r"nothing\b", said), code.code


@pytest.mark.parametrize("path", sorted(p for p in FIXTURES.iterdir() if p.is_file()), ids=lambda p: p.name)
def test_every_finding_of_a_fixture_has_what_to_do(path: Path) -> None:
    report = judge_pieces(pieces_of(path.read_bytes(), path.name, "n1"))
    for finding in report.findings:
        assert finding.verdict == "PASS" or not re.match(r"(nothing\b|$)", finding.action), finding
