"""What is written down of a drill."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from drill_jobs import job

from seatrial.base.errors import InputError
from seatrial.drill import report
from seatrial.drill.conduct import Drill, Result
from seatrial.drill.copies import Cadence
from seatrial.drill.injection import Injection
from seatrial.drill.judge import Check, Judgement, unjudged
from seatrial.drill.scenarios import SCENARIOS
from seatrial.job.changed import Change, Copy
from seatrial.record import lock
from seatrial.record.folder import RunFolder

PASS = Judgement(
    "PASS", (Check("ledger", True, "512 samples"), Check("losses", True, "equal")), 0.02, 3.1, 2, 1.8, 0.0
)
FAIL = Judgement(
    "FAIL",
    (Check("ledger", False, "step 9 is missing"), Check("losses", True, "near")),
    None,
    None,
    0,
    0.0,
    3e-5,
)


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    drill = Drill(job(), tmp_path, SCENARIOS[:3], Cadence(16), seed=7)
    drill.root.mkdir(parents=True)
    changes = [Change("train.steps", 200, 16, "short"), Change("cluster.spares", 0, 1, "what | it needs")]
    fault = Injection(1.0, "kill_rank", "SIGKILL to rank 0", 11, 0, 0)
    drill.results += [
        Result(SCENARIOS[0], PASS, 24.0, drill.root / "kill_rank", changes, (fault,)),
        Result(SCENARIOS[1], FAIL, 30.0, drill.root / "kill_agent", changes),
        Result(SCENARIOS[2], unjudged("the job has one node")),
    ]
    return drill


def test_the_table(drill: Drill) -> None:
    assert report.row(drill.results[0]) == (
        "kill_rank",
        "20 ms",
        "3.1 s",
        "2",
        "1.8 s",
        "exact",
        "equal",
        "PASS",
    )
    assert report.row(drill.results[1]) == ("kill_agent", "-", "-", "0", "0 s", "WRONG", "to 3e-05", "FAIL")
    assert report.row(drill.results[2])[1:] == ("-", "-", "-", "-", "-", "-", "UNJUDGED")
    assert report.summary(drill.results) == "1 PASS, 1 FAIL, 1 UNJUDGED"
    assert report.summary([]) == "nothing was run"


def test_the_document_holds_everything(drill: Drill) -> None:
    page, value, copy = report.write(drill, 61.0)
    assert copy is None, "there is no such run"
    assert json.loads((drill.root / "report.json").read_text()) == json.loads(json.dumps(value))
    assert value["schema_version"] == 1
    assert value["verdicts"] == {"PASS": 1, "FAIL": 1, "UNJUDGED": 1}
    first, second, third = value["scenarios"]
    assert first["injections"][0]["message"] == "SIGKILL to rank 0"
    assert first["changes"][0] == {"key": "train.steps", "job": 200, "copy": 16, "why": "short"}
    assert second["why"] == "ledger: step 9 is missing"
    assert third["why"] == "needs: the job has one node"
    text = page.read_text()
    assert "**FAILED**. step 9 is missing" in text
    assert "| kill_agent | cluster.spares | 0 | 1 | what \\| it needs |" in text
    assert "seed 7" in text


def test_changes_that_all_copies_share_are_said_once(drill: Drill) -> None:
    ramp = Change("train.batch_ramp", [{"steps": 5, "global_batch": 8}], [], "equally long steps")
    folder = RunFolder(drill.root / "reference")
    copy = Copy(drill.job, (ramp,))
    drill.references["reference"] = SimpleNamespace(folder=folder, copy=copy, steps=16, apart=lambda _: {})  # type: ignore[assignment, index]
    drill.results[0] = replace(drill.results[0], changes=(ramp, *drill.results[0].changes))
    text = report.markdown(drill, 61.0)
    assert text.count("| [{'steps': 5, 'global_batch': 8}] | [] |") == 1
    assert "| kill_rank | train.steps | 200 | 16 |" in text


def test_the_run_gets_a_copy_only_while_it_is_not_running(drill: Drill) -> None:
    live = RunFolder(drill.runs / drill.job.name)
    live.control.mkdir(parents=True)
    live.plan_json.write_text("{}")
    held = lock.acquire(live.lock)
    assert report.write(drill, 1.0)[2] is None
    assert not live.reports.exists()
    os.close(held)
    copy = report.write(drill, 1.0)[2]
    assert copy is not None
    assert {p.suffix for p in live.reports.iterdir()} == {".md", ".json"}
    assert copy.read_text() == (drill.root / "report.md").read_text()


def test_a_copy_must_be_long_enough(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--steps 5 is too few"):
        Drill(job(), tmp_path, SCENARIOS, Cadence(5))
