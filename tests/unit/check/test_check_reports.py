"""A report as table, JSON, HTML, one line, and list of nodes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from seatrial.base.errors import InputError, printable
from seatrial.check.intake.collect import Piece
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.check_run import Blamed, CheckRun
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.report import Judged, Report
from seatrial.check.outputs.tool import Lines
from seatrial.check.reports import report_exclude, report_html, report_json, report_nagios
from seatrial.check.reports.adapters import Order, orders, reasons
from seatrial.check.reports.report_table import conclusion, table

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def report(**names: str) -> Report:
    return judge_pieces(
        [Piece(f"{n}/{f}", n, Lines.of((FIXTURES / f).read_text())) for n, f in names.items()]
    )


def failed(*nodes: str) -> Report:
    found = tuple(Finding("NET001", "FAIL", Target(node=n), "down") for n in nodes)
    return Report((Judged("f", None, "t", found),))


def lines(of: Report, width: int = 100) -> list[str]:
    return [text for text, _ in table(of, width=width)]


def test_report_table_lists_worst_first_and_ends_with_verdict() -> None:
    text = lines(report(n1="ibstat_four_ndr.txt", n2="ibstat_one_down.txt", n3="ib_send_lat_high.txt"))
    words = [line.split()[0] for line in text if line[:1].isalpha()]
    assert text[:2] == ["1 of 3 nodes failed: n2", ""]
    assert words == ["FAIL", "WARN", "UNJUDGED", "PASS", "FAIL:"]
    assert text[2].startswith("FAIL      NET001  n2 mlx5_2/1: Down, physical state Polling")
    assert text[-1].startswith("FAIL: 1 failed, 1 suspect")


def test_similar_findings_are_grouped_and_share_one_action() -> None:
    text = lines(report(n1="ibstat_bridges_only_active.txt", n2="ibstat_bridges_only_active.txt"))
    assert sum(line.startswith("FAIL      NET001") for line in text) == 1
    assert "n1 mlx5_[0-3]/1, n2 mlx5_[0-3]/1: Down" in text[2]
    assert sum("action" in line for line in text) == 1


@pytest.mark.cluster  # slow
def test_table_of_many_passes_is_short_and_fits_the_width() -> None:
    many = report(**{f"n{i}": "ibstat_four_ndr.txt" for i in range(200)})
    text = lines(many, width=80)
    assert len(text) < 10
    assert max(map(len, lines(report(n1="ibstat_one_down.txt"), width=80))) <= 80


def test_the_conclusion_of_unjudged_findings_is_not_a_pass() -> None:
    assert "this is not a pass" in conclusion(report(n1="ib_write_bw_no_device.txt"))
    assert conclusion(report(n1="ibstat_four_ndr.txt")) == "PASS: 1 passed in 1 output of 1 node"


def test_json_holds_everything() -> None:
    text = report_json.text(report(n1="ibstat_one_down.txt", n2="ib_write_bw_ndr.txt"))
    document = json.loads(text)
    assert document["schema_version"] == 1
    assert document["verdict"] == "FAIL"
    assert document["counts"] == {"FAIL": 1, "WARN": 0, "UNJUDGED": 0, "PASS": 1}
    assert document["nodes"] == {"n1": "FAIL", "n2": "PASS"}
    first, second = document["findings"]
    assert first["target"] == {
        "node": "n1",
        "gpu": None,
        "pci": None,
        "link": None,
        "port": "mlx5_2/1",
        "peer": None,
    }
    assert second["expected"]["direction"] == "one direction"
    assert [o["tool"] for o in document["outputs"]] == ["ibstat", "perftest"]


def test_json_has_no_infinity() -> None:
    found = Finding("NET004", "WARN", Target(), "x", measured=float("inf"))
    text = report_json.text(Report((Judged("f", None, "t", (found,)),)))
    assert json.loads(text)["findings"][0]["measured"] is None


def test_html_needs_nothing_else_and_is_well_formed() -> None:
    page = report_html.page(report(n1="ibstat_one_down.txt", n2="ib_write_bw_ndr.txt"))
    assert not re.search(r"https?://|<script|src=|@import|url\(", page)
    body = page[page.index("<body>") : page.index("</html>")]
    ElementTree.fromstring(body)  # every element closed
    assert "n1 mlx5_2/1" in page
    assert "98% of 400" in page


def test_html_escapes_what_came_out_of_a_file() -> None:
    evil = '<img src=x onerror="alert(1)">'
    found = Finding(
        "NET004", "FAIL", Target(node=evil, port=evil), evil, measured=evil, evidence=(evil,), action=evil
    )
    page = report_html.page(Report((Judged(evil, evil, evil, (found,)),)), title=evil)
    assert "<img" not in page


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        "' onload=\"x\" '",
        "a\0b\x1b[31m\u202ec",
        "not UTF-8: \udcff",
        "{{ 7 * 7 }}{% x %}",
    ],
)
def test_html_shows_any_text_of_a_file_as_that_text(evil: str) -> None:
    target = Target(node=evil, port=evil)
    found = (
        Finding("NET004", "FAIL", target, evil, measured=evil, evidence=(evil,), action=evil),
        Finding("NET004", "PASS", target, evil),
        Finding("NET004", "UNJUDGED", target, "x", why_unjudged=evil, unit=evil, peers_median=1.0),
    )
    blamed = Blamed("BLM003", evil, evil, "FAIL", Target(), None, (evil,), (evil,))
    order = Order("slurm", evil, "NET004", ("scontrol", evil), ())
    whole = Report((Judged(evil, evil, evil, found),), (), CheckRun((evil,), blames=(blamed,)))
    page = report_html.page(whole, [order], title=evil)
    assert page.encode()
    root = ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])
    assert "".join(root.itertext()).count(printable(evil)) >= 20
    assert not any(e.tag == "script" for e in root.iter())
    assert {name for e in root.iter() for name in e.attrib} == {"class", "title", "open"}


@pytest.mark.parametrize(
    ("name", "strict", "state", "code"),
    [
        ("ibstat_four_ndr.txt", False, "OK", 0),
        ("ib_send_lat_high.txt", False, "WARNING", 1),
        ("ibstat_one_down.txt", False, "CRITICAL", 2),
        ("ib_write_bw_no_device.txt", False, "UNKNOWN", 3),
        ("ibstat_four_ndr.txt", True, "OK", 0),
        ("ib_send_lat_high.txt", True, "CRITICAL", 2),
        ("ib_write_bw_no_device.txt", True, "CRITICAL", 2),
    ],
)
def test_one_line_for_monitoring(name: str, strict: bool, state: str, code: int) -> None:
    line, exit_code = report_nagios.line(report(n1=name), strict=strict)
    assert line.startswith(f"SEATRIAL {state} - ")
    assert exit_code == code
    assert line.count("|") == 1
    assert "\n" not in line


def test_the_line_is_valid_whatever_a_file_contains() -> None:
    found = Finding("NET004", "FAIL", Target(), "a | b\nc" + "x" * 5000)
    line, _ = report_nagios.line(Report((Judged("f", None, "t", (found,)),)), strict=False)
    assert line.count("|") == 1
    assert len(line) < 1100
    assert "\n" not in line


def test_lists_of_nodes() -> None:
    bad = report_exclude.failed_nodes(failed("n10", "n2", "n1", "login"))
    assert bad == ["login", "n1", "n2", "n10"]
    assert report_exclude.hostfile(bad) == "login\nn1\nn2\nn10\n"
    assert report_exclude.slurm(bad) == "login,n[1-2,10]\n"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        (["a7"], "a7"),
        (["a9", "a10", "a11"], "a[9-11]"),
        (["a09", "a10", "a11"], "a[09-11]"),
        (["a08", "a09"], "a[08-09]"),
        (["a7", "a07"], "a07,a7"),
        (["rack1-n3", "rack1-n4", "rack2-n3"], "rack1-n[3-4],rack2-n3"),
        (["n1", "n1"], "n1"),
    ],
)
def test_slurm_node_lists(nodes: list[str], text: str) -> None:
    written = report_exclude.slurm(nodes).strip()
    assert written == text
    assert sorted(expand(written)) == sorted(set(nodes))


def expand(written: str) -> list[str]:
    """As `scontrol show hostnames` does."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", written):
        prefix, _, ranges = part.rstrip("]").partition("[")
        if not ranges:
            found.append(prefix)
        for each in filter(None, ranges.split(",")):
            first, _, last = each.partition("-")
            found += [f"{prefix}{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return found


def test_a_name_that_no_host_has_is_refused() -> None:
    with pytest.raises(InputError, match="my folder"):
        report_exclude.failed_nodes(failed("my folder"))


# -- a check that measured


BLAMED = Blamed(
    "BLM003",
    "nic",
    "n2 mlx5_3/1",
    "FAIL",
    Target(node="n2", port="mlx5_3/1"),
    3,
    ("60% of its rate at best, slow 3 times", "<b>its</b> counters rise"),
    ("leaf switch a",),
)


def measured(*, blamed: bool = True, simulated: str = "") -> Report:
    found = [Finding("MSR011", "PASS", Target(), "all 3 nodes respond")]
    if blamed:
        text = f"{BLAMED.what}: {'; '.join(BLAMED.why)}"
        found.append(Finding("BLM003", "FAIL", BLAMED.target, text, evidence=BLAMED.why))
        found.insert(0, Finding("MSR010", "FAIL", Target(node="n2"), "counters rise"))
    check_run = CheckRun(
        ("n1", "n2", "n3"),
        {"node": 1, "pair": 3, "group": 0},
        {"node": 2.04, "pair": 5.0, "total": 7.5},
        (BLAMED,) if blamed else (),
        () if blamed else ("n1 mlx5_0/1",),
        {"rates": [{"what": "all_reduce", "median": float("nan"), "unit": "GB/s"}]},
        simulated,
    )
    return Report((), tuple(found), check_run)


def test_the_blamed_part_comes_first_and_its_evidence_once() -> None:
    text = lines(measured())
    assert (
        text[2]
        == "FAIL      BLM003  n2 mlx5_3/1: 60% of its rate at best, slow 3 times; <b>its</b> counters rise"
    )
    assert not any(line.lstrip().startswith("evidence") for line in text)
    assert "stages    node 2.0 s, 1 round; pair 5.0 s, 3 rounds" in text
    assert text[-1] == "FAIL: 2 failed, 1 passed on 3 nodes in 7.5 s"


def test_measured_nodes_get_a_verdict_and_others_never_pass() -> None:
    assert measured().nodes == {"n1": "PASS", "n2": "FAIL", "n3": "PASS"}
    assert Report((), (), CheckRun(("n1",))).nodes == {"n1": "UNJUDGED"}
    odd = Finding("MSR001", "UNJUDGED", Target(), "no peers", why_unjudged="two nodes")
    assert Report((), (odd,), CheckRun(("n1",))).nodes == {"n1": "UNJUDGED"}
    leaf = Finding("BLM005", "FAIL", Target(peer="leaf-a"), "leaf switch leaf-a: slow")
    fine = Finding("MSR011", "PASS", Target(), "all 2 nodes respond")
    assert Report((), (leaf, fine), CheckRun(("n1", "n2"))).nodes == {"n1": "PASS", "n2": "PASS"}


def test_json_report_of_a_measured_check_has_no_nan() -> None:
    document = json.loads(report_json.text(measured()))
    assert document["blames"][0]["instead"] == ["leaf switch a"]
    assert document["measured"]["rates"][0]["median"] is None
    assert (document["rounds"]["pair"], document["seconds"]["total"]) == (3, 7.5)
    assert "blames" not in json.loads(report_json.text(report(n1="ibstat_four_ndr.txt")))


def test_html_report_escapes_blame_evidence_and_commands() -> None:
    found = measured()
    page = report_html.page(found, orders("slurm", reasons(found)))
    assert "<b>its</b>" not in page
    assert "&lt;b&gt;its&lt;/b&gt; counters rise</li>" in page
    assert "Equally likely: leaf switch a." in page
    assert "<dt>pair</dt><dd>5.0 s, 3 rounds</dd>" in page
    assert "scontrol update nodename=n2 state=drain reason=&#34;seatrial BLM003 mlx5_3/1:" in page
    assert page.count("BLM003</span>") == 1  # not once more among what was found
    ElementTree.fromstring(
        page.removeprefix("<!doctype html>")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width,initial-scale=1">', "")
    )
    unsettled = report_html.page(measured(blamed=False))
    assert "undecided: n1 mlx5_0/1" in unsettled


def test_many_failed_nodes_and_orders_do_not_fill_the_screen() -> None:
    found = failed(*(f"n{i}" for i in range(500)))
    text = [line for line, _ in table(found, orders("kubernetes", reasons(found)), width=110)]
    assert len(text) < 30
    assert "          and 496 more, listed by --json" in text
    assert text[0] == "500 of 500 nodes failed: n[0-499]"
    apart = failed(*(f"n{i}" for i in range(0, 1000, 2)))
    assert any(line.endswith("and 476 more") for line in lines(apart)[:3])


def test_a_simulated_cluster_is_never_taken_for_a_real_one() -> None:
    assert conclusion(measured(simulated="c.toml")).endswith("on 3 simulated nodes")
    assert report_nagios.line(measured(blamed=False), strict=False)[0].startswith(
        "SEATRIAL OK - 1 findings on 3 nodes in 7.5 s"
    )
