"""The verb around a check that measures: what it asks for, what it shows, where the report stays. Nothing is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.check.blame.blame import Blame
from seatrial.check.blame.localise import Rounds
from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.judging.report import Judged, Report
from seatrial.check.live.conductor import LiveOptions, LiveResult
from seatrial.check.live.hosts import Host
from seatrial.cli import check_measure
from seatrial.cli.main import main

COPY = Expected(10.0, "GB/s", "peers", "", "copy, CPU", 1 << 20)
RATES = tuple(
    Finding("NOD016", "PASS", Target(node=node), f"copy in host memory: {value} GB/s", value, "GB/s", COPY)
    for node, value in (("a", 9.5), ("c", 9.0))
)
MEASURED = {
    "pairs": [
        {
            "what": "send_recv",
            "median": 3.25,
            "min": 0.4,
            "unit": "GB/s",
            "direction": "one direction",
            "algorithm": "gloo",
            "size_bytes": 64 << 20,
            "n": 3,
        }
    ]
}


class Bench:
    """Stands in for check_live."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.options: LiveOptions | None = None
        self.blame: Blame | None = Blame("node", node="b", why=("all of its rails are slow",))
        self.error: BaseException | None = None

    def __call__(
        self, hosts: list[Host], options: LiveOptions, progress: Callable[[str], None]
    ) -> LiveResult:
        self.hosts, self.options = hosts, options
        progress("node stage: 3 hosts")
        if self.error is not None:
            raise self.error
        progress("node stage: 1.2 s")
        blames = () if self.blame is None else (self.blame,)
        found = (
            Finding("MSR011", "PASS", Target(), "all 3 nodes respond"),
            *(b.finding() for b in blames),
        )
        report = Report((Judged("nvidia-smi", "a", "nvidia-smi", RATES),), found)
        return LiveResult(report, MEASURED, Rounds(1, 2, 1), blames, {"node": 1.2, "pair": 3.4, "total": 5.0})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    bench = Bench()
    monkeypatch.setattr(check_measure, "check_live", bench)
    return bench


def test_the_person_sees_stages_blame_rates_and_the_nodes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--nodes", "a,b,c"]) == 1
    out, err = capsys.readouterr()
    assert [host.name for host in bench.hosts] == ["a", "b", "c"]
    assert err.splitlines() == ["node stage: 3 hosts", "node stage: 1.2 s"]
    lines = out.splitlines()
    assert lines[:2] == ["1 of 3 nodes failed: b", ""]
    assert lines[2] == "FAIL      BLM004  b: all of its rails are slow"
    assert "stages    node 1.2 s, 1 round; pair 3.4 s, 2 rounds; all 1 round" in lines
    assert (
        "measured  pairs send recv: median 3.25 GB/s, minimum 0.4 (one direction, gloo, 64 MiB), 3 values"
        in lines
    )
    assert (
        "          node copy in host memory: median 9.25 GB/s, minimum 9 (copy, CPU, 1 MiB), 2 values"
        in lines
    )
    assert lines[-1] == "FAIL: 1 failed, 3 passed on 3 nodes in 5.0 s"


def test_the_json_has_what_the_planner_reads(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nodes", "a,b,c", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    alone = document["measured"].pop("node")
    assert document["measured"] == MEASURED
    assert [(r["what"], r["median"], r["min"], r["n"], r["unit"]) for r in alone] == [
        ("copy in host memory", 9.25, 9.0, 2, "GB/s")
    ]
    assert document["nodes"] == {"a": "PASS", "b": "FAIL", "c": "PASS"}
    assert document["rounds"] == {"node": 1, "pair": 2, "group": 1}
    assert document["seconds"]["total"] == 5.0
    assert document["blames"][0]["why"] == ["all of its rails are slow"]
    assert document["simulated"] is None


def test_the_options_reach_the_bench(bench: Bench) -> None:
    Path("t.conf").write_text("SwitchName=s1 Nodes=a,b\n")
    Path("hosts").write_text("a slots=8\nb\n")
    arguments = ["--hostfile", "hosts", "--stage", "node", "--stage", "all", "--topology", "t.conf"]
    main(["check", *arguments, "--timeout", "20", "--storage", "ckpt", "--port-gbit-s", "400"])
    assert [host.name for host in bench.hosts] == ["a", "b"]
    options = bench.options
    assert options is not None
    assert options.stages == ("node", "all")
    assert options.topology is not None
    assert options.topology.leaf("a") == "s1"
    assert (options.timeout_s, options.node.seconds) == (20.0, 20.0)
    assert (options.port_gbit_s, options.node.port_gbit_s) == (400.0, 400.0)
    assert options.node.storage == str(Path("ckpt").absolute())
    assert options.plan is None


def test_a_topology_of_other_names_is_refused_and_gaps_warn(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.conf").write_text("SwitchName=s1 Nodes=a.cluster,b.cluster\n")
    assert main(["check", "--nodes", "a,b", "--topology", "t.conf"]) == 2
    assert (
        "contains none of the hosts; it has a.cluster, b.cluster, the hosts are a, b"
        in capsys.readouterr().err
    )
    Path("t.conf").write_text("SwitchName=s1 Nodes=a,c\n")
    assert main(["check", "--nodes", "a,b,c", "--topology", "t.conf"]) == 1
    assert "warning: t.conf does not list 1 of 3 hosts: b" in capsys.readouterr().err


def test_without_anything_it_is_this_node(bench: Bench) -> None:
    main(["check"])
    assert [host.prefix for host in bench.hosts] == [()]
    assert bench.options is not None
    assert (bench.options.stages, bench.options.timeout_s) == (("node", "pair", "all"), 60.0)
    assert bench.options.node.storage == str(Path("runs").absolute())


def test_a_job_of_real_nodes_is_the_plan(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--preset", "first-voyage"]) == 0
    job = Path("first-voyage.toml")
    job.write_text(job.read_text().replace('launcher = "local"', 'launcher = "ssh"'))
    assert 'launcher = "ssh"' in job.read_text()
    main(["check", str(job), "--nodes", "a,b,c"])
    options = bench.options
    assert options is not None
    assert options.plan is not None
    assert options.node.gpus == options.plan.gpus_per_node
    assert options.node.storage == str(Path("runs").absolute())
    main(["check", "--nodes", "a,b,c"])  # without a job nothing is known of other machines' folders
    assert bench.options is not None
    assert bench.options.node.storage is None
    assert main(["check", str(job)]) == 2
    assert "the hosts are unknown" in capsys.readouterr().err


def test_check_of_a_virtual_cluster_reports_into_its_run_folder(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--preset", "first-voyage"]) == 0
    assert main(["check", "first-voyage.toml"]) == 1
    assert [host.name for host in bench.hosts][:2] == ["node0", "node1"]
    assert bench.options is not None
    assert bench.options.plan is None
    assert not Path("runs").exists()  # nothing was ever started, so nothing is made
    run = Path("runs/first-voyage")
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("")
    capsys.readouterr()
    assert main(["check", "first-voyage.toml"]) == 1
    assert "report: runs/first-voyage/reports/check.json" in capsys.readouterr().err.splitlines()
    kept = json.loads((run / "reports/check.json").read_text())
    assert kept["measured"]["pairs"] == MEASURED["pairs"]
    assert abs(kept["time"] - time.time()) < 60
    assert (run / "reports/check.html").read_text().startswith("<!doctype html>")
    assert bench.options.node.storage == str(Path("runs").absolute())


def test_a_plugin_prints_only_its_line(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nodes", "a,b,c", "--nagios"]) == 2
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (1, "")
    assert out.startswith("SEATRIAL CRITICAL - b BLM004")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--html", "no/r.html"],
        ["--exclude-file", "no/x"],
        ["--baseline", "no.json"],
        ["--save-baseline", "no/b"],
    ],
)
def test_unusable_files_are_reported_before_measuring(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["check", "--nodes", "a,b,c", *arguments]) == 2
    assert "cannot be" in capsys.readouterr().err
    assert bench.hosts == []


def test_missing_needs_of_apply_are_reported_first(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nodes", "a,b,c", "--apply"]) == 2
    assert "--apply requires a scheduler" in capsys.readouterr().err
    assert bench.hosts == []


def test_a_node_by_itself_is_in_no_scheduler_unless_one_is_named(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--nodes", "b"]) == 1
    assert "take out" not in capsys.readouterr().out
    assert main(["check", "--nodes", "b", "--scheduler", "slurm"]) == 1
    assert "scontrol update nodename=b state=drain" in capsys.readouterr().out
    assert main(["check", "--nodes", "a,b,c"]) == 1
    out = capsys.readouterr().out
    assert "scontrol update nodename=b" in out
    assert "kubectl taint nodes b" in out


def test_an_interrupt_is_130(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.error = KeyboardInterrupt()
    assert main(["check", "--nodes", "a,b", "--html", "r.html"]) == 130
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "interrupted")
    assert not Path("r.html").exists()


def test_a_healthy_cluster_passes(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.blame = None
    assert main(["check", "--nodes", "a,b,c", "--strict"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS: 3 passed on 3 nodes in 5.0 s"


def test_measurements_are_kept_and_compared(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.blame = None
    assert main(["check", "--nodes", "a,b,c", "--save-baseline", "b.json"]) == 0
    assert main(["check", "--nodes", "a,b,c", "--baseline", "b.json", "--strict"]) == 0
    assert "9.5 in the baseline" in capsys.readouterr().out
