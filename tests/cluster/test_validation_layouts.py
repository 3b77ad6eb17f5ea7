"""The validation loss: equal in every layout, equal to a plain computation, and of no effect on the training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F
from parity_ranks import ARCH, LENGTH
from validation_ranks import EVERY, SAMPLES, SEED, STEPS

from conftest import each_case, records, run_cases, selected_cases
from seatrial.checkpoint.manifest import named
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.data.order import sample_index
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter
from seatrial.model.generate import load_whole
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import account
from seatrial.record.metrics import read_metrics
from seatrial.record.stages import STAGES, VALIDATION, read_generation

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

SHARED = (
    "tp2",
    "pp2",
    "fsdp2",
    "tp2-pp2-fsdp2",
    "pp2-interleaved",
    "pp2-zero-bubble",
    "replicate2-fsdp2",
    "pp4",
)
LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: parity.LAYOUTS[name] for name in SHARED},
    "replicate2": {"replicate": 2},
    "pp2-gpipe-fsdp2": {"pipeline": 2, "schedule": "gpipe", "shard": 2},
    "tp2-cp2": {"tensor": 2, "shard": 2, "context": 2},
}
PACKED = {"full": parity.FULL, "tp2-cp2": LAYOUTS["tp2-cp2"]}  # see test_packed_documents
LONG = ("pp2-gpipe-fsdp2", "replicate2-fsdp2", "pp4", "pp2-interleaved")


def write_store(folder: Path, documents: int, seed: int, *, masked: bool = False) -> str:
    generator = np.random.default_rng(seed)
    with StoreWriter(folder, ByteTokenizer()) as writer:
        for _ in range(documents):
            start, stride, length = generator.integers((0, 1, 30), (257, 5, 200))
            counted = generator.random(length) < generator.random() ** 3 if masked else None
            writer.append((start + stride * np.arange(length)) % 257, np.array([0]), counted)
        writer.finish({})
    return str(folder)


@pytest.fixture(scope="module")
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("validation")
    stores = [write_store(out / "training", 60, 1), write_store(out / "other", 40, 2)]
    wanted = selected_cases(request)
    common = {"tied": True, "root": str(out), "stores": stores}
    masked = {**common, "stores": [stores[0], write_store(out / "masked", 40, 3, masked=True)]}
    cases = [
        {"name": "one", "layout": {}, **common},
        {"name": "one-documents", "layout": {}, "documents": True, **common},
        {"name": "full-documents", "layout": parity.FULL, "documents": True, **common},
        *(
            {"name": f"{n}-packed", "layout": at, "documents": True, "packed": True, **common}
            for n, at in PACKED.items()
        ),
        {"name": "one-experts", "layout": {}, "family": "qwen3_moe", **common},
        {"name": "ep2-experts", "layout": {"shard": 4, "expert": 2}, "family": "qwen3_moe", **common},
        {"name": "one-masked", "layout": {}, **masked},
        {"name": "full-masked", "layout": parity.FULL, **masked},
        {"name": "cp2-masked", "layout": LAYOUTS["tp2-cp2"], **masked},
        *({"name": n, "layout": at, **common} for n, at in LAYOUTS.items() if n not in LONG or n in wanted),
        *(
            {"name": f"{n}-without", "layout": LAYOUTS[n], "validates": False, **common}
            for n in ("tp2-pp2-fsdp2", "pp2-zero-bubble")
        ),
    ]
    done = run_cases(cases, out, timeout_s=240, script="validation_ranks.py")
    assert done.returncode == 0, done.stderr
    return out


def losses(out: Path, name: str) -> dict[int, float]:
    found, problems = read_metrics(RunFolder(out / name))
    assert not problems
    assert [r.step for r in found] == list(range(1, STEPS + 1))
    return {r.step: r.validation_loss for r in found if r.validation_loss is not None}


@each_case(LAYOUTS, long=LONG)
def test_a_layout_measures_the_loss_of_one_process(name: str, out: Path) -> None:
    found, one = losses(out, name), losses(out, "one")
    assert found.keys() == one.keys() == {EVERY, STEPS}
    print(name, {step: abs(found[step] - one[step]) for step in one})  # pytest -rP shows it
    assert found == pytest.approx(one, abs=1e-5, rel=0)
    assert one[EVERY] - one[STEPS] > 1e-3, "what does not change can tell nothing apart"


def test_experts_of_other_ranks_take_part(out: Path) -> None:
    one, divided = losses(out, "one-experts"), losses(out, "ep2-experts")
    assert divided == pytest.approx(one, abs=1e-5, rel=0)
    assert abs(one[STEPS] - losses(out, "one")[STEPS]) > 1e-3


@pytest.mark.parametrize("name", ["full-documents", *(f"{n}-packed" for n in PACKED)])
def test_documents_are_masked_as_in_training(name: str, out: Path) -> None:
    one = losses(out, "one-documents")
    assert losses(out, name) == pytest.approx(one, abs=1e-5, rel=0)
    assert abs(one[STEPS] - losses(out, "one")[STEPS]) > 1e-3


@pytest.mark.parametrize("name", ["full-masked", "cp2-masked"])
def test_targets_that_do_not_count_are_left_out_in_every_layout(name: str, out: Path) -> None:
    one = losses(out, "one-masked")
    assert losses(out, name) == pytest.approx(one, abs=1e-5, rel=0)


@pytest.mark.parametrize(("name", "data"), [("one", "other"), ("one-masked", "masked")])
def test_it_is_the_loss_of_these_samples_plainly_computed(name: str, data: str, out: Path) -> None:
    """The last step's model from its checkpoint, over each sample alone."""
    (folder,) = named(RunFolder(out / name).checkpoints)
    model = load_whole(replace(ARCH, tie_word_embeddings=True), CheckpointWeights(folder))
    store = TokenStore.open(out / data)
    available = (store.n_tokens - 1) // LENGTH
    assert available > SAMPLES
    samples = [sample_index(i, seed=SEED, samples_per_epoch=available)[1] for i in range(SAMPLES)]
    assert len(set(samples)) == SAMPLES
    each, n = [], 0
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(store.read(sample * LENGTH, LENGTH + 1).astype(np.int64))
            counted = torch.from_numpy(store.counted([sample * LENGTH + 1], LENGTH)[0])
            target = tokens[1:].masked_fill(~counted, -100)
            each.append(F.cross_entropy(model(tokens[None, :-1])[0], target, reduction="sum").item())
            n += int(counted.sum())
    assert (n == SAMPLES * LENGTH) == (data == "other")
    assert losses(out, name)[STEPS] == pytest.approx(math.fsum(each) / n, abs=1e-6, rel=0)


@pytest.mark.parametrize("layout", ["tp2-pp2-fsdp2", "pp2-zero-bubble"])
def test_training_is_the_same_to_the_last_bit_without_it(layout: str, out: Path) -> None:
    ranks = sorted(out.glob(f"{layout}.*.pt"))
    assert len(ranks) == len(sorted(out.glob(f"{layout}-without.*.pt"))) > 1
    for path in ranks:
        ours, theirs = (
            torch.load(out / f"{name}{path.name.removeprefix(layout)}", weights_only=True)
            for name in (layout, f"{layout}-without")
        )
        for (name, _, mine), (_, _, other) in zip(ours["weights"], theirs["weights"], strict=True):
            assert torch.equal(mine, other), name
        assert torch.equal(ours["random"], theirs["random"])
    mine, other = (records(out / n / "metrics.jsonl") for n in (layout, f"{layout}-without"))
    for a, b in zip(mine, other, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
    assert saved(out / layout) == saved(out / f"{layout}-without")


def saved(run: Path) -> dict[str, bytes]:
    (folder,) = named(RunFolder(run).checkpoints)
    found = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}
    assert found
    return found


def test_its_time_is_a_stage_of_its_own(out: Path) -> None:
    found, _ = read_generation(RunFolder(out / "tp2-pp2-fsdp2"), 1)
    metrics = {m["step"]: m for m in records(out / "tp2-pp2-fsdp2/metrics.jsonl")}
    took = metrics[EVERY]["validation_time_s"]
    for each in found.values():
        spent = dict(zip(each.steps.tolist(), each.seconds[:, VALIDATION].tolist(), strict=True))
        assert spent.pop(EVERY + 1) == pytest.approx(took, rel=0.2, abs=0.02)
        assert set(spent.values()) == {0.0}
        after = each.seconds[each.steps.tolist().index(EVERY + 1)]
        # No part of the step's time: the other stages of the step add up to it.
        assert after.sum() - after[VALIDATION] == pytest.approx(
            metrics[EVERY + 1]["step_time_s"], rel=0.25, abs=0.05
        )
    whole = account(found, first_step=1)
    assert whole is not None
    assert whole.seconds[STAGES[VALIDATION]] > 0
