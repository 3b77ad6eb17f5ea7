"""`seatrial export` on real checkpoints in a made-up run folder."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from model_cases import ARCHITECTURES, random_tensors, same_bytes

from saving import new_manifest, save_whole
from seatrial.base.box import Box
from seatrial.base.errors import InputError, RunFailed
from seatrial.checkpoint.manifest import Progress
from seatrial.cli import export
from seatrial.model.hf import HuggingFaceWeights

ARCH = ARCHITECTURES["qwen2-gqa2-tied"]


def _add_checkpoint(run: Path, step: int) -> Path:
    manifest = new_manifest(Progress(step, step, step, 1), architecture=ARCH.as_dict())
    tensors = {f"model/{name}": t for name, t in random_tensors(ARCH, seed=step).items()}
    return save_whole(run / "checkpoints", manifest, tensors)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (run / "job.toml").write_text('[data]\ntokenizer = "bytes"\n')
    _add_checkpoint(run, 5)
    _add_checkpoint(run, 10)
    return run


def _export(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(a) for a in arguments]))


def _holds(folder: Path, step: int) -> bool:
    weights = HuggingFaceWeights(folder)
    weights.check(ARCH)
    return all(
        same_bytes(weights.read(name, Box.whole(t.shape), torch.float32), t)
        for name, t in random_tensors(ARCH, seed=step).items()
    )


def test_the_newest_checkpoint_of_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _export(run, "--out", tmp_path / "out") == 0
    assert _holds(tmp_path / "out", 10)
    out, err = capsys.readouterr()
    assert "(step 10)" in out
    assert "tokenizer   none: the run was trained on bytes" in out
    assert err == ""


def test_one_checkpoint_as_json_in_shards(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    (run / "job.toml").write_text(f'[data]\ntokenizer = "{tokenizer}"\n')
    step = run / "checkpoints" / "step-00000005"
    assert _export(step, "--out", tmp_path / "out", "--max-shard", "50kB", "--json") == 0
    assert _holds(tmp_path / "out", 5)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["schema_version"] == 1
    assert summary["step"] == 5
    assert summary["dtype"] == "float32"
    assert summary["parameters"] == ARCH.parameters()
    assert summary["tokenizer"] == str(tokenizer)
    assert len(err.splitlines()) == len(summary["files"]) - 1  # progress


def test_a_chosen_step(run: Path, tmp_path: Path) -> None:
    assert _export(run, "--step", "5", "--out", tmp_path / "out") == 0
    assert _holds(tmp_path / "out", 5)
    with pytest.raises(InputError, match="no checkpoint of step 7") as caught:
        _export(run, "--step", "7", "--out", tmp_path / "other")
    assert "there are: 5, 10" in caught.value.render()
    with pytest.raises(InputError, match="is one checkpoint"):
        _export(run / "checkpoints" / "step-00000005", "--step", "5", "--out", tmp_path / "other")


def test_a_newer_checkpoint_in_the_fallback_is_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "job.toml").open("a") as f:
        f.write(f'[checkpoint]\nfallback = "{tmp_path}/spare"\n')
    # A run's name is its folder's, where its job.toml does not tell.
    spare = tmp_path / "spare" / "first"
    spare.mkdir(parents=True)
    _add_checkpoint(spare, 12)
    (spare / "checkpoints" / "step-00000012").rename(spare / "step-00000012")
    assert _export(run, "--out", tmp_path / "out") == 0
    assert _holds(tmp_path / "out", 12)
    assert "spare/first/step-00000012 (step 12)" in capsys.readouterr().out


def test_a_given_tokenizer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    shutil.copytree(run / "checkpoints" / "step-00000005", tmp_path / "copy")
    assert _export(tmp_path / "copy", "--out", tmp_path / "plain") == 0
    assert "none: the checkpoint is in no run folder" in capsys.readouterr().out
    assert _export(tmp_path / "copy", "--tokenizer", tokenizer, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_bfloat16(run: Path, tmp_path: Path) -> None:
    assert _export(run, "--out", tmp_path / "out", "--dtype", "bfloat16") == 0
    weights = HuggingFaceWeights(tmp_path / "out")
    assert {weights.dtype(name) for name in weights.names()} == {torch.bfloat16}


def test_a_missing_tokenizer_is_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "job.toml").write_text('[data]\ntokenizer = "/nowhere/tokenizer.json"\n')
    assert _export(run, "--out", tmp_path / "out") == 0
    assert "not copied: /nowhere/tokenizer.json" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-00000010"
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunFailed, match="is damaged"):
        _export(newest, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunFailed, match=r"the newest checkpoint, .* is damaged"):
        _export(run, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert _export(run, "--allow-older", "--out", tmp_path / "out") == 0
    assert _holds(tmp_path / "out", 5)
    assert "damaged: " in capsys.readouterr().err


def test_nothing_to_export(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        _export(tmp_path / "runs" / "frist", "--out", tmp_path / "out")
    for step in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(step)
    with pytest.raises(InputError, match="no complete checkpoint"):
        _export(run, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("200", 200), ("7kb", 7000)]
)
def test_sizes(text: str, size: int) -> None:
    assert export._size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        export._size(text)
