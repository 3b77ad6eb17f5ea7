"""What a file is, folders of nodes, siblings, plan and baseline."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seatrial.check
from seatrial.base.errors import InputError
from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_paths, judge_pieces
from seatrial.check.judging.baseline import compare_baseline, save_baseline
from seatrial.check.judging.compare import Plan, median_of_others
from seatrial.check.judging.report import Report
from seatrial.check.outputs.registry import MODULES, recognise, tools
from seatrial.check.ranges import natural

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def text_of(name: str) -> str:
    return (FIXTURES / name).read_text()


def judged(data: bytes) -> Report:
    return judge_pieces(pieces_of(data, "f.txt", None))


def nodes(folder: Path, *outputs: dict[str, str]) -> str:
    for i, files in enumerate(outputs, 1):
        (folder / f"node{i}").mkdir()
        for name, text in files.items():
            (folder / f"node{i}" / name).write_text(text)
    return str(folder)


def test_every_module_that_reads_a_tool_is_asked() -> None:
    having = {
        name
        for _, name, _ in pkgutil.walk_packages(seatrial.check.__path__, "seatrial.check.")
        if hasattr(importlib.import_module(name), "TOOLS")
    }
    assert having == set(MODULES)
    assert len({tool.name for tool in tools()}) == len(tools())


@pytest.mark.parametrize(
    "path",
    [
        p
        for kind in ("ib_*", "ibstat*", "mlxlink*", "ncclscout*", "sysfs*")
        for p in sorted(FIXTURES.glob(kind))
    ],
    ids=lambda p: p.name,
)
def test_a_text_is_of_one_tool(path: Path) -> None:
    assert len(recognise(path.read_text())) == 1


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "FILE002"),
        (b" \n\t\n", "FILE002"),
        (b"\0" * 100, "FILE002"),
        (b"# Notes\n\nsome words about a cluster\n", "FILE001"),
        (b"Der Befehl wurde nicht gefunden, bitte installieren Sie das Paket.\n", "FILE001"),
        ("端口状态：活动\n速率：400\n".encode(), "FILE001"),
        (bytes(range(256)) * 8, "FILE004"),
        (b"\x7fELF\x02\x01\x01" + b"\0\1\2\3" * 200, "FILE004"),
        (b"\x1f\x8b\x08\x00rest", "FILE004"),
        (b"bash: line 1: ibstat: command not found\n", "FILE007"),
        (b"-bash: ibstat: Kommando nicht gefunden.\n", "FILE007"),
        (b"timeout: failed to run command 'ibstat': No such file or directory\n", "FILE007"),
        (b"ibpanic: [4711] main: stat of IB device 'mlx5_0' failed: No such file or directory\n", "FILE007"),
    ],
)
def test_what_is_not_an_output_is_unjudged_with_a_reason(data: bytes, code: str) -> None:
    report = judged(data)
    (found,) = report.findings
    assert (found.code, found.verdict) == (code, "UNJUDGED")
    assert found.why_unjudged
    assert found.action


def test_the_name_of_a_file_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "ibstat__healthy.txt").write_text("all is well\n")
    (tmp_path / "dmesg.log").write_text(text_of("ibstat_one_down.txt"))
    report = judge_paths([str(tmp_path)])
    assert {j.file.rpartition("/")[2]: (j.tool, j.verdict) for j in report.judged} == {
        "ibstat__healthy.txt": ("", "UNJUDGED"),
        "dmesg.log": ("ibstat", "FAIL"),
    }


def test_encodings_and_colours_of_terminals_do_not_matter() -> None:
    text = text_of("ibstat_four_ndr.txt")
    for data in (
        text.replace("\n", "\r\n").encode(),
        text.encode("utf-16"),
        text.encode("utf-8-sig"),
        text.replace("Active", "\x1b[32mActive\x1b[0m").encode(),
    ):
        assert judged(data).verdict == "PASS"


def test_non_text_bytes_are_damage_but_faults_are_still_found() -> None:
    healthy, ill = (text_of(n).encode() for n in ("ibstat_four_ndr.txt", "ibstat_one_down.txt"))
    report = judged(healthy + b"\xff\xfe\n")
    assert report.verdict == "UNJUDGED"
    assert judged(ill + b"\xff\xfe\n").verdict == "FAIL"


def test_outputs_of_two_tools_in_one_file_are_judged_each() -> None:
    mixed = text_of("ibstat_four_ndr.txt") + text_of("ib_write_bw_ndr.txt")
    report = judged(mixed.encode())
    assert [(j.tool, j.verdict) for j in report.judged] == [("ibstat", "PASS"), ("perftest", "PASS")]
    ill = text_of("ib_write_bw_ndr.txt") + text_of("ibstat_one_down.txt")
    report = judged(ill.encode())
    assert [(j.tool, j.verdict) for j in report.judged] == [("perftest", "PASS"), ("ibstat", "FAIL")]
    (fault,) = (f for f in report.findings if f.verdict == "FAIL")
    (place,) = fault.evidence
    assert ill.splitlines()[int(place.partition(":")[2]) - 1].strip() == "Port 1:"


def test_a_run_that_was_killed_does_not_pass() -> None:
    assert judged((text_of("ib_write_bw_ndr.txt") + "Killed\n").encode()).verdict == "UNJUDGED"


def test_pdsh_and_dshbak_name_the_nodes() -> None:
    healthy, ill = text_of("ibstat_four_ndr.txt"), text_of("ibstat_one_down.txt")
    pdsh = "".join(f"{h}: {line}\n" for h, t in (("n1", healthy), ("n2", ill)) for line in t.splitlines())
    dshbak = "".join(
        f"----------------\n{h}\n----------------\n{t}" for h, t in (("n1", healthy), ("n2", ill))
    )
    for text in (pdsh, dshbak):
        assert judged(text.encode()).nodes == {"n1": "PASS", "n2": "FAIL"}
    assert judged(healthy.encode()).nodes == {}


def test_folders_are_nodes(tmp_path: Path) -> None:
    ok, ill = text_of("ibstat_four_ndr.txt"), text_of("ibstat_one_down.txt")
    report = judge_paths([nodes(tmp_path, {"a.txt": ok}, {"a.txt": ill}, {"deep.txt": ok})])
    assert report.nodes == {"node1": "PASS", "node2": "FAIL", "node3": "PASS"}
    each = judge_paths([str(tmp_path / n) for n in ("node1", "node2")])
    assert each.nodes == {"node1": "PASS", "node2": "FAIL"}
    twice = judge_paths([str(tmp_path / "node1" / "a.txt")] * 2)
    assert len(twice.judged) == 1


def test_a_tree_of_sysfs_in_a_nodes_folder(tmp_path: Path) -> None:
    for line in text_of("sysfs_grep_clean.txt").splitlines():
        path, _, value = line.partition(":")
        file = tmp_path / "node1" / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)
    (only,) = judge_paths([str(tmp_path)]).judged
    assert (only.tool, only.node, only.verdict) == ("sysfs", "node1", "PASS")


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / ".hidden").write_text("x")
    report = judge_paths([str(tmp_path)])
    assert {f.code for f in report.findings} == {"FILE004"}
    assert len(report.judged) == 2


def test_all_missing_paths_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        judge_paths([str(tmp_path / "a"), str(tmp_path / "b")])
    assert len(caught.value.diagnostics) == 2
    with pytest.raises(InputError, match="no outputs in"):
        judge_paths([str(tmp_path)])


def test_the_ports_rate_comes_from_the_same_node(tmp_path: Path) -> None:
    half = text_of("ib_write_bw_ndr.txt").replace("391.61", "195.80").replace("0.746937", "0.373459")
    alone = judged(half.encode())
    assert alone.verdict == "PASS"  # it may be a port of 200 Gb/s
    folder = nodes(tmp_path, {"bw.txt": half, "ibstat.txt": text_of("ibstat_four_ndr.txt")}, {"bw.txt": half})
    assert judge_paths([folder]).nodes["node1"] == "FAIL"


def test_siblings_show_what_is_missing_on_one(tmp_path: Path) -> None:
    four = text_of("ibstat_four_ndr.txt")
    three = four[: four.index("CA 'mlx5_3'")] + four[four.index("CA 'mlx5_8'") :]
    older = four.replace("28.39.3560", "28.36.1010")
    report = judge_paths(
        [nodes(tmp_path, {"a": four}, {"a": four}, {"a": three}, {"a": four}, {"a": older}, {"b": four[:0]})]
    )
    found = {(f.target.node, f.code, f.verdict) for f in report.findings if f.verdict != "PASS"}
    assert found == {
        ("node3", "NET003", "FAIL"),
        ("node3", "CMP001", "FAIL"),
        ("node5", "CMP001", "WARN"),
        ("node6", "FILE002", "UNJUDGED"),
        ("node6", "CMP001", "UNJUDGED"),
    }


def test_of_two_nodes_that_differ_neither_is_blamed(tmp_path: Path) -> None:
    four = text_of("ibstat_four_ndr.txt")
    report = judge_paths([nodes(tmp_path, {"a": four}, {"a": four.replace("28.39.3560", "28.36.1010")})])
    (found,) = (f for f in report.findings if f.verdict != "PASS")
    assert (found.code, found.verdict, found.target.node) == ("CMP001", "WARN", None)


def test_a_measurement_below_its_siblings(tmp_path: Path) -> None:
    text = text_of("ib_write_bw_ndr.txt")
    slow = text.replace("391.61", "369.20").replace("0.746937", "0.704193")  # 92.3 % of 400, by itself a pass
    fast = text_of("ib_send_lat_ib.txt")
    late = fast.replace("1.36 ", "1.98 ").replace("1.37 ", "1.99 ").replace("1.52 ", "2.12 ")
    report = judge_paths([nodes(tmp_path, *[{"a": text, "l": fast}] * 3, {"a": slow, "l": late})])
    found = [f for f in report.findings if f.verdict != "PASS"]
    assert {(f.target.node, f.code, f.verdict) for f in found} == {("node4", "CMP002", "FAIL")}
    assert report.nodes["node1"] == "PASS"
    healthy = next(f for f in report.findings if f.target.node == "node1" and f.code == "NET004")
    assert healthy.peers_median == 391.61
    assert healthy.deviation == 0


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12), st.data())
def test_the_median_without_oneself(values: list[float], data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(values))
    others = list(values)
    others.remove(value)
    assert median_of_others(sorted(values), value) == pytest.approx(median(others))


def test_fewer_nodes_than_the_plan_needs(tmp_path: Path) -> None:
    folder = nodes(tmp_path, {"a": text_of("ibstat_four_ndr.txt")}, {"a": text_of("ibstat_four_ndr.txt")})
    assert judge_paths([folder], plan=Plan(2, 8, "job.toml")).verdict == "PASS"
    report = judge_paths([folder], plan=Plan(16, 8, "job.toml"))
    assert [(f.code, f.verdict) for f in report.findings if f.verdict != "PASS"] == [("CMP003", "UNJUDGED")]


def test_a_baseline_shows_what_has_become_worse(tmp_path: Path) -> None:
    text, kept = text_of("ib_write_bw_ndr.txt"), tmp_path / "base.json"
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    latency = text_of("ib_send_lat_ib.txt")
    nodes(before, {"a": text, "l": latency}, {"a": text})
    slow = text.replace("391.61", "330.00").replace("0.746937", "0.629425")
    nodes(after, {"a": slow, "l": latency}, {"b": text_of("ibstat_four_ndr.txt")})
    first = judge_paths([str(before)])
    assert save_baseline(first, kept) == 3
    assert {f.verdict for f in compare_baseline(first, kept)} == {"PASS"}
    found = compare_baseline(judge_paths([str(after)]), kept)
    assert {(f.target.node, f.unit, f.verdict) for f in found} == {
        ("node1", "Gb/s", "WARN"),
        ("node1", "µs", "PASS"),
        ("node2", "", "UNJUDGED"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema_version": 2, "values": []}',
        '{"schema_version": 1}',
        '{"schema_version": 1, "values": [{"value": 1}]}',
        '{"schema_version": 1, "values": [{"value": NaN}]}',
        '{"schema_version": 1, "values": [7]}',
    ],
)
def test_a_bad_baseline_is_an_error_of_the_user(tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        compare_baseline(Report(()), path)
    assert caught.value.diagnostics[0].file == str(path)
    with pytest.raises(InputError, match="no measurement that could"):
        save_baseline(Report(()), path)


def test_a_baseline_is_json_with_the_meaning_of_each_value(tmp_path: Path) -> None:
    save_baseline(judged(text_of("ib_write_bw_ndr.txt").encode()), tmp_path / "b")
    (value,) = json.loads((tmp_path / "b").read_text())["values"]
    assert (value["code"], value["unit"], value["direction"], value["algorithm"]) == (
        "NET004",
        "Gb/s",
        "one direction",
        "ib_write_bw",
    )


def test_no_findings_is_not_a_pass() -> None:
    assert Report(()).verdict == "UNJUDGED"
    assert not Report(()).passes(strict=True)


def test_names_in_the_order_people_expect() -> None:
    assert sorted(["n10", "n9", "a2b10", "a2b9", "n"], key=natural) == ["a2b9", "a2b10", "n", "n9", "n10"]
