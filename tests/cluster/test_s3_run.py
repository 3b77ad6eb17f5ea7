"""Whole runs whose checkpoints are on an object store, or in a fallback because the first place does not take them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ONE_NODE, Run, records, seatrial, write_corpus
from moto_server import MotoServer
from seatrial.checkpoint.place import open_place

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

STEPS = 40


def write_job(folder: Path, checkpoint: str, *, name: str = "small") -> None:
    text = ONE_NODE.replace("steps = 12", f"steps = {STEPS}").replace('name = "small"', f'name = "{name}"')
    (folder / "job.toml").write_text(text + checkpoint)
    write_corpus(folder)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(folder / "runs/small/metrics.jsonl")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    write_job(folder, "")
    code, _, err = Run(folder).wait()
    assert code == 0, err
    return losses(folder)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()
        run.wait()


@pytest.mark.long  # a smaller run on a store: test_s3_checkpoints
def test_saved_killed_resumed_and_retained_on_a_store(
    s3_url: str, tmp_path: Path, start: Callable[..., Run], whole: dict[int, tuple[float, float]]
) -> None:
    write_job(tmp_path, f'folder = "{s3_url}/team"\n')
    place = open_place(f"{s3_url}/team/small")
    newest = STEPS
    for attempt in range(3):
        if newest == STEPS:  # at first; or it was too quick for us, who wait for a processor
            run = start(*["--fresh"][:attempt])
            for _ in range(max(1, 2 - attempt)):
                run.wait_line("  checkpoint of step ")
            run.kill_all()
            run.wait()
            newest, *older = place.steps()
            assert older or attempt, "two were complete"
    assert newest < STEPS
    assert not list((tmp_path / "runs/small/checkpoints").glob("step-*"))

    code, _, err = start().wait()
    assert code == 0, err
    assert f"resuming after step {newest}" in err
    assert losses(tmp_path) == whole
    assert len(place.steps()) == 2, "keep = 2"
    assert place.steps()[0] == STEPS
    for step in place.steps():
        place.verify(step)
    assert place.remove_leftovers() == []

    listed = seatrial(tmp_path, "checkpoints", "runs/small", "--json")
    assert listed.returncode == 0, listed.stderr
    assert str(STEPS) in listed.stdout
    verified = seatrial(tmp_path, "verify", "runs/small", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)
    out = seatrial(tmp_path, "export", "runs/small", "--out", "hf")
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "hf" / "config.json").is_file()


def test_unreachable_store_falls_back_and_training_continues(
    tmp_path: Path,
    start: Callable[..., Run],
    whole: dict[int, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = MotoServer()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("away")
        write_job(tmp_path, f'folder = "s3://away"\nfallback = "{tmp_path}/other"\n')
        run = start()
        run.wait_line("  checkpoint of step ")
        server.close()  # and with it everything that it had
        run.wait_line("  checkpoint of step ")
        code, _, err = run.wait()
        assert code == 0, err
    finally:
        server.close()
    assert losses(tmp_path) == whole
    events = records(tmp_path / "runs/small/events.jsonl")
    failed = [e for e in events if e["kind"] == "checkpoint_failed" and e["rank"] == 0]
    assert failed
    assert any("trying" in e["message"] for e in failed)
    saved = [e for e in events if e["kind"] == "checkpoint_saved"]
    assert not saved[0]["data"]["fallback"]
    assert all(e["data"]["fallback"] for e in saved[1:])
    assert open_place(f"{tmp_path}/other/small").steps()[0] == STEPS


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.long
def test_a_disk_that_is_full_sends_checkpoints_to_the_fallback(
    tmp_path: Path, start: Callable[..., Run], whole: dict[int, tuple[float, float]]
) -> None:
    small = tmp_path / "full"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        write_job(tmp_path, f'folder = "{small}"\nfallback = "{tmp_path}/other"\n')
        code, _, err = start().wait()
        assert code == 0, err
        assert losses(tmp_path) == whole
        events = records(tmp_path / "runs/small/events.jsonl")
        assert any("No space left" in e["message"] for e in events if e["kind"] == "checkpoint_failed")
        assert open_place(f"{tmp_path}/other/small").steps()[0] == STEPS
        assert open_place(str(small / "small")).steps() == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.long  # the decision: tests/unit/train
def test_without_any_place_it_stops_before_more_is_at_risk(tmp_path: Path, start: Callable[..., Run]) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    write_job(tmp_path, f'folder = "{place}"\nmax_unsaved_s = 4.0\n')
    text = (tmp_path / "job.toml").read_text().replace(f"steps = {STEPS}", "steps = 5000")
    (tmp_path / "job.toml").write_text(text)
    run = start()
    run.wait_line("  checkpoint of step ")
    (place / "small").rename(tmp_path / "vanished")  # as a mount does
    code, _, err = run.wait()
    assert code == 1, err
    assert "max_unsaved_s" in err
    steps = [r["step"] for r in records(tmp_path / "runs/small/metrics.jsonl")]
    (tmp_path / "vanished").rename(place / "small")
    newest = open_place(str(place / "small")).steps()[0]
    lost = [r for r in records(tmp_path / "runs/small/metrics.jsonl") if r["step"] > newest]
    assert steps[-1] < 5000
    assert sum(r["step_time_s"] for r in lost) < 8.0, "about four seconds of work, and the last waits"
    # The limit was also how long storage may take to answer.
    again = start("--set", f"train.steps={newest + 2}", "--set", "checkpoint.max_unsaved_s=600")
    code, _, err = again.wait()
    assert code == 0, err
    assert f"resuming after step {newest}" in err
