"""Which node an output is of: its folder, else the names before its lines, else the host that a log names."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_paths, judge_pieces
from seatrial.check.judging.report import Report

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
IBSTAT = (FIXTURES / "ibstat_four_ndr.txt").read_text()
DOWN = (FIXTURES / "ibstat_one_down.txt").read_text()
TABLE = (FIXTURES / "smi_table_four.txt").read_text()
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus."


def report(text: str, node: str | None = None) -> Report:
    return judge_pieces(pieces_of(text.encode(), "f.txt", node))


def failed(found: Report) -> set[str | None]:
    return {f.target.node for f in found.findings if f.verdict == "FAIL"}


def labelled(label: str, text: str) -> str:
    return "".join(f"{label}{line}".rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "form",
    [
        "2024-11-15T12:{i:02}:00.000001+00:00 gpu07 kernel: {x}",
        "2024-11-15T12:{i:02}:00+0000 gpu07 kernel: {x}",
        "Nov 15 12:{i:02}:00 gpu07 kernel: {x}",
        "<4>Nov 15 12:{i:02}:00 gpu07 kernel: {x}",
        "Fri 2024-11-15 12:{i:02}:00 UTC gpu07 kernel: {x}",
        "17316720{i:02}.000001 gpu07 kernel: {x}",
        "2024-11-15 12:{i:02}:00 gpu07 kernel: {x}",
        "Mär 15 12:{i:02}:00 gpu07 kernel: {x}",
        "11月 15 12:{i:02}:00 gpu07 kernel: {x}",
        "<4>1 2024-11-15T12:{i:02}:00.000001Z gpu07 kernel - - - {x}",
        '<4>1 2024-11-15T12:{i:02}:00.000001Z gpu07 kernel 17 ID4 [meta sequenceId="2"][x@1 a="b"] {x}',
    ],
)
def test_the_host_that_a_log_names_is_the_node(form: str) -> None:
    lines = [form.format(i=i, x="IPv6: eth0: link becomes ready") for i in range(59)]
    found = report("\n".join([*lines, form.format(i=59, x=XID)]) + "\n")
    assert failed(found) == {"gpu07"}
    assert found.nodes == {"gpu07": "FAIL"}


@pytest.mark.parametrize(
    "form",
    [
        "2024-11-15T12:00:{i:02},000001+00:00 {x}",  # dmesg --time-format=iso
        "[{i:5}.000001] {x}",
        "kernel: {x}",
        "kern  :warn  : [{i:5}.000001] {x}",
        "4,{i},{i}000001,-;{x}",
        "2024-11-15T12:00:{i:02}+0000 localhost kernel: {x}",
        "{x}",
    ],
)
def test_dates_facilities_and_drivers_are_not_hosts(form: str) -> None:
    lines = [form.format(i=i, x="NVRM: loading NVIDIA UNIX x86_64 Kernel Module") for i in range(50)]
    found = report("\n".join([*lines, form.format(i=50, x=XID)]) + "\n")
    assert failed(found) == {None}
    assert found.nodes == {}


@pytest.mark.parametrize("label", ["kern.warn: ", "local0.notice: ", "localhost.localdomain: "])
def test_a_facility_with_its_level_is_not_a_host(label: str) -> None:
    assert report(labelled(label, f"[   10.000001] {XID}")).nodes == {}


def test_folders_not_named_after_a_host_are_not_nodes(tmp_path: Path) -> None:
    for place in (
        "2024-11-15/smi",
        "0/smi",
        "logs/n1/down",
        "run/2024-11-16/n2/smi",
        "n3/logs/down",
        "n3/net/x",
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DOWN if path.name == "down" else TABLE)
    found = judge_paths([str(tmp_path)])
    assert failed(found) == {"n1", "n3"}
    assert found.nodes.keys() == {"n1", "run", "n3"}
    several = judge_paths([str(tmp_path / "2024-11-15"), str(tmp_path / "0"), str(tmp_path / "logs" / "n1")])
    assert several.nodes.keys() == {"n1"}


@pytest.mark.parametrize("form", ["[五 11月 15 12:{i:02}:00 2024] {x}", "[Sa Mär 15 12:{i:02}:00 2024] {x}"])
def test_dmesg_of_another_language_is_read_whole(form: str) -> None:
    assert report("".join(form.format(i=i, x="IPv6: eth0: ready\n") for i in range(9))).verdict == "PASS"


def test_a_log_of_many_hosts_names_each() -> None:
    lines = [
        f"Nov 15 12:00:{i:02} gpu{i % 4:02} kernel: {XID if i in (5, 14) else 'usb 1-1: new device'}"
        for i in range(40)
    ]
    found = report("\n".join(lines) + "\n")
    assert failed(found) == {"gpu01", "gpu02"}
    flaps = "".join(
        f"Mar  4 08:1{i}:11 gpu0{n} systemd-networkd[811]: ib4: {what} carrier\n"
        for i in range(5)
        for n in (1, 2)
        for what in (("Lost", "Gained") if n == 1 else ("Gained", "Gained"))
    )
    assert failed(report(flaps)) == {"gpu01"}


def test_the_folder_overrides_the_host_of_a_log(tmp_path: Path) -> None:
    for node, host in (("n1", "ip-10-0-0-1"), ("n2", "n2.cluster.local")):
        (tmp_path / node).mkdir()
        lines = [f"Nov 15 12:00:{i:02} {host} kernel: usb 1-1: new device" for i in range(9)]
        (tmp_path / node / "messages").write_text(
            "\n".join([*lines, f"{lines[0].partition('usb')[0]}{XID}\n"])
        )
    found = judge_paths([str(tmp_path)])
    assert failed(found) == {"n1", "n2"}
    assert found.nodes == {"n1": "FAIL", "n2": "FAIL"}


def test_a_quiet_log_of_another_host_names_that_host() -> None:
    text = "".join(f"Nov 15 12:00:{i:02} gpu08 kernel: usb 1-1: new device\n" for i in range(9))
    (said,) = report(text, "gpu07").findings
    assert (said.verdict, said.target.node) == ("PASS", "gpu07")
    assert "gpu08" in said.message
    (same,) = report(text, "gpu08.cluster.local").findings
    assert "host" not in same.message


def test_a_log_of_several_hosts_is_not_one_nodes() -> None:
    lines = [f"Nov 15 12:00:{i:02} gpu{i % 2:02} kernel: usb 1-1: new device\n" for i in range(20)]
    text = "".join([*lines, f"Nov 15 12:01:00 gpu01 kernel: {XID}\n"])
    central = report(text, "gpu00")  # the log itself tells them apart
    assert failed(central) == {"gpu01"}
    found = report(text, "login")
    assert failed(found) == {"login"}, "the folder wins"
    assert {f.code for f in found.findings if f.verdict == "UNJUDGED"} == {"FILE008"}


def test_names_before_the_lines(tmp_path: Path) -> None:
    both = labelled("n1: ", IBSTAT) + labelled("n2: ", DOWN)
    assert report(both).nodes == {"n1": "PASS", "n2": "FAIL"}
    short = labelled("n1: ", "GPU 0: NVIDIA H200 (UUID: GPU-1)\n") + labelled(
        "n2: ", "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.\n"
    )
    assert failed(report(short)) == {"n2"}, "two lines are enough"
    assert report(labelled("10.0.0.7: ", DOWN)).nodes == {"10.0.0.7": "FAIL"}
    evidence = next(f.evidence for f in report(both).findings if f.verdict == "FAIL")
    assert "Port 1:" in both.splitlines()[int(evidence[0].partition(":")[2]) - 1], "lines keep their numbers"
    (tmp_path / "n7").mkdir()
    (tmp_path / "n7" / "a").write_text(labelled("n7: ", DOWN))
    assert judge_paths([str(tmp_path)]).nodes == {"n7": "FAIL"}


def test_other_host_names_in_a_node_s_folder_are_reported() -> None:
    found = report(labelled("n1: ", IBSTAT) + labelled("n2: ", DOWN), "rack4")
    assert found.nodes == {"rack4": "FAIL"}
    assert "FILE008" in {f.code for f in found.findings}


def test_numbers_of_srun_are_ranks_and_no_hosts() -> None:
    both = labelled("0: ", IBSTAT) + labelled("1: ", DOWN)
    found = report(both)
    assert found.nodes == {}
    assert found.verdict == "FAIL"
    assert [(j.tool, j.verdict) for j in found.judged] == [("ibstat", "PASS"), ("ibstat", "FAIL")]
    assert report(labelled("0: ", IBSTAT) + labelled("1: ", IBSTAT)).verdict == "PASS"
    assert report(labelled(" 9: ", IBSTAT) + labelled("10: ", IBSTAT)).verdict == "UNJUDGED", (
        "0 to 8 are missing"
    )
    by_turns = "".join(f"{n}: {x}\n" for x in IBSTAT.splitlines() for n in (0, 1))
    assert report(by_turns).verdict == "PASS"
    logs = "".join(
        f"{n}: [  1{i}.000001] {XID if (i, n) == (7, 1) else 'quiet'}\n" for i in range(9) for n in (0, 1)
    )
    assert failed(report(logs)) == {None}


def test_labels_of_mpirun_are_ranks() -> None:
    both = labelled("[1,0]<stdout>: ", IBSTAT) + labelled("[1,1]<stdout>:", DOWN)
    assert [j.verdict for j in report(both).judged] == ["PASS", "FAIL"]


def test_a_missing_rank_prevents_a_pass() -> None:
    text = (FIXTURES / "nccl_h100_node.log").read_text()
    assert report(text).verdict == "PASS"
    for old, new in (("Rank  3 ", "Rank  9 "), ("Rank  3 ", "Rank  2 ")):
        assert report(text.replace(old, new)).verdict == "UNJUDGED"


def test_a_line_without_a_name_prevents_a_pass() -> None:
    both = labelled("n1: ", IBSTAT) + labelled("n2: ", IBSTAT)
    found = report(both + "pdsh@login: n3: ssh exited with exit code 255\n")
    assert found.nodes == {"n1": "PASS", "n2": "PASS"}
    assert found.verdict == "UNJUDGED"


@pytest.mark.parametrize(
    "rule", ["----------------\n{}\n----------------\n", "---------------\n{}\n---------------\n"]
)
def test_titles_of_dshbak_and_clush_name_one_node_or_several(rule: str) -> None:
    text = rule.format("n[1-3,7]") + IBSTAT + rule.format("n4") + DOWN
    found = report(text)
    assert found.nodes == {"n1": "PASS", "n2": "PASS", "n3": "PASS", "n4": "FAIL", "n7": "PASS"}
    counted = "---------------\nn[1-2] (2)\n---------------\n" + IBSTAT
    assert report(counted).nodes == {"n1": "PASS", "n2": "PASS"}


def test_words_of_an_output_are_not_hosts() -> None:
    assert report(TABLE).nodes == {}
    for text in (
        "bash: ibstat: command not found\n" * 3,
        "timeout: failed to run command 'ibstat': No such file\n" * 2,
    ):
        found = report(text)
        assert found.nodes == {}
        assert {f.code for f in found.findings} == {"FILE007"}
