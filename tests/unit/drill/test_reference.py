"""The undisturbed runs of a drill: how often they run, and how far a recovered run may be from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drill_jobs import STORE, copy, job
from test_weights import WHOLE, save

from seatrial.base.errors import RunFailed
from seatrial.drill import conduct
from seatrial.drill import reference as reference_module
from seatrial.drill.conduct import Drill
from seatrial.drill.copies import Cadence
from seatrial.drill.reference import Reference
from seatrial.drill.scenarios import SCENARIOS
from seatrial.drill.weights import Difference
from seatrial.job.changed import Copy
from seatrial.record.folder import RunFolder

STEPS, SAVED = 16, 5


def reference(of: Copy, folder: Path, values: torch.Tensor = WHOLE, *, loss: float = 2.0) -> Reference:
    run = RunFolder(folder)
    run.path.mkdir()
    save(run.checkpoints, values)
    losses = dict.fromkeys(range(1, SAVED), (2.0, 1.0)) | {SAVED: (loss, loss / 2)}
    return Reference(of, run, losses, SAVED, 0.1, 1.0, 5.0, "cpu")


def test_the_tolerance_is_ten_times_what_two_runs_are_apart(tmp_path: Path) -> None:
    one = reference(copy(job()), tmp_path / "one")
    assert one.tolerance(SAVED) == {}, "without a second run the bits must be the same"
    other = reference(copy(job()), tmp_path / "other", WHOLE * (1 + 2**-20), loss=2.0 + 2e-6)
    again = replace(one, again=other)
    found = again.tolerance(SAVED)
    assert found[SAVED - 1, "loss"] == 0.0
    assert found[SAVED, "loss"] == pytest.approx(1e-5)
    assert found[SAVED, "gradient norm"] == pytest.approx(1e-5)
    assert found[SAVED, "weights"] == pytest.approx(10 * 2**-20, rel=1e-2)
    again.judge_again()
    same = reference(copy(job()), tmp_path / "same")
    assert set(replace(one, again=same).tolerance(SAVED).values()) == {0.0}


def test_two_runs_too_far_apart_are_no_reference(tmp_path: Path) -> None:
    one = reference(copy(job()), tmp_path / "one")
    far = reference(copy(job()), tmp_path / "far", loss=2.1)
    with pytest.raises(RunFailed, match=r"differ by 5.0e-02 relative in (loss|gradient norm): comparing"):
        replace(one, again=far).judge_again()
    spoiled = reference(copy(job()), tmp_path / "spoiled", loss=float("nan"))
    with pytest.raises(RunFailed, match="differ by inf"):
        replace(one, again=spoiled).judge_again()
    key = reference(copy(job("train.deterministic=true")), tmp_path / "key")
    near = reference(copy(job()), tmp_path / "near", loss=2.0 + 2e-6)
    with pytest.raises(RunFailed, match=r"with train\.deterministic"):
        replace(key, again=near).judge_again()


@pytest.mark.parametrize(
    ("device", "overrides", "names"),
    [
        ("cpu", (), ["reference"]),
        ("NVIDIA H100", (), ["reference", "reference-again"]),
        ("NVIDIA H100", ("train.deterministic=true",), ["reference", "reference-again"]),
    ],
)
def test_it_runs_twice_on_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    overrides: tuple[str, ...],
    names: list[str],
) -> None:
    trained: list[tuple[str, int]] = []

    def run(root: Path, of: Copy, *, on_poll: Callable[..., None]) -> Reference:
        trained.append((of.job.name, of.job.train.steps))
        folder = root / of.job.name
        steps = of.job.train.steps
        return Reference(
            of,
            RunFolder(folder),
            dict.fromkeys(range(1, steps + 1), (1.0, 1.0)),
            steps,
            0.1,
            1.0,
            5.0,
            device,
        )

    monkeypatch.setattr(conduct, "run_reference", run)
    monkeypatch.setattr(reference_module, "compare", lambda ours, theirs: Difference(3))
    drill = Drill(job(*overrides), tmp_path, SCENARIOS[:1], Cadence(STEPS))
    drill._stores = [SimpleNamespace(address=STORE)]  # type: ignore[list-item]
    first = drill._reference(replicas=False, steps=STEPS)
    assert [name for name, _ in trained] == names
    assert (first.again is not None) == (len(names) == 2)
    longer = drill._reference(replicas=False, steps=2 * STEPS)
    assert [steps for _, steps in trained[len(names) :]] == [2 * STEPS] * len(names), "both go on"
    assert longer.again is None or longer.again.steps == longer.steps
