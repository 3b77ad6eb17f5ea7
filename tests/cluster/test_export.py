"""Exports of real runs: transformers computes what the run computed; from an object store; in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from parity_ranks import ARCH

from conftest import ONE_NODE, Run, records, seatrial
from saving import new_manifest, save_whole, unfenced
from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.place import open_place
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.write import Piece
from seatrial.data.loader import BatchLoader
from seatrial.job import load_job
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import Decoder, stored_name, whole_shapes
from seatrial.record.folder import RunFolder
from seatrial.record.run import read_plan
from seatrial.train.rank import make_loader

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

# What a process may need more than one that exports next to nothing: chunks read ahead and kept, one block read and one
# written. It does not depend on the model's size.
BOUND_BYTES = 300 << 20

MEASURED = """
import sys
from seatrial.cli.main import main
code = main(sys.argv[1:])
with open("/proc/self/status") as f:
    print([line for line in f if line.startswith("VmHWM")][0].split()[1], file=sys.stderr)
sys.exit(code)
"""


def test_transformers_computes_what_the_run_computed(folder: Path, start: Callable[..., Run]) -> None:
    """The loss of the step after a checkpoint, as four ranks recorded it, from its export; and our model's logits."""
    transformers = pytest.importorskip("transformers")
    (folder / "job.toml").write_text(ONE_NODE)
    code, _, err = start().wait()
    assert code == 0, err
    listed = json.loads(seatrial(folder, "checkpoints", "runs/small", "--json").stdout)["checkpoints"]
    # A save may come too early for the one before, so which ones there are is not known beforehand.
    step = next(c["step"] for c in listed if c["step"] < 12)
    done = seatrial(folder, "export", "runs/small", "--step", str(step), "--out", "hf")
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    run = RunFolder(folder / "runs" / "small")
    job = load_job(run.job_toml)
    loader: BatchLoader = make_loader(job, run, read_plan(run))
    ids_BT, target_BT = loader.batch(step + 1, 0, job.train.global_batch)[:2]
    with torch.no_grad():
        logits_BTV = theirs(input_ids=ids_BT.long()).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.long().flatten())
    recorded = next(m["loss"] for m in records(run.metrics) if m["step"] == step + 1)
    assert abs(float(loss) - recorded) < 1e-5 * recorded

    weights = CheckpointWeights(run.checkpoints / f"step-{step:08d}")
    ours = Decoder(weights.arch)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(weights.read(stored_name(name, weights.arch), Box.whole(p.shape), p.dtype))
        assert torch.allclose(ours(ids_BT.long()), logits_BTV, atol=2e-5, rtol=1e-4)
    weights.close()


@pytest.mark.long  # reading from one: test_s3_checkpoints
def test_from_an_object_store(tmp_path: Path, s3_url: str) -> None:
    """One that was uploaded there, and a run whose checkpoints are all there."""
    arch = replace(ARCH, num_hidden_layers=1)
    values = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        for name, shape in whole_shapes(arch).items()
    }
    save_weights(f"{s3_url}/runs/cloud", arch, values, step=7)
    checkpoint = f"{s3_url}/runs/cloud/step-00000007"
    for source, out in ((checkpoint, "one"), ("runs/cloud", "run")):
        if out == "run":
            run = RunFolder(tmp_path / "runs" / "cloud")
            run.control.mkdir(parents=True)
            run.lock.touch()
            run.job_toml.write_text(f'name = "cloud"\n[checkpoint]\nfolder = "{s3_url}/runs"\n')
        done = seatrial(tmp_path, "export", source, "--out", out, "--json")
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["checkpoint"], summary["step"]) == (checkpoint, 7)
        stored = tensors(tmp_path / out)
        assert all(torch.equal(stored[name], tensor) for name, tensor in values.items())
    done = seatrial(tmp_path, "verify", checkpoint, "--json")
    assert done.returncode == 0, done.stderr
    assert [c["state"] for c in json.loads(done.stdout)["checkpoints"]] == ["verified"]
    done = seatrial(tmp_path, "checkpoints", "runs/cloud", "--json")
    assert [c["where"] for c in json.loads(done.stdout)["checkpoints"]] == [checkpoint]
    assert seatrial(tmp_path, "verify", f"{s3_url}/runs/cloud/step-00000008").returncode == 2
    # A place that is out of reach is told, and what is elsewhere is listed and taken all the same.
    run.job_toml.write_text(
        f'name = "cloud"\n[checkpoint]\nfolder = "{s3_url}-gone/runs"\nfallback = "{s3_url}/runs"\n'
    )
    done = seatrial(tmp_path, "checkpoints", "runs/cloud", "--json")
    assert done.returncode == 1
    assert [(c["where"], c["place"]) for c in json.loads(done.stdout)["checkpoints"]] == [
        (checkpoint, "fallback")
    ]
    assert f"{s3_url}-gone/runs/cloud" in done.stderr
    done = seatrial(tmp_path, "export", "runs/cloud", "--out", "fallback")
    assert done.returncode == 1, "the newest may be where nobody can look"
    assert "its newest checkpoint is unknown" in done.stderr
    done = seatrial(tmp_path, "export", "runs/cloud", "--out", "fallback", "--allow-older")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "fallback" / "seatrial.json").read_text())
    assert (told["step"], told["newest"]) == (7, None)
    assert told["not_taken"] == [
        {"checkpoint": "a location of the run's checkpoints", "why": "did not answer"}
    ]
    done = seatrial(tmp_path, "verify", "runs/cloud")
    assert done.returncode == 1
    assert f"{checkpoint}: verified, step 7" in done.stdout
    assert f"{s3_url}-gone/runs/cloud" in done.stdout


@pytest.mark.long  # a measurement
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """1 GiB of weights in files of half that, through less memory than one of them."""
    small = replace(ARCH, num_hidden_layers=1)
    large = replace(small, vocab_size=131072, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8)
    peaks = {}
    for name, arch in (("small", small), ("large", large)):
        # Zeros take no memory before they are written, and one value of each tensor must come through.
        values = {n: torch.zeros(shape) for n, shape in whole_shapes(arch).items()}
        for n, tensor in values.items():
            tensor.view(-1)[-1] = len(n)
        save_weights(str(tmp_path / name), arch, values, step=1)
        out = tmp_path / f"{name}-hf"
        arguments = [
            "export",
            str(tmp_path / name / "step-00000001"),
            "--out",
            str(out),
            "--max-shard",
            "600MB",
        ]
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks[name] = int(done.stderr.splitlines()[-1]) << 10
        weights = sum(p.stat().st_size for p in out.glob("*.safetensors"))
        assert weights >= 4 * arch.parameters()
        stored = tensors(out)
        assert all(float(stored[n].view(-1)[-1]) == len(n) for n in values)
        del stored, values
    assert weights > 1 << 30
    assert peaks["large"] - peaks["small"] < BOUND_BYTES, peaks


def save_weights(place: str, arch: Architecture, values: dict[str, torch.Tensor], step: int) -> None:
    """A checkpoint of one rank that holds only weights."""
    manifest = new_manifest(Progress(step, 0, 0, 1), architecture=arch.as_dict(), layout={"world_size": 1})
    weights = {f"model/{n}": t for n, t in values.items()}
    if "://" not in place:
        save_whole(Path(place), manifest, weights)
        return
    data = safetensors.torch.save(weights)
    pieces = [Piece(key, t, Box.whole(t.shape), tuple(t.shape)) for key, t in weights.items()]
    fd = os.memfd_create("part")
    os.write(fd, data)
    store = open_place(place)
    store.put_part(step, 1, 0, fd, len(data), {"pieces": [p.to_index() for p in pieces]}, read_back=True)
    store.commit(step, 1, manifest, 1, unfenced)
    os.close(fd)


def tensors(folder: Path) -> dict[str, Any]:
    """Mapped, so that this process needs no memory for them either."""
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    return found
