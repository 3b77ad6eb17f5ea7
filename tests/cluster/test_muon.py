"""Muon and AdamW over every layout against torch.optim.Muon and torch.optim.AdamW in one process.

With gradients that are given, matrices and momenta have torch's bits; in training, gradients are summed in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dryrun_ranks import job_of
from muon_ranks import SCALE, UPDATES, gradient
from parity import (
    FULL,
    INTERLEAVED,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_same_bits,
    assert_trains_alike,
    run_layouts,
)
from parity_ranks import LR, NoisyWeights, arch_of, torchs_muon
from recovery_runs import (
    RARELY_VERIFIED,
    REPLICAS,
    Begin,
    Trial,
    assert_same,
    beginning,
    make_folder,
    one_node,
)
from test_dryrun import both, peak
from test_dryrun_carried import assert_same_step
from torch import nn

from conftest import run_cases
from seatrial.base.box import Box
from seatrial.job.optimizers import is_hidden_matrix
from seatrial.job.schema import OptimizerSection
from seatrial.model.decoder import whole_shapes
from seatrial.plan.cost.dryrun import dry_run
from seatrial.train.dryrun.trace import at_size

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

MUON = {"name": "muon", "adamw_lr_factor": 0.5}
ORIGINAL = {"name": "muon", "adjust_lr": "original", "nesterov": False, "momentum": 0.9}
GROUPS = [
    {"match": "*norm.weight", "weight_decay": 0.3},
    {"match": "model.layers.[12].*", "lr_factor": 0.6},
    {"match": "*embed_tokens*", "lr_factor": 1.7, "weight_decay": 0.0},
]
GROUPED = {"optimizer": {**MUON, "groups": GROUPS}}
EXPERTS = {"family": "qwen3_moe", "peer": "one-experts"}
UPDATED: dict[str, Case] = {
    "one": {},
    "one-bf16": {"precision": "bf16"},
    "tp2": {"layout": {"tensor": 2}, "optimizer": ORIGINAL},
    "fsdp2": {"layout": {"shard": 2}},
    "fsdp3": {"layout": {"shard": 3}},  # parts of unequal size
    "cp2-fsdp2": {"layout": {"shard": 4, "context": 2}},
    "tp2-fsdp2": {"layout": {"tensor": 2, "shard": 2}},
    "replicate2": {"layout": {"replicate": 2}},
    "replicate2-fsdp2": {"layout": {"replicate": 2, "shard": 2}, "optimizer": ORIGINAL},
    "replicate2-tp2": {"layout": {"replicate": 2, "tensor": 2}},
    "tp2-pp2-fsdp2-tied": {"layout": FULL, "tied": True, **GROUPED},
    "interleaved": {"layout": {**INTERLEAVED, "shard": 2}},
    "one-experts": EXPERTS,
    "tp2-experts": {"layout": {"tensor": 2}, **EXPERTS, "optimizer": ORIGINAL},
    "fsdp3-experts": {"layout": {"shard": 3}, **EXPERTS},
    "replicate2-tp2-experts": {"layout": {"replicate": 2, "tensor": 2}, **EXPERTS},
    "tp2-pp2-fsdp2-experts": {"layout": FULL, **EXPERTS},
    "ep2-tp2-fsdp2-experts": {"layout": {"tensor": 2, "shard": 4, "expert": 2}, **EXPERTS, **GROUPED},
    "ep4-replicate2-experts": {"layout": {"replicate": 2, "shard": 4, "expert": 4}, **EXPERTS},
}
TRAINED: dict[str, Case] = {
    "tp2": {"layout": {"tensor": 2}},
    "fsdp2-sharded": {"layout": {"shard": 2}, "accumulate": "sharded"},
    "cp2-fsdp2": {"layout": {"shard": 4, "context": 2}},
    "replicate2-fsdp2": {"layout": {"replicate": 2, "shard": 2}},
    "tp2-pp2-fsdp2": {"layout": FULL},
    "pp2-zero-bubble": {"layout": ZERO_BUBBLE},
    "tp2-pp2-fsdp2-experts": {"layout": FULL, **EXPERTS},
    "ep2-fsdp2-experts": {"layout": {"shard": 4, "expert": 2}, **EXPERTS},
}
OTHERS: dict[str, Case] = {
    "one": {"oracle": True},
    "one-experts": {"oracle": True, **EXPERTS},
    "tp2-pp2-fsdp2-again": TRAINED["tp2-pp2-fsdp2"],
}
_run = partial(run_layouts, script="muon_ranks.py", timeout_s=400, optimizer=MUON)


@pytest.fixture(scope="module")
def updated(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return _run(request, UPDATED)


@pytest.mark.parametrize("name", UPDATED)
def test_an_update_has_the_bits_of_torchs(name: str, updated: dict[str, Ran]) -> None:
    case = updated[name].case
    arch, source = arch_of(case), NoisyWeights(arch_of(case), seed=1)
    shapes = whole_shapes(arch)
    whole = {n: nn.Parameter(source.read(n, Box.whole(s), torch.float32)) for n, s in shapes.items()}
    before = {n: p.detach().clone() for n, p in whole.items()}
    update = torchs_muon(whole, OptimizerSection(**{"lr": LR, **case["optimizer"]}))
    for step in range(UPDATES):
        for n, p in whole.items():
            p.grad = gradient(n, shapes[n], step)
        update(LR, torch.tensor(SCALE))
    for n, ours, theirs in updated[name].whole("weights", {n: p.detach() for n, p in whole.items()}):
        if is_hidden_matrix(n, shapes[n]):
            assert torch.equal(ours, theirs), n
        elif ours.numel():  # torch's fused AdamW computes the last few of a tensor in another order
            assert (ours - theirs).abs().max() <= 1e-6 * before[n].abs().max(), n
    assert all((p.detach() - before[n]).abs().max() > 1e-4 for n, p in whole.items())
    kinds = {key.partition("/")[::2] for rank in updated[name].ranks for key, _, _ in rank["states"]}
    assert {n for kind, n in kinds if kind == "momentum"} == {
        n for n, s in shapes.items() if is_hidden_matrix(n, s)
    }
    assert {n for kind, n in kinds if kind == "exp_avg"} == {
        n for n, s in shapes.items() if not is_hidden_matrix(n, s)
    }


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return _run(request, OTHERS | TRAINED, steps=4)


@pytest.mark.parametrize("name", TRAINED)
def test_a_layout_trains_as_torch_in_one_process(name: str, trained: dict[str, Ran]) -> None:
    # Sums in another order, rounded to bf16 before and after each product of the iteration; with experts a position may also be
    # sent to another one.
    times = 20 if name.endswith("experts") else 1
    assert_trains_alike(
        trained, name, loss=2e-4 * times, norm=5e-4 * times, worst=3e-3 * times, what="weights"
    )


def test_two_runs_are_equal_to_the_last_bit(trained: dict[str, Ran]) -> None:
    assert_same_bits(trained["tp2-pp2-fsdp2-again"], trained["tp2-pp2-fsdp2"], "weights")


# -- the dry run


TRACED: dict[str, dict[str, Any]] = {
    "one": {"layout": {}, "precision": "fp32", "microbatch": 8},
    "tp2-pp2-fsdp2": {"layout": FULL, "precision": "bf16"},
    "replicate2-fsdp3": {"layout": {"replicate": 2, "shard": 3}, "precision": "bf16", "microbatch": 1},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("traced")
    usual = {"tied": False, "optimizer": MUON, "layers": 4, "only_dry": False}
    cases = [{"name": name, **usual, **case} for name, case in TRACED.items()]
    done = run_cases(cases, out, timeout_s=400, script="dryrun_ranks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("name", TRACED)
def test_the_dry_run_is_the_real_step(name: str, traced: Path) -> None:
    for real, dry in both(traced, name):
        assert dry["bytes"] == real["bytes"]
        assert dry["bytes"]["optimizer"] == real["state"] + real["scalars"]
        assert dry["collectives"] == real["collectives"]
        assert dry["flops"] == real["flops"]
        assert sum(n for phase, kind, n in dry["flops"] if (phase, kind) == ("update", "matmul")) > 0
        assert peak(dry) <= peak(real) <= 1.05 * peak(dry)


def test_a_step_carried_over_is_the_whole_step() -> None:
    """A rank orthogonalises each second matrix: two more layers add the same to it."""
    case = {"layout": {"shard": 2}, "precision": "bf16", "tied": False, "optimizer": MUON}
    job = at_size(job_of(case), 13, 5)
    few, whole = (dry_run(job, processes=2, whole=whole, timeout_s=300) for whole in (False, True))
    for a, b in zip(few.ranks, whole.ranks, strict=True):
        assert len(a.traced) == 4
        assert_same_step(a, b)
    (exchanged,) = [t for t in few.ranks[0].traffic if t.kind == "all-to-all"]
    assert exchanged.calls == 2 * -(-13 * 7 // 2)


# -- whole runs: hit, and compared with one that was not


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


@pytest.mark.timed
@pytest.mark.parametrize(
    ("settings", "source"), [((), ("memory",)), ((*REPLICAS, "train.accumulate=sharded"), ("replica",))]
)
def test_a_killed_rank_resumes_bit_for_bit(
    begin: Begin, tmp_path: Path, settings: tuple[str, ...], source: tuple[str, ...]
) -> None:
    settings = (*settings, *RARELY_VERIFIED, "optimizer.name=muon")
    trial = begin(*settings)
    trial.until_step(9)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert tuple(e["data"]["source"] for e in trial.events("recovered")) == source
    other = Trial(make_folder(tmp_path / "undisturbed"), *settings, *one_node(4))
    code, err = other.end()
    assert code == 0, err
    assert_same(trial, other)
