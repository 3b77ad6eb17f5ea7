"""Which checkpoint `seatrial export` takes, and what the folder that it writes says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from saving import new_manifest, save_whole
from seatrial.checkpoint.manifest import Progress
from seatrial.cli.main import main
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import whole_shapes
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.ui.model_card import origin

ARCH = Architecture(
    family="qwen2",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=16,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
)


def add_checkpoint(place: Path, step: int) -> Path:
    """One whose every weight is the number of its step."""
    told = {"architecture": ARCH.as_dict(), "layout": {"world_size": 1}, "job_sha256": "j", "code": "c"}
    manifest = new_manifest(Progress(step, step * 64, step * 4, 1), **told)
    weights = {f"model/{n}": torch.full(s, float(step)) for n, s in whole_shapes(ARCH).items()}
    return save_whole(place, manifest, weights)


def damage(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Eight steps, of which the third and fourth were left out; checkpoints of 2, 5 and 8."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/a-run"))
    folder.control.mkdir(parents=True)
    folder.lock.touch()
    folder.job_toml.write_text('name = "a-run"\n[train]\nsteps = 8\nglobal_batch = 4\nsequence_length = 16\n')
    ledger = LedgerWriter(folder)
    for n in range(1, 9):
        ledger.write(LedgerRecord(n, n * 4 - 4, n * 4, 1, skipped=n in (3, 4)))
    ledger.close()
    for step in (2, 5, 8):
        add_checkpoint(folder.checkpoints, step)
    return folder


def export(*arguments: str, out: str = "hf") -> int:
    return main(["export", *arguments, "--out", out])


def told(out: str = "hf") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(out, "seatrial.json").read_text())
    return document


def test_export_of_the_newest_states_its_origin(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("a-run") == 0
    assert "checkpoint  runs/a-run/checkpoints/step-00000008 (step 8)" in capsys.readouterr().out
    document = told()
    assert (document["run"], document["step"], document["job_steps"]) == ("a-run", 8, 8)
    assert (document["newest"], document["not_taken"], document["left_out_steps"]) == (True, [], [3, 4])
    assert document["tokens"] == 6 * 64, "those of steps that were left out are not trained on"
    card = Path("hf/README.md").read_text()
    assert "# a-run, step 8 of 8\n" in card
    assert "not trained on: steps 3-4." in card
    assert "newest" not in card
    assert str(Path.cwd()) not in card + json.dumps(document), "it may be published"
    assert origin(Path("hf")) == "step 8 of run a-run"


def test_a_damaged_newest_one_is_not_replaced_by_an_older_one(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder.checkpoints / "step-00000008")
    assert export("a-run") == 1
    assert not Path("hf").exists()
    err = capsys.readouterr().err
    assert "error: the newest checkpoint, runs/a-run/checkpoints/step-00000008, is damaged" in err
    assert (
        "hint: use --step N for another one (there are 5, 2), --allow-older for the newest intact one" in err
    )


def test_unless_allowed_and_then_every_output_reports_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder.checkpoints / "step-00000008")
    assert export("a-run", "--allow-older", "--json") == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["step"], summary["newest"]) == (5, False)
    assert summary["not_taken"] == [{"checkpoint": "step-00000008", "why": "damaged"}]
    assert err.startswith("damaged: runs/a-run/checkpoints/step-00000008: ")
    assert (told()["newest"], told()["not_taken"]) == (False, summary["not_taken"])
    card = Path("hf/README.md").read_text()
    assert (
        "**This is not the newest checkpoint of its run.** Not taken:\n\n- step-00000008: damaged\n" in card
    )
    assert origin(Path("hf")) == "step 5 of run a-run, not its newest checkpoint"
    damage(folder.checkpoints / "step-00000005")
    damage(folder.checkpoints / "step-00000002")
    assert export("a-run", "--allow-older", out="none") == 1
    assert "every checkpoint of the run is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["a-run --step 5", "runs/a-run/checkpoints/step-00000005"])
def test_one_that_was_named_is_not_called_the_newest(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert export(*source.split()) == 0
    assert "note        This is not the newest checkpoint of its run." in capsys.readouterr().out
    assert told()["not_taken"] == [{"checkpoint": "step 8", "why": "step 5 was requested"}]
    assert told()["left_out_steps"] == [3, 4]
    damage(folder.checkpoints / "step-00000005")
    assert export(*source.split(), out="other") == 1
    assert "step-00000005 is damaged" in capsys.readouterr().err


def test_a_checkpoint_by_itself_is_of_an_unknown_run(folder: RunFolder) -> None:
    shutil.copytree(folder.checkpoints / "step-00000005", "copy")
    assert export("copy") == 0
    assert (told()["run"], told()["newest"], told()["left_out_steps"]) == (None, None, None)
    assert origin(Path("hf")) == "step 5 of run unknown"


def test_a_quarantined_checkpoint_is_reported(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.checkpoints / "step-00000008").rename(folder.checkpoints / "step-00000008.damaged")
    assert export("a-run") == 0
    assert "Not taken: step-00000008.damaged: was quarantined" in capsys.readouterr().out
    assert told()["not_taken"] == [{"checkpoint": "step-00000008.damaged", "why": "was quarantined"}]


def test_a_copy_of_the_same_step_is_not_an_older_one(folder: RunFolder, tmp_path: Path) -> None:
    with folder.job_toml.open("a") as f:
        f.write(f'[checkpoint]\nfallback = "{tmp_path}/spare"\n')
    add_checkpoint(tmp_path / "spare" / "a-run", 8)
    damage(folder.checkpoints / "step-00000008")
    assert export("a-run") == 0
    assert (told()["step"], told()["newest"]) == (8, True)
    assert told()["not_taken"] == [{"checkpoint": "step-00000008", "why": "damaged"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a-run", "--step", "5", "--allow-older"], "--step and --allow-older are mutually exclusive"),
        (["a-run", "--step", "6"], "has no checkpoint of step 6"),
        (["runs/a-run/checkpoints/step-00000005", "--allow-older"], "is one checkpoint"),
    ],
)
def test_bad_choices(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert export(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b'{"step": "x"}', b"[" * 100_000])
def test_an_origin_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "seatrial.json").write_bytes(content)
    assert origin(tmp_path) is None
