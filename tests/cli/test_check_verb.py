"""`seatrial check --from`, `--simulate` and `seatrial explain`: exit codes, streams, files, orders for schedulers."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.cli.main import main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "check"
HEALTHY, ILL, SUSPECT, UNJUDGED = (
    "ibstat_four_ndr.txt",
    "ibstat_one_down.txt",
    "ib_send_lat_high.txt",
    "ib_write_bw_no_device.txt",
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for node, name in (("n1", HEALTHY), ("n2", ILL), ("n3", HEALTHY), ("n10", HEALTHY)):
        (tmp_path / "out" / node).mkdir(parents=True)
        shutil.copy(FIXTURES / name, tmp_path / "out" / node / "ibstat.txt")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("name", "code", "strict"), [(HEALTHY, 0, 0), (ILL, 1, 1), (SUSPECT, 0, 1), (UNJUDGED, 0, 1)]
)
def test_exit_codes(name: str, code: int, strict: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--from", str(FIXTURES / name)]) == code
    assert main(["check", "--from", str(FIXTURES / name), "--strict"]) == strict


def test_a_person_sees_the_fault_what_to_do_and_the_verdict(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--from", "out"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "1 of 4 nodes failed: n2",
        "",
        "FAIL      NET001  n2 mlx5_2/1: Down, physical state Polling",
        "          expected  Active, LinkUp [3 of 4 ports like it are]",
        "          evidence  out/n2/ibstat.txt:42",
        "          action    physical state Polling: reseat or swap the cable, check the switch port; Disabled: enable",
        "          the port (`mlxlink -d DEVICE --port_state UP`), check the switch's setting and the adapter's",
        "          firmware; Initializing: start the subnet manager. Drain the node until then",
        "PASS      NET001  n1, n3, n10: 4 fabric ports (MT4129 InfiniBand) active at 400 Gb/s",
        "",
        "remove    from Slurm, not run:",
        '          scontrol update nodename=n2 state=drain reason="seatrial NET001 mlx5_2/1: Down, physical state Polling"',
        "",
        "remove    from Kubernetes, not run:",
        "          kubectl taint nodes n2 seatrial.dev/unfit=NET001:NoSchedule --overwrite",
        "",
        "FAIL: 1 failed, 3 passed in 4 outputs of 4 nodes",
    ]


def test_the_last_line_reports_that_all_is_unjudged(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--from", str(FIXTURES / UNJUDGED)])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "UNJUDGED: 1 not judged in 1 output. Nothing failed, but not everything could be judged: this is not a pass"
    )


def test_json_is_one_document_on_stdout(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--from", "out", "--json", "--html", "r.html"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["nodes"] == {"n1": "PASS", "n2": "FAIL", "n3": "PASS", "n10": "PASS"}
    assert err == "report: r.html\n"
    assert Path("r.html").read_text().startswith("<!doctype html>")


def test_a_plugins_exit_codes(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [
        main(["check", "--nagios", "--from", str(FIXTURES / n)]) for n in (HEALTHY, SUSPECT, ILL, UNJUDGED)
    ]
    assert codes == [0, 1, 2, 3]
    assert main(["check", "--nagios", "--from", "nowhere"]) == 3
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 5
    assert out.splitlines()[-1] == "SEATRIAL UNKNOWN - nowhere: no such file or folder"
    assert err == ""


def test_lists_of_nodes_to_exclude(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(FIXTURES / ILL, "out/n3/ibstat.txt")
    assert main(["check", "--from", "out", "--exclude-file", "bad.txt"]) == 1
    assert Path("bad.txt").read_text() == "n2\nn3\n"
    assert main(["check", "--from", "out", "--exclude-file", "bad.slurm"]) == 1
    assert Path("bad.slurm").read_text() == "n[2-3]\n"
    capsys.readouterr()
    assert main(["check", "--from", str(FIXTURES / ILL), "--exclude-file", "none.txt"]) == 1
    assert "name no node" in capsys.readouterr().err
    assert Path("none.txt").read_text() == ""


def test_a_baseline_is_kept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, bw = str(tmp_path / "b.json"), str(FIXTURES / "ib_write_bw_ndr.txt")
    assert main(["check", "--from", bw, "--save-baseline", kept]) == 0
    assert "1 measurements saved" in capsys.readouterr().err
    assert main(["check", "--from", bw, "--baseline", kept, "--strict"]) == 0
    slower = tmp_path / "slow.txt"
    slower.write_text(Path(bw).read_text().replace("391.61", "300.00").replace("0.746937", "0.572205"))
    assert main(["check", "--from", str(slower), "--baseline", kept]) == 1
    assert "391.6 in the baseline" in capsys.readouterr().out


def test_a_job_sets_the_required_number_of_nodes(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--preset", "first-voyage"]) == 0
    job = Path("first-voyage.toml")
    for node in ("n2", "n3"):
        shutil.rmtree(f"out/{node}")
    assert main(["check", str(job), "--from", "out", "--strict"]) == 0
    shutil.rmtree("out/n10")
    assert main(["check", str(job), "--from", "out", "--strict"]) == 1
    assert "1 provided, the job requires 2 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "f", "--simulate", "f"], "--from and --simulate are mutually exclusive"),
        (["--from", "f", "--topology", "f"], "--topology and --from are mutually exclusive"),
        (["--from", "f", "--stage", "node", "--timeout", "9"], "2 problems"),
        (["--simulate", "f", "--nodes", "n[1-2]"], "--nodes and --simulate are mutually exclusive"),
        (["job.toml", "--simulate", "f"], "JOB and --simulate are mutually exclusive"),
        (["--simulate", "f", "--apply"], "the nodes are simulated"),
        (["--simulate", "nowhere"], "cannot be read"),
        (["--simulate", "f"], "cannot be read"),
        (["--hostfile", "f", "--nodes", "n1"], "--hostfile and --nodes are mutually exclusive"),
        (["--timeout", "0"], "is not a time"),
        (["--timeout", "inf"], "is not a time"),
        (["--stage", "some"], "invalid choice"),
        (["--force", "--from", "f"], "--force requires --apply"),
        (["--apply", "--from", "f"], "requires a scheduler"),
        (["--apply", "--from", "f", "--scheduler", "pbs"], "invalid choice"),
        (["--nodes", "n[3-1]"], "is not a range"),
        (["--topology", "nowhere", "--nodes", "n1"], "cannot read the topology"),
        (["--from", "nowhere", "neither"], "2 problems"),
        (["--from", "."], "no outputs in"),
        (["--from", "f", "--baseline", "nowhere"], "cannot be read"),
        (["--from", "f", "--baseline", "f"], "not JSON"),
        (["--from", "f", "--html", "no/such/folder/r.html"], "cannot be written"),
        (["--from", "f", "--json", "--nagios"], "are mutually exclusive"),
        (["--from", "f", "--port-gbit-s", "nan"], "is not a rate"),
        (["--from", "f", "--baseline", "a", "--save-baseline", "b"], "not allowed with"),
        (["job.toml", "--from", "f"], "job.toml"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "f" in arguments:
        shutil.copy(FIXTURES / HEALTHY, "f")
    code = main(["check", *arguments])
    assert (code, says in capsys.readouterr().err) == (
        (2, True) if "--nagios" not in arguments else (3, False)
    )


SCENARIO = """
[cluster]
nodes = 16
[[fault]]
kind = "nic_slow"
node = 3
rail = 5
share = 0.6
"""


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(SCENARIO)
    return "c.toml"


def test_a_simulated_cluster_names_the_culprit_in_every_output(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--html", "r.html", "--exclude-file", "bad.txt"]
    assert main(["check", "--simulate", scenario, *extra]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == ["1 of 16 nodes failed: node0003", ""]
    assert lines[2].startswith("FAIL      BLM003  node0003 mlx5_5/1: ")
    assert any(line.startswith("stages    node 1 round; pair ") for line in lines)
    assert lines[-1].endswith(" passed on 16 simulated nodes")
    assert "take out" not in out  # there is nobody to take out
    assert err == "report: r.html\n1 nodes to exclude: bad.txt\n"
    assert Path("bad.txt").read_text() == "node0003\n"
    assert "Suspected causes" in Path("r.html").read_text()


def test_the_json_of_a_simulated_cluster(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--simulate", scenario, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (blame,) = document["blames"]
    assert (blame["code"], blame["kind"], blame["what"], blame["rail"]) == (
        "BLM003",
        "nic",
        "node0003 mlx5_5/1",
        5,
    )
    assert blame["target"]["node"] == "node0003"
    assert document["simulated"] == "c.toml"
    assert document["measured"] == {}  # invented rates are none
    assert document["rounds"]["pair"] >= 1
    assert document["nodes"]["node0003"] == "FAIL"
    assert set(document["nodes"].values()) == {"PASS", "FAIL"}
    assert main(["check", "--simulate", scenario, "--nagios"]) == 2
    assert "node0003 mlx5_5/1 BLM003" in capsys.readouterr().out


def test_a_healthy_simulated_cluster_passes_strictly(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(scenario).write_text("[cluster]\nnodes = 16\n")
    assert main(["check", "--simulate", scenario, "--strict"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last[:6], last[-27:]) == ("PASS: ", " passed on 16 simulated nodes"[-27:])


def test_commands_for_a_scheduler_are_shown_and_not_run(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # nothing could be run
    assert main(["check", "--from", "out", "--scheduler", "kubernetes"]) == 1
    out, err = capsys.readouterr()
    assert "remove    from Kubernetes, not run:" in out.splitlines()
    assert (
        "          kubectl taint nodes n2 seatrial.dev/unfit=NET001:NoSchedule --overwrite"
        in out.splitlines()
    )
    assert err == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # in a Slurm job nobody needs to say so
    assert main(["check", "--from", "out", "--json"]) == 1
    (order,) = json.loads(capsys.readouterr().out)["orders"]
    assert order["command"][:4] == ["scontrol", "update", "nodename=n2", "state=drain"]
    assert order["done"] is None


def test_an_order_that_fails_is_reported(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["check", "--from", "out", "--scheduler", "kubernetes", "--apply"]) == 1
    out, err = capsys.readouterr()
    assert "remove    from Kubernetes, 0 done, 1 failed:" in out.splitlines()
    assert err.startswith("failed: kubectl taint nodes n2 ")
    assert "not installed" in err


def test_apply_without_a_failed_node_runs_nothing(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    shutil.copy(FIXTURES / HEALTHY, "out/n2/ibstat.txt")
    assert main(["check", "--from", "out", "--scheduler", "slurm", "--apply"]) == 0
    assert capsys.readouterr().err == ""


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "net004"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NET004: RDMA bandwidth\n")
    assert "action" in out
    assert main(["explain"]) == 0
    assert "NET001  fabric port not active\n" in capsys.readouterr().out
    assert main(["explain", "NET004", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["codes"][0]["code"] == "NET004"
    assert main(["explain", "NET00X"]) == 2
    assert "did you mean NET0" in capsys.readouterr().err


def test_help_loads_no_reader() -> None:
    code = (
        "import sys; from seatrial.cli.main import main; main(['check', '--help']) if 0 else main(['--help'])"
    )
    code += "; assert not [m for m in sys.modules if m.startswith('seatrial.check')]"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("ib_write_bw") is None, reason="needs ib_write_bw of Debian's perftest")
@pytest.mark.skipif(
    os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
    reason="this host has RDMA devices",
)
def test_the_real_ib_write_bw_without_a_device_is_unjudged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(["ib_write_bw", "-d", "mlx5_0"], capture_output=True, text=True, timeout=30)
    (tmp_path / "out.txt").write_text(done.stdout + done.stderr)
    assert main(["check", "--from", str(tmp_path / "out.txt"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["code"], found["verdict"]) == ("NET007", "UNJUDGED")
    assert "no RDMA device" in found["why_unjudged"]


def test_stdin_is_read(tmp_path: Path) -> None:
    call = [sys.executable, "-P", "-m", "seatrial", "check", "--from", "-", "--json"]
    for data, code in ((HEALTHY, 0), (ILL, 1)):
        done = subprocess.run(call, input=(FIXTURES / data).read_bytes(), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (code, b"")
        (output,) = json.loads(done.stdout)["outputs"]
        assert (output["file"], output["tool"]) == ("stdin", "ibstat")
    both = [*call[:-1], str(FIXTURES / SUSPECT)]
    done = subprocess.run(
        both, input=gzip.compress((FIXTURES / ILL).read_bytes()), capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"stdin" in done.stdout
    assert subprocess.run(call, input=b"", capture_output=True, check=False).returncode == 0, "UNJUDGED"


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_progress_of_long_reading_is_shown(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("seatrial.cli.progress.PLAIN_EVERY_S", 0.0)
    log = tmp_path / "messages"
    log.write_text("Nov 15 12:00:00 gpu07 systemd[1]: Started Session 1 of User root.\n" * 60_000)
    with log.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["check", "--from", str(log) if source == "file" else "-", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "PASS"
    lines = err.splitlines()
    assert lines
    if source == "file":
        assert all(line.startswith("reading: ") and "MiB of 3.78 MiB (" in line for line in lines), lines
    else:
        assert all(line.startswith("reading: ") and line.endswith(" so far, at stdin") for line in lines), (
            lines
        )


@pytest.mark.cluster  # slow
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """The program itself, on pipes of 1 and of 48 MiB."""
    code = (
        "import sys; from seatrial.cli.main import main; code = main(['check', '--from', '-', '--json']);"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0], file=sys.stderr); sys.exit(code)"
    )
    line = b"Nov 15 12:00:00 gpu07 sshd[4711]: Accepted publickey for slurm from 10.0.3.7 port 51234 ssh2\n"
    peaks = []
    for mib in (1, 48):
        data = (
            line * ((mib << 20) // len(line))
            + b"Nov 15 12:00:01 gpu07 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], input=data, capture_output=True, check=False
        )
        assert done.returncode == 1
        assert json.loads(done.stdout)["nodes"] == {"gpu07": "FAIL"}
        peaks.append(int(done.stderr) / 1024)
    assert peaks[1] - peaks[0] < 24, peaks
