"""`seatrial verify` and `seatrial checkpoints` on run folders, and what they print."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from saving import new_manifest, save_whole
from seatrial.checkpoint.manifest import Progress
from seatrial.cli.main import main
from seatrial.record import events, lock
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line
from seatrial.record.ledger import LedgerRecord, LedgerWriter

BATCH, LENGTH = 4, 16


def add_checkpoint(place: Path, step: int, generation: int = 1, *, next_sample: int | None = None) -> Path:
    """One of 64 KiB in one file, that two ranks could have written."""
    samples = step * BATCH if next_sample is None else next_sample
    progress = Progress(step, step * BATCH * LENGTH, samples, generation)
    manifest = new_manifest(progress, time=time.time() - 60, layout={"world_size": 2})
    values = torch.arange(1 << 14, dtype=torch.float32) + step
    return save_whole(place, manifest, {"model/a": values})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Generation 1 did steps 1 to 7, generation 2 went on after step 5 and has done 8; step 3 was left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    folder = RunFolder(Path("runs/a-run"))
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text(
        f'name = "a-run"\n[train]\nsteps = 8\nglobal_batch = {BATCH}\nsequence_length = {LENGTH}\n'
    )
    ledger = LedgerWriter(folder)
    for generation, ranks, start, end in ((1, 8, 0, 7), (2, 4, 5, 8)):
        data = {"layout": {"world_size": ranks}}
        events.append(folder, "run_started", "", generation=generation, data=data)
        if start:
            events.append(folder, "resumed", "", generation=generation, data={"step": start})
        for n in range(start + 1, end + 1):
            ledger.write(LedgerRecord(n, (n - 1) * BATCH, n * BATCH, generation, skipped=n == 3))
            if n == 3:
                events.append(folder, "step_skipped", "", generation=generation, data={"step": 3})
            else:
                append_line(folder.metrics, {"step": n, "generation": generation})
    ledger.close()
    events.append(folder, "run_finished", "", generation=2)
    add_checkpoint(folder.checkpoints, 5, 1)
    add_checkpoint(folder.checkpoints, 8, 2)
    return folder


def damage(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def plain(text: str) -> list[str]:
    """Lines without times, sizes and hashes."""
    text = re.sub(r"XXH3-128 [0-9a-f]{32}", "XXH3-128 HASH", text)
    text = re.sub(r"has [0-9a-f]{32}", "has HASH", text)
    text = re.sub(r"\b1 min \d+ s\b", "AGE", text)
    text = re.sub(r"[\d.]+ KiB", "SIZE", text)
    text = re.sub(r"bytes 0 to \d+", "bytes 0 to N", text)
    return re.sub(r" in [\d.]+ m?s$", " in TIME", text, flags=re.MULTILINE).splitlines()


HISTORY = [
    "  ledger       proven: 8 steps, 28 samples, each seen exactly once and in order",
    "  history      generation 1: steps 1 to 7 on 8 ranks",
    "               generation 2: steps 6 to 8 on 4 ranks, after step 5 of generation 1",
    "  redone       2 steps after failures; the last attempt of each counts",
    "  skipped      step 3 (4 samples)",
]


class TestARun:
    def test_all_is_proven(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "a-run"]) == 0
        out, err = capsys.readouterr()
        assert plain(out) == [
            *HISTORY,
            "  checkpoint   runs/a-run/checkpoints/step-00000008: verified, step 8, SIZE in 1 file",
            "  checkpoint   runs/a-run/checkpoints/step-00000005: verified, step 5, SIZE in 1 file",
            "  result       verified",
        ]
        assert plain(err) == ["read SIZE in TIME"]

    def test_only_the_ledger(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        damage(folder.checkpoints / "step-00000008")
        assert main(["verify", "a-run", "--ledger"]) == 0
        assert plain(capsys.readouterr().out) == [*HISTORY, "  result       verified"]

    def test_a_damaged_checkpoint(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        damage(folder.checkpoints / "step-00000005")
        assert main(["verify", "runs/a-run"]) == 1
        out, err = capsys.readouterr()
        assert plain(out)[-3:] == [
            "  checkpoint   runs/a-run/checkpoints/step-00000005: damaged, step 5, SIZE in 1 file",
            "               runs/a-run/checkpoints/step-00000005/rank-00000.safetensors (rank 0) has XXH3-128 HASH "
            "in bytes 0 to N, the manifest has HASH",
            "  result       not verified",
        ]
        assert "error: a checkpoint is damaged" in err

    def test_a_line_of_the_ledger_is_lost(
        self, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = folder.ledger.read_bytes().splitlines(keepends=True)
        folder.ledger.write_bytes(b"".join(text[:1] + text[2:]))
        assert main(["verify", "a-run", "--ledger"]) == 1
        out, err = capsys.readouterr()
        assert plain(out) == [
            "  ledger       not proven: 1 contradiction",
            *HISTORY[1:],
            "  violated     ledger.jsonl:2: step 2 is missing in generation 1",
            "  result       not verified",
        ]
        assert "error: the records do not prove that every sample was seen once" in err

    def test_a_torn_line_is_reported_but_is_not_a_violation(
        self, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = folder.ledger.read_bytes().splitlines(keepends=True)
        folder.ledger.write_bytes(b"".join([*text[:7], b'{"step":8,\n', *text[7:]]))
        assert main(["verify", "a-run", "--ledger"]) == 0
        assert capsys.readouterr().err.startswith("warning: ledger.jsonl:8: not a ledger record (not JSON")

    def test_a_checkpoint_that_contradicts_the_ledger(
        self, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.rmtree(folder.checkpoints)
        add_checkpoint(folder.checkpoints, 8, 2, next_sample=36)
        assert main(["verify", "a-run"]) == 1
        lines = plain(capsys.readouterr().out)
        assert lines[-2:] == [
            "  problem      runs/a-run/checkpoints/step-00000008: it continues at sample 36, but step 8 ends before sample 32",
            "  result       not verified",
        ]

    def test_json(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "a-run", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["schema_version"] == 1
        assert document["ok"] is True
        assert [c["step"] for c in document["checkpoints"]] == [8, 5]
        assert {c["state"] for c in document["checkpoints"]} == {"verified"}
        ledger = document["ledger"]
        assert (ledger["verdict"], ledger["steps"], ledger["samples"]) == ("proven", 8, 28)
        assert (ledger["skipped_steps"], ledger["steps_done_again"]) == ([3], 2)
        assert ledger["generations"][1] == {
            "generation": 2,
            "first_step": 6,
            "last_step": 8,
            "after_generation": 1,
            "ranks": 4,
        }

    def test_a_run_that_goes_on(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        fd = lock.acquire(folder.lock)
        try:
            assert main(["verify", "a-run"]) == 0
        finally:
            os.close(fd)
        assert "the run is active" in capsys.readouterr().out
        assert not list(folder.checkpoints.glob("*/verified"))  # nothing is written beside what it works on

    def test_a_run_of_which_nothing_was_done(
        self, tmp_path: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        empty = RunFolder(tmp_path / "runs" / "empty")
        empty.control.mkdir(parents=True)
        (empty.control / "lock").touch()
        empty.job_toml.write_text(f"[train]\nglobal_batch = {BATCH}\n")
        assert main(["verify", "empty"]) == 1
        out, err = capsys.readouterr()
        assert plain(out) == ["  ledger       empty: no step was done", "  result       not verified"]
        assert err.startswith("error: no step was done, so nothing is proven\n  hint: ")
        assert main(["verify", "empty", "--ledger", "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["ok"], told["ledger"]["verdict"]) == (False, "empty")


class TestACheckpoint:
    def test_by_its_folder(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "runs/a-run/checkpoints/step-00000008"]) == 0
        assert plain(capsys.readouterr().out) == [
            "  checkpoint   runs/a-run/checkpoints/step-00000008: verified, step 8, SIZE in 1 file",
            "  result       verified",
        ]

    def test_a_copy_under_another_name(
        self, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.copytree(folder.checkpoints / "step-00000008", tmp_path / "the-good-one")
        assert main(["verify", "the-good-one"]) == 0
        assert "the-good-one: verified, step 8" in capsys.readouterr().out
        (tmp_path / "the-good-one" / "rank-00000.safetensors").unlink()
        assert main(["verify", "the-good-one"]) == 1
        assert "the-good-one/rank-00000.safetensors is missing" in capsys.readouterr().out

    def test_all_in_a_folder(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "runs/a-run/checkpoints", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["ledger"] is None
        assert [c["step"] for c in document["checkpoints"]] == [8, 5]

    def test_without_its_manifest(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        (folder.checkpoints / "step-00000008" / "manifest.json").unlink()
        assert main(["verify", "runs/a-run/checkpoints/step-00000008"]) == 1
        assert "manifest.json is missing: this checkpoint is not complete" in capsys.readouterr().out

    def test_every_damaged_file_is_named(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        checkpoint = folder.checkpoints / "step-00000008"
        damage(checkpoint)
        assert main(["verify", str(checkpoint), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["checkpoints"][0]
        assert found["state"] == "damaged"
        assert len(found["problems"]) == 1
        assert "rank-00000.safetensors (rank 0) has XXH3-128" in found["problems"][0]

    def test_nothing_there(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "a-rum"]) == 2
        assert "did you mean runs/a-run?" in capsys.readouterr().err
        assert main(["verify", "runs/a-run/checkpoints/step-00000008", "--ledger"]) == 2
        assert "is not a run, so it has no ledger" in capsys.readouterr().err


class TestTheList:
    def test_it_reports_what_is_known(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        damage(folder.checkpoints / "step-00000005")
        aside = folder.checkpoints / "step-00000004.damaged"
        shutil.copytree(folder.checkpoints / "step-00000005", aside)
        assert main(["checkpoints", "a-run"]) == 0
        out, err = capsys.readouterr()
        assert plain(out) == [
            "step  size       ranks  state         age        where",
            "8     SIZE  2      not verified  AGE  runs/a-run/checkpoints/step-00000008",
            "5     SIZE  2      not verified  AGE  runs/a-run/checkpoints/step-00000005",
            "-     -          -      quarantined   -          runs/a-run/checkpoints/step-00000004.damaged",
        ]
        assert err == ""
        assert main(["checkpoints", "a-run", "--verify"]) == 1
        out, err = capsys.readouterr()
        assert [line.split("SIZE")[-1].split()[1] for line in plain(out)[1:3]] == ["verified", "damaged"]
        assert err.startswith("damaged: runs/a-run/checkpoints/step-00000005/rank-00000.safetensors")
        # It is known from now on.
        assert main(["checkpoints", "a-run"]) == 0
        states = [line.split("SIZE")[-1].split()[1] for line in plain(capsys.readouterr().out)[1:3]]
        assert states == ["verified", "not"]

    def test_json_with_a_fallback(
        self, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with folder.job_toml.open("a") as f:
            f.write(f'[checkpoint]\nfallback = "{tmp_path}/spare"\n')
        add_checkpoint(tmp_path / "spare" / "a-run", 6, 2)
        assert main(["checkpoints", "a-run", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["schema_version"] == 1
        assert [(c["step"], c["place"]) for c in document["checkpoints"]] == [
            (8, "main"),
            (6, "fallback"),
            (5, "main"),
        ]
        assert document["checkpoints"][1]["where"] == f"{tmp_path}/spare/a-run/step-00000006"
        assert document["checkpoints"][0]["bytes"] > 1 << 16
        assert 60 <= document["checkpoints"][0]["age_s"] < 600
        assert document["checkpoints"][0]["progress"]["next_sample"] == 32

    def test_none(self, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.rmtree(folder.checkpoints)
        assert main(["checkpoints", "a-run"]) == 0
        assert capsys.readouterr().out == "runs/a-run has no complete checkpoint yet\n"
        assert main(["checkpoints", "nothing"]) == 2

    def test_one_without_a_readable_manifest_is_damaged_also_unread(
        self, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder.checkpoints / "step-00000008" / "manifest.json").write_text("{}")
        assert main(["checkpoints", "a-run"]) == 1
        assert "damaged: " in capsys.readouterr().err
