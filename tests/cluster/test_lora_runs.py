"""LoRA: the adapters train alike in every layout; a killed run resumes bit for bit, and its export is what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity import (
    BF16,
    FULL,
    GRADIENT_OF_LARGEST,
    INTERLEAVED,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_trains_alike,
    compare,
    errors,
    run_layouts,
)
from recovery_runs import STEPS, Begin, Trial, assert_same, beginning, lines, make_folder, one_node

from conftest import each_case, seatrial
from seatrial.base.box import Box
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.job import load_job
from seatrial.job.lora import LORA_TARGETS
from seatrial.model.generate import load_whole
from seatrial.model.hf import HuggingFaceWeights
from seatrial.model.hf_write import write_huggingface
from seatrial.model.initialise import RandomWeights

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

ALL = {"rank": 4, "alpha": 8.0, "targets": LORA_TARGETS}
# Of a projection group some, of another none; nothing before `v_proj` needs a gradient in the first layer.
SOME = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["v_proj", "down_proj"]}, "peer": "one-some"}
LATE = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["up_proj"]}, "peer": "one-late"}
TP2 = {"layout": {"tensor": 2}}
CASES: dict[str, Case] = {
    "tp2": TP2,
    "fsdp2": {"layout": {"shard": 2}},
    "pp2": {"layout": {"pipeline": 2}},
    "tp2-some": {**TP2, **SOME},
    "tp2-pp2-fsdp2": {"layout": FULL},
    "tp2-pp2-fsdp2-tied-some": {"layout": FULL, **SOME, "tied": True, "peer": "one-tied-some"},
    "tp2-pp2-fsdp2-late": {"layout": FULL, **LATE},
    "tp2-pp2-fsdp2-sharded-recompute": {"layout": FULL, "accumulate": "sharded", **RECOMPUTE},
    "tp2-async-selective": {**TP2, "async_tensor": True, **SELECTIVE},
    "tp2-async-late": {**TP2, "async_tensor": True, **LATE},
    "tp2-fsdp2-compiled": {"layout": {"tensor": 2, "shard": 2}, "compile": True},
    "fsdp2-compiled-some": {"layout": {"shard": 2}, "compile": True, **SOME},
    "replicate2-fsdp2-sharded": {"layout": {"replicate": 2, "shard": 2}, "accumulate": "sharded"},
    "fsdp8": {"layout": {"shard": 8}},  # more ranks than rows of A: some hold none of it
    "cp2-tp2": {"layout": {"tensor": 2, "shard": 2, "context": 2}},
    "pp2-interleaved": {"layout": INTERLEAVED},
    "pp2-zero-bubble-fsdp2": {"layout": {**ZERO_BUBBLE, "shard": 2}, "reshard_after_forward": False},
    "tp2-pp2-zero-bubble-some": {"layout": {**ZERO_BUBBLE, "tensor": 2}, **SOME},
    "pp2-zero-bubble-late-recompute": {"layout": ZERO_BUBBLE, **LATE, **RECOMPUTE},
    "one-selective": SELECTIVE,
}
# Each part of these is in another one too.
_LONG = {
    *("tp2", "fsdp2", "pp2", "tp2-some", "tp2-pp2-fsdp2", "tp2-pp2-fsdp2-late", "tp2-async-late", "cp2-tp2"),
    *("tp2-fsdp2-compiled", "replicate2-fsdp2-sharded", "tp2-pp2-zero-bubble-some", "one-selective"),
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-some": SOME,
    "one-tied-some": {**SOME, "tied": True},
    "one-late": LATE,
    "one-moments": {"optimizer": {"name": "adamw_bf16"}},
    "one-bf16": {"precision": "bf16"},
    "bf16": {"precision": "bf16", "layout": FULL, "peer": "one-bf16"},
    "sabotaged": {**TP2, "sabotage": "norm gradients not summed", "steps": 1},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | CASES, optional=CASES, steps=3, lora=ALL)


@each_case(CASES, long=_LONG)
def test_a_layout_trains_adapters_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


def test_only_adapters_are_trained(runs: dict[str, Ran]) -> None:
    (rank,) = runs["one"].ranks
    assert len(rank["gradients"]) == 4 * 7 * 2
    assert all(".lora_" in name for name, _, _ in rank["gradients"])
    other = runs["one-moments"].tensors("weights")
    for name, _, values in rank["weights"]:  # by two optimizers: equal are those that neither changed
        assert torch.equal(values, other[name]) != (".lora_" in name), name


def test_bf16_trains_alike(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "bf16", **BF16)
    assert 0 < compare(runs, "one-bf16").loss < 0.05


def test_a_lost_sum_over_tensor_ranks_is_seen(runs: dict[str, Ran]) -> None:
    """Of column-cut layers A, of row-cut ones B: each rank's gradient is of its own positions."""
    found = errors(runs["sabotaged"], runs["one"])
    wrong = {name.split(".", 3)[3] for name, error in found.items() if error > 100 * GRADIENT_OF_LARGEST}
    row = ("self_attn.o_proj", "mlp.down_proj")
    column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert wrong == {f"{n}.lora_B.weight" for n in row} | {f"{n}.lora_A.weight" for n in column}


# -- whole runs: from a Hugging Face base, killed, in another layout, exported


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the small job's model."""
    folder = make_folder(tmp_path_factory.mktemp("base") / "job")
    arch = load_job(folder / "job.toml").architecture
    write_huggingface(RandomWeights(arch, seed=3), arch, folder / "hf")
    return folder / "hf"


def _settings(base: Path, *more: str) -> tuple[str, ...]:
    return (f"model.init_from={base}", "model.lora={rank=4, alpha=8.0}", *more)


@pytest.fixture(scope="module")
def whole_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """One that never failed."""
    folder = make_folder(tmp_path_factory.mktemp("undisturbed") / "job")
    trial = Trial(folder, *_settings(base, *one_node(4)))
    code, err = trial.end()
    assert code == 0, err
    return trial


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


def test_a_killed_rank_resumes_bit_for_bit(begin: Begin, base: Path, whole_run: Trial) -> None:
    trial = begin(*_settings(base))
    trial.until_step(7)
    trial.kill_rank(3)
    code, err = trial.end()
    assert code == 0, err
    assert [e["data"]["source"] for e in trial.events("recovered")] == ["memory"]
    assert_same(trial, whole_run)


def test_another_layout_continues_from_the_checkpoint(begin: Begin, base: Path, whole_run: Trial) -> None:
    first = begin(*_settings(base, *one_node(4), "train.steps=8"))
    code, err = first.end()
    assert code == 0, err
    other = ("parallel.pipeline=1", "parallel.shard=4", "parallel.tensor=1", "train.microbatch=1")
    second = begin(*_settings(base, *one_node(4), *other))
    code, err = second.end()
    assert code == 0, err
    assert "resumed" in second.kinds()
    ours, theirs = second.steps(), whole_run.steps()
    assert max(ours) == STEPS
    for step, (loss, norm) in theirs.items():
        assert abs(ours[step][0] - loss) < 1e-5
        assert abs(ours[step][1] - norm) < 5e-5 * norm
    assert theirs[1][0] - theirs[STEPS][0] > 0.1, "it must have learned something"


def test_a_checkpoint_has_no_state_of_frozen_weights(base: Path, whole_run: Trial) -> None:
    folder = whole_run.run / "checkpoints" / f"step-{STEPS:08d}"
    checkpoint, weights = CheckpointWeights(folder), HuggingFaceWeights(base)
    names = {key.partition("/")[0]: set[str]() for key in checkpoint.manifest.tensors}
    for key in checkpoint.manifest.tensors:
        names[key.partition("/")[0]].add(key.partition("/")[2])
    assert names["exp_avg"] == names["exp_avg_sq"] == {n for n in names["model"] if ".lora_" in n}
    assert len(names["exp_avg"]) == 2 * 7 * 2
    for name in weights.names():
        box = Box.whole(weights.shape(name))
        assert torch.equal(checkpoint.read(name, box, torch.float32), weights.read(name, box, torch.float32))
    checkpoint.close()


def test_exports_compute_what_was_trained(base: Path, whole_run: Trial) -> None:
    """Merged in fp32: logits differ by at most 1e-5 of the largest."""
    checkpoint = CheckpointWeights(whole_run.run / "checkpoints" / f"step-{STEPS:08d}")
    arch = checkpoint.arch
    done = seatrial(whole_run.folder, "export", "runs/small", "--out", "merged")
    assert done.returncode == 0, done.stderr
    assert "with LoRA of rank 4" in done.stdout
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        trained = load_whole(arch, checkpoint)(ids)
        merged = load_whole(arch.base, HuggingFaceWeights(whole_run.folder / "merged"))(ids)
        before = load_whole(arch.base, HuggingFaceWeights(base))(ids)
    assert (trained - merged).abs().max() < 1e-5 * trained.abs().max()
    assert (trained - before).abs().max() > 0.01 * trained.abs().max()
    done = seatrial(whole_run.folder, "export", "runs/small", "--adapter", "--out", "adapter", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["files"] == ["adapter_model.safetensors"]
    assert summary["weights_bytes"] == 4 * arch.trained_parameters()
    assert "library_name: peft" in (whole_run.folder / "adapter" / "README.md").read_text()
    checkpoint.close()


def test_another_rank_is_another_run(base: Path, whole_run: Trial) -> None:
    changed = [word for s in _settings(base, "model.lora.rank=8", *one_node(4)) for word in ("--set", s)]
    done = seatrial(whole_run.folder, "train", "job.toml", "--plain", *changed)
    assert done.returncode == 2
    assert "model.lora.rank" in done.stderr
    assert len(lines(whole_run.run / "metrics.jsonl")) == STEPS
