"""`seatrial scale` on a virtual cluster: what it reports, that it continues, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import JOB, seatrial, write_corpus
from seatrial.base import process
from seatrial.record.folder import RunFolder
from seatrial.record.stages import read_generation

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

TIMEOUT_S = 120.0
SCALE = ("scale", "job.toml", "--nodes", "1,2", "--steps", "12", "--repeats", "3")
TWICE = ("scale", "job.toml", "--nodes", "1", "--steps", "12", "--repeats", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scale")
    write_corpus(made)
    text = JOB.replace("nodes = 2\ngpus_per_node = 2", 'nodes = 2\ngpus_per_node = 1\ndevice = "cpu"')
    (made / "job.toml").write_text(text.replace("tensor = 2\npipeline = 2", "replicate = 2"))
    return made


def measurements(folder: Path) -> list[Path]:
    return sorted((folder / "runs/.scale").glob("small-*"))


def trials(folder: Path) -> list[dict[str, Any]]:
    """The runs of the newest measurement."""
    found: list[dict[str, Any]] = json.loads((measurements(folder)[-1] / "scale.json").read_text())["trials"]
    return found


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    done = seatrial(folder, *SCALE, "--json", "--min-doubling", "1", "--price", "2")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_both_sizes_are_measured(folder: Path, report: dict[str, Any]) -> None:
    one, two = report["sizes"]
    assert [(s["nodes"], s["gpus"], s["global_batch"], s["runs"]) for s in (one, two)] == [
        (1, 1, 4, 3),
        (2, 2, 8, 3),
    ]
    for size in (one, two):
        speed = size["tokens_per_s"]
        assert 0 < speed["low"] < speed["mean"] < speed["high"]
        assert size["tokens_per_s_per_gpu"] == pytest.approx(speed["mean"] / size["gpus"])
        assert size["cost_per_million_tokens"] == pytest.approx(2 / 3600 * 1e6 / speed["mean"] * size["gpus"])
        assert size["predicted"] is None
        assert "CPU" in size["why_not_predicted"]
    assert two["efficiency"]["mean"] == pytest.approx(
        two["tokens_per_s_per_gpu"] / one["tokens_per_s_per_gpu"]
    )
    assert two["efficiency"] == two["efficiency_of_doubling"]
    assert [g["verdict"] for g in report["gates"]] == ["PASS", "UNJUDGED"]
    assert [g["verdict"] for g in report["losses"]] == ["PASS", "PASS"]
    assert report["meets_gates_nodes"] == [2]
    assert report["spent_gpu_hours"] == pytest.approx(
        sum(t["gpus"] * t["seconds"] for t in trials(folder)) / 3600
    )


def test_the_split_adds_up_to_the_measured_step(folder: Path, report: dict[str, Any]) -> None:
    runs = {n: [t for t in trials(folder) if t["nodes"] == n] for n in (1, 2)}
    for size in report["sizes"]:
        split = size["step_split"]
        assert sum(split["seconds"].values()) == pytest.approx(split["step_s"], rel=1e-9)
        shown = sorted(runs[size["nodes"]], key=lambda t: t["figures"]["tokens_per_s"])[1]
        stages, _ = read_generation(RunFolder(measurements(folder)[-1] / shown["folder"]), 1)
        steps = slice(shown["figures"]["warm_up"], None)
        totals = np.stack([each.seconds.sum(axis=1)[steps] for each in stages.values()])
        # The slowest rank sets each step of the split, rank 0's clock the measured one.
        assert split["step_s"] == pytest.approx(totals.max(axis=0).mean(), rel=1e-6)
        assert totals[0].mean() == pytest.approx(shown["figures"]["step_s"], rel=0.05, abs=0.0005)
        assert split["seconds"]["forward"] > 0
        assert ("replicate" in split["seconds"]) == (size["nodes"] == 2)
        parts = {row["name"]: row["seconds"] for row in size["waterfall"]["rows"]}
        assert sum(s or 0.0 for s in parts.values()) == pytest.approx(split["step_s"], rel=1e-9)
        assert parts["forward and backward"] == pytest.approx(
            split["seconds"]["forward"] + split["seconds"]["backward"]
        )
        assert (parts["model FLOPs"], size["waterfall"]["mfu"]) == (None, None)


def test_the_size_of_messages_is_reported(report: dict[str, Any]) -> None:
    one, two = report["sizes"]
    assert one["collectives"].keys() <= {"step_sum"}
    gradients = two["collectives"]["replicate"]
    assert gradients["ranks"] == 2
    assert gradients["calls"] >= 1
    assert gradients["message_bytes"] == pytest.approx(gradients["bytes"] / gradients["calls"])


def test_nothing_is_measured_again(folder: Path, report: dict[str, Any]) -> None:
    before = trials(folder)
    done = seatrial(folder, *SCALE, "--json", "--min-doubling", "199")
    again = json.loads(done.stdout)
    assert trials(folder) == before
    assert len(measurements(folder)) == 1
    assert again["sizes"][1]["efficiency"] == report["sizes"][1]["efficiency"]
    doubling, speedup = (g["verdict"] for g in again["gates"])
    # On a busy machine the interval of two runs may be too wide to fail.
    missed = again["sizes"][1]["efficiency"]["high"] < 1.99
    assert (doubling, done.returncode) == (("FAIL", 1) if missed else ("UNJUDGED", 0)), done.stderr
    assert speedup == "UNJUDGED"
    assert "6 runs exist already" in done.stderr


def test_the_report_is_one_page(folder: Path, report: dict[str, Any]) -> None:
    page = (measurements(folder)[0] / "report.html").read_text()
    assert "Where the time of a step goes" in page
    assert "replicate messages" in page
    assert "2 nodes: where the step goes, measured" in page
    assert "2 nodes: own work of each rank against its peers" in page
    assert "MFU unknown: no dense peak is known" in page
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    saved = json.loads((measurements(folder)[0] / "report.json").read_text())
    assert [s["tokens_per_s"] for s in saved["sizes"]] == [s["tokens_per_s"] for s in report["sizes"]]


def test_killed_in_the_middle_it_continues(folder: Path, report: dict[str, Any]) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "seatrial", *TWICE, "--plain", "--fresh"]
    started = subprocess.Popen(
        command, cwd=folder, env={**os.environ, "MARK": mark}, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    for line in started.stderr:
        if "tokens/s" in line:
            break
    end = time.monotonic() + TIMEOUT_S
    while len(marked := process.descendants(started.pid)) < 3:  # the next run: its process, an agent, ...
        assert time.monotonic() < end, "no second run"
        time.sleep(0.05)
    started.kill()
    started.communicate()
    while any(of(pid, mark) for pid in marked):
        assert time.monotonic() < end, "a run outlived its measurement"
        time.sleep(0.05)
    (finished,) = trials(folder)
    done = seatrial(folder, *TWICE, "--json")
    assert done.returncode == 0, done.stderr
    assert len(measurements(folder)) == 2
    assert trials(folder)[0] == finished
    assert [s["runs"] for s in json.loads(done.stdout)["sizes"]] == [2]


def of(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_interrupted_it_prints_how_to_continue(folder: Path) -> None:
    command = [sys.executable, "-m", "seatrial", *SCALE, "--plain", "--fresh"]
    started = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    for line in started.stderr:
        if "run 1" in line:
            break
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=TIMEOUT_S)
    assert started.returncode == 130
    assert "the same command continues" in err
    assert [t["problem"] for t in trials(folder)] == ["interrupted"]


def test_the_budget_is_kept(folder: Path) -> None:
    budget = 1e-5  # GPU hours: 36 ms of a rank
    done = seatrial(folder, *SCALE, "--json", "--fresh", "--budget", str(budget))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stopped"].startswith("the budget is spent")
    assert [s["tokens_per_s"] for s in found["sizes"]] == [None, None]
    assert len(trials(folder)) == 1


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    before = measurements(folder)
    done = seatrial(
        folder, "scale", "job.toml", "--nodes", "0,x", "--steps", "3", "--precision", "200",
        "--min-speedup", "8:4:2", "--topology", "job.toml", "--set", "optimizer.lr=-1",
    )  # fmt: skip
    assert done.returncode == 2
    for problem in (
        "--nodes 0,x",
        "--steps 3",
        "--precision 200",
        "--min-speedup 8:4:2",
        "not a topology",
        "optimizer.lr",
    ):
        assert problem in done.stderr
    assert measurements(folder) == before


def test_a_size_that_cannot_be_is_refused_before_anything_starts(folder: Path) -> None:
    done = seatrial(folder, "scale", "job.toml", "--nodes", "1,3", "--strong")
    assert done.returncode == 2
    assert "with 3 nodes" in done.stderr
    assert "job.toml:" in done.stderr
