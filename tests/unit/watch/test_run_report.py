"""The report of a run: what is in its folder, what is missing, and nothing that a hostile record could make it do."""

from __future__ import annotations

import html.parser
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from framed_page import CHROMIUM, framed
from seatrial.cli.main import main
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.stages import STAGES, StageWriter

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\"'`${7*7}{{ 7*7 }}"
BEGIN = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a failure, a validation loss, checkpoints, a check, a drill, a scaling, alerts; all its text hostile."""
    folder = RunFolder(tmp_path / "runs" / "a-run")
    folder.control.mkdir(parents=True)
    folder.reports.mkdir()
    folder.job_toml.write_text(
        'name = "a-run"\n[train]\nsteps = 60\nglobal_batch = 2\nsequence_length = 8\n[cluster]\nnodes = 2\ngpus_per_node = 4\n'
    )
    layout = {"pipeline": 1, "tensor": 1, "world_size": 2}
    folder.plan_json.write_text(json.dumps({"layout": layout, "parameters": 1000}))

    def happened(time: float, kind: str, generation: int = 1, severity: str = "info", **more: Any) -> None:
        event = events.Event(BEGIN + time, generation, kind, severity, more.pop("message", kind), **more)
        events.write(folder, event)

    happened(0, "run_started", data={"layout": layout})
    happened(1, "coordinator_elected", node=0, data={"term": 1})
    for node in (0, 1, 2):
        happened(2, "node_joined", node=node, data={"spare": node == 2})
    happened(3, "generation_started", data={"slots": {"0": 0, "1": 1}})
    happened(9, "device", data={"device": "cpu"})
    writer = MetricsWriter(folder)

    def step(number: int, time: float, generation: int, validation: float | None = None) -> None:
        record = MetricsRecord(
            number, number * 16, 5.0 - number / 20, 1.0, 1e-3, 1.0, 0.0, 16.0, 2.0, None, 2**30, BEGIN + time, generation,
            validation_loss=validation, validation_time_s=None if validation is None else 0.5,
        )  # fmt: skip
        writer.write(record)

    for n in range(1, 41):
        step(n, 10.0 + n, 1)
    happened(
        41,
        "checkpoint_saved",
        data={"step": 30, "folder": "/x", "bytes": 5e9, "seconds": 2.0, "stalled_s": 0.1},
    )
    data = {
        "signal": "hang",
        "class": "process",
        "cause": EVIL,
        "action": "restart",
        "step": 40,
        "restarts": 1,
    }
    happened(60, "recovering", severity="warning", node=1, rank=1, message=EVIL, data=data)
    happened(64, "generation_started", 2, data={"slots": {"0": 0, "1": 2}})
    happened(70, "recovered", 2, data={"step": 30, "source": "disk", "redone": 10})
    for n in range(31, 61):
        step(n, 71.0 + n - 30, 2, 4.0 - n / 30 if n % 10 == 0 else None)
    writer.close()
    alert = {
        "rule": "hot",
        "state": "firing",
        "key": "hot/1",
        "since": BEGIN,
        "nodes": [1],
        "command": EVIL,
        "evidence": {},
    }
    happened(80, "alert", 2, "warning", node=1, message=EVIL, data=alert)
    happened(103, "run_finished", 2)
    for rank in (0, 1):
        stages = StageWriter(folder, 2, rank, ranks=2, clock="cpu", first_step=31, not_separated={})
        for n in range(31, 61):
            stages.add(
                n,
                [
                    0.6 + 0.2 * rank if name == "forward" else 0.2 * (1 - rank) * (name == "replicate")
                    for name in STAGES
                ],
            )
        stages.close()
    finding = {"verdict": "FAIL", "code": "GPU001", "message": EVIL}
    check = {"verdict": "FAIL", "time": BEGIN, "nodes": {EVIL: "FAIL", "n1": "PASS"}, "findings": [finding]}
    (folder.reports / "check.json").write_text(json.dumps(check))
    scenario = {
        "name": EVIL,
        "verdict": "PASS",
        "detected_in_s": 0.5,
        "recovered_in_s": 1.5,
        "steps_redone": 3,
    }
    (folder.reports / "drill-1.json").write_text(json.dumps({"scenarios": [scenario]}))
    scale = folder.path.parent / ".scale" / "a-run-20261125-100000"
    scale.mkdir(parents=True)
    size = {
        "nodes": 2,
        "gpus": 8,
        "tokens_per_s": {"mean": 1000.0},
        "efficiency": {"mean": 0.91},
        "problem": EVIL,
    }
    (scale / "report.json").write_text(
        json.dumps({"job": "a-run", "scaling": "weak", "time": BEGIN, "sizes": [size]})
    )
    return folder


class Page(html.parser.HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def document_of(folder: RunFolder, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", str(folder.path), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_report_has_all_data_of_the_folder(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = document_of(folder, capsys, "--price", "2.5")
    assert (found["state"], found["step"], found["steps"]) == ("finished", 60, 60)
    seconds = found["goodput"]["seconds"]
    assert math.fsum(seconds.values()) == pytest.approx(103.0, abs=0.01)
    assert seconds["redone"] == pytest.approx(11.0, abs=0.1), "ten steps, and the one in progress"
    assert seconds["detection"] == pytest.approx(9.0, abs=0.1)
    assert seconds["recovery"] == pytest.approx(11.0, abs=0.1)
    assert seconds["straggler"] == pytest.approx(0.1 / 0.8 * 59, rel=0.05), "half of what rank 1 needs more"
    (failure,) = found["failures"]
    assert (failure["node"], failure["rank"], failure["cls"]) == (1, 1, "process")
    assert failure["lost_s"] == pytest.approx(31.0, abs=0.2)
    assert found["checkpoints"]["saved"] == 1
    assert [step for step, _ in found["loss"]["validation"]] == [40, 50, 60]
    assert len(found["loss"]["curve"]) == 60
    assert found["scaling"]["sizes"][0]["efficiency"] == 0.91
    assert found["checks"]["nodes"]["n1"] == "PASS"
    assert found["drills"][0]["scenarios"][0]["recovered_in_s"] == 1.5
    assert found["cost"]["price"] == pytest.approx(2.5 * found["cost"]["hours"])
    assert found["cost"]["hours_idle"] > 0
    assert found["alerts"][0]["state"] == "firing"
    assert set(found["missing"]) == {"prediction"}


def test_missing_data_is_listed(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder.reports)
    shutil.rmtree(folder.path.parent / ".scale")
    shutil.rmtree(folder.ranks)
    folder.plan_json.write_text("{")
    found = document_of(folder, capsys)
    expected = {"layout", "prediction", "waterfall", "scaling", "checks", "drills", "price"}
    assert set(found["missing"]) == expected
    assert main(["report", str(folder.path)]) == 0
    text = (folder.reports / "report.html").read_text()
    assert all(why in "".join(Page(text).words) for why in found["missing"].values())


def test_a_run_that_never_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "a-run")
    folder.control.mkdir(parents=True)
    folder.plan_json.write_text("[]")
    found = document_of(folder, capsys)
    assert (found["goodput"], found["loss"], found["cost"]) == (None, None, None)
    assert {"goodput", "loss", "cost", "layout"} <= set(found["missing"])
    assert main(["report", str(folder.path)]) == 0


def test_hostile_records_are_escaped(folder: RunFolder) -> None:
    assert main(["report", str(folder.path)]) == 0
    text = (folder.reports / "report.html").read_text()
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "link", "base", "form", "a"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    assert "\x1b" not in text
    assert "".join(page.words).count("<script>alert(1)</script>") >= 5, "shown as it is"
    assert "{{ 7*7 }}" in "".join(page.words)


def test_damaged_reports_are_named(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.reports / "check.json").write_text('{"verdict": 1}')
    (folder.reports / "drill-1.json").write_text("[]")
    next((folder.path.parent / ".scale").glob("*/report.json")).write_text('{"job": "a-run", "sizes": [3]}')
    found = document_of(folder, capsys)
    assert (found["checks"], found["drills"], found["scaling"]) == (None, [], None)
    assert {"checks", "drills", "scaling"} <= set(found["missing"])
    assert main(["report", str(folder.path)]) == 0


def test_wrong_arguments_are_refused(folder: RunFolder, tmp_path: Path) -> None:
    assert main(["report", str(tmp_path)]) == 2
    for price in ("nan", "-1", "inf"):
        assert main(["report", str(folder.path), f"--price={price}"]) == 2
    assert main(["report", str(folder.path), "--out", str(tmp_path / "no" / "x.html")]) == 2


@pytest.mark.cluster
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_scrolling_sideways(folder: RunFolder, width: int) -> None:
    assert main(["report", str(folder.path)]) == 0
    shown = framed(folder.reports / "report.html", width, folder.path)
    assert shown[0] <= width
    assert shown[1:] == (0, 0)
