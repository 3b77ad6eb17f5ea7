"""Runs on a blend, with attention that ends with the document: the same in every layout, and after a stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ONE_NODE, Run, records, seatrial
from seatrial.data.prepare import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

ONE_PROCESS = ["--set", "cluster.nodes=1", "--set", "cluster.gpus_per_node=1"]
ONE_PROCESS += ["--set", "parallel.tensor=1", "--set", "parallel.pipeline=1"]
LOSS = 1e-4  # relative


@pytest.fixture
def blended(folder: Path, tmp_path: Path) -> Path:
    """The small job on a store that was made beforehand, of very short documents, and on text."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(f'{{"text": "x = {n}"}}' for n in range(4000)))
    prepare([str(lines)], "bytes", tmp_path / "store", shard_tokens=5000)
    text = ONE_NODE.replace('train = "corpus"', 'train = ["corpus", "store"]\nweights = [0.7, 0.3]')
    (folder / "job.toml").write_text(text)
    return folder


def losses(folder: Path) -> list[float]:
    found = {r["step"]: r["loss"] for r in records(folder / "runs/small/metrics.jsonl")}
    assert sorted(found) == list(range(1, 13))
    return [found[step] for step in sorted(found)]


@pytest.mark.long  # with documents: test_parity
def test_a_layout_trains_on_the_same_documents_as_one_process(
    blended: Path, start: Callable[..., Run]
) -> None:
    apart = ["--set", "data.attend_across_documents=false"]
    histories = {}
    for name, arguments in {
        "layout": apart,
        "one": [*apart, *ONE_PROCESS],
        "across": ONE_PROCESS,
    }.items():
        code, _, err = start("--fresh", *arguments).wait()
        assert code == 0, err
        histories[name] = losses(blended)
    assert histories["layout"] == pytest.approx(histories["one"], rel=LOSS)
    assert histories["across"] != pytest.approx(histories["one"], rel=10 * LOSS)


def test_a_killed_run_goes_on_with_the_same_samples(blended: Path, start: Callable[..., Run]) -> None:
    apart = ["--set", "data.attend_across_documents=false"]
    code, _, err = start(*apart).wait()
    assert code == 0, err
    undisturbed = losses(blended)
    run = start("--fresh", *apart)
    run.wait_line("step   4/12")
    for pid in run.ranks().values():
        os.kill(pid, signal.SIGKILL)
    code, _, err = run.wait()
    assert code == 0, err
    assert losses(blended) == undisturbed


def test_the_stores_of_a_live_run_are_not_replaced(blended: Path, start: Callable[..., Run]) -> None:
    run = start("--set", "train.steps=500")
    run.wait_line("step   1/500")
    again = ("data", "prepare", "lines.jsonl", "--force", "--out")
    before = (blended / "store" / "manifest.json").read_bytes()
    (blended / "lines.jsonl").write_text('{"text": "other data"}\n' * 4000)
    refused = seatrial(blended, *again, "store")
    assert refused.returncode == 1
    assert f"store is in use by the run {blended}/runs/small (process {run.process.pid})" in refused.stderr
    (own,) = (p for p in (blended / "runs" / ".data").glob("corpus-*") if p.is_dir())
    assert seatrial(blended, *again, str(own)).returncode == 1
    # Nor by another run that finds it damaged.
    shard = own / "shard-00000.bin"
    shard.write_bytes(content := shard.read_bytes() + b"x")
    second = seatrial(blended, "train", "job.toml", "--set", "name=second", "--plain")
    assert second.returncode == 1
    assert "runs/small" in second.stderr
    assert shard.read_bytes() == content
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.wait_gone(within_s=30)
    assert (blended / "store" / "manifest.json").read_bytes() == before
    assert seatrial(blended, *again, "store").returncode == 0
