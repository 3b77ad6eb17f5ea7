"""Who orthogonalises which matrix; and Muon's update in one process against torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import mesh
from torch import Tensor, nn

from seatrial.base.box import Box
from seatrial.job.layout import Layout
from seatrial.job.optimizers import MUON
from seatrial.job.schema import GroupSection, OptimizerSection
from seatrial.parallel.build import Shard
from seatrial.train.muon import ShardedMuon, divide, orthogonalise

SHAPES = [(24, 16), (16, 24), (16, 16), (8, 3, 5), (5, 16)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 9))
def test_every_matrix_is_orthogonalised_once(
    replicate: int, shard: int, tensor: int, pipeline: int, more: int
) -> None:
    layout = Layout(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
    shapes = [*SHAPES, *[(16, 16)] * more]
    seen = [torch.zeros(shape) for shape in shapes]
    rounds = divide(shapes, layout)
    for parts in rounds:
        assert len(parts) == replicate * shard * tensor
        for part in filter(None, parts):
            seen[part.number][part.box.slices()] += 1
            assert part.box.sizes[-2:] == shapes[part.number][-2:], "whole matrices"
    assert all((times == 1).all() for times in seen)
    ranks = replicate * shard * tensor
    assert len(rounds) == 1 + -(-(len(shapes) - 1) // ranks), "no more rounds than needed: one of experts"


def test_a_round_has_matrices_of_one_cost() -> None:
    rounds = divide([(4, 8), (64, 64), (8, 4), (64, 64)], Layout(shard=2))
    assert [[part.number if part else None for part in parts] for parts in rounds] == [[1, 3], [0, 2]]


def shards(values: dict[str, Tensor]) -> list[Shard]:
    found = []
    for name, value in values.items():
        p, shape = nn.Parameter(value.clone()), tuple(value.shape)
        found.append(
            Shard(name, p, p.detach(), Box.whole(shape), shape, 1, first=True, owner=True, counted=True)
        )
    return found


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (9, 8),
        "model.layers.0.self_attn.q_proj.weight": (12, 8),
        "model.layers.0.self_attn.q_proj.bias": (12,),
        "model.layers.0.mlp.down_proj.weight": (8, 20),
        "model.layers.0.mlp.experts.up_proj": (3, 5, 8),
        "lm_head.weight": (9, 8),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def steps(
    optimizer: ShardedMuon, own: list[Shard], seeds: range, scale: Tensor | None = None, lr: float = 1e-2
) -> None:
    for seed in seeds:
        for s, gradient in zip(own, values(seed).values(), strict=True):
            s.parameter.grad = gradient
        optimizer.prepare(scale)
        optimizer.update(lr, scale)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_an_update_is_torchs(nesterov: bool, adjust: str) -> None:
    settings = OptimizerSection(
        name="muon", lr=1e-2, nesterov=nesterov, adjust_lr=adjust, momentum=0.9, adamw_lr_factor=0.1
    )  # type: ignore[arg-type]
    own = shards(values(0))
    steps(ShardedMuon(own, settings, mesh()), own, range(1, 5))
    whole = {name: nn.Parameter(value) for name, value in values(0).items()}
    matrices = [p for n, p in whole.items() if "_proj.weight" in n]
    experts = [nn.Parameter(part) for part in whole["model.layers.0.mlp.experts.up_proj"].detach()]
    muon = torch.optim.Muon(
        matrices + experts, lr=1e-2, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust, weight_decay=0.1
    )
    ends = [whole["model.embed_tokens.weight"], whole["lm_head.weight"]]
    groups = [
        {"params": ends},
        {"params": [whole["model.layers.0.self_attn.q_proj.bias"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(1, 5):
        for p, gradient in zip(whole.values(), values(seed).values(), strict=True):
            p.grad = gradient
        for part, gradient in zip(experts, values(seed)["model.layers.0.mlp.experts.up_proj"], strict=True):
            part.grad = gradient
        muon.step()
        adamw.step()
    for s in own:
        if s.name.endswith("proj.weight") or "experts" in s.name:
            assert torch.equal(s.local, whole[s.name]), s.name
        else:
            torch.testing.assert_close(s.local, whole[s.name].detach(), rtol=1e-6, atol=1e-7)


def test_a_group_trains_as_all_do_with_its_settings() -> None:
    """Matrices and what AdamW updates; the others as without groups."""
    usual = OptimizerSection(name="muon", lr=1e-2, adamw_lr_factor=0.1)
    names = ("*.mlp.*", "*embed*")
    groups = [GroupSection(match=name, lr_factor=0.5, weight_decay=0.7) for name in names]
    runs = []
    for changed, lr in (({"groups": groups}, 1e-2), ({"weight_decay": 0.7}, 5e-3), ({}, 1e-2)):
        own = shards(values(0))
        steps(ShardedMuon(own, usual.model_copy(update=changed), mesh()), own, range(1, 4), lr=lr)
        runs.append(own)
    for grouped, alone, without in zip(*runs, strict=True):
        inside = "mlp" in grouped.name or "embed" in grouped.name
        assert torch.equal(grouped.local, (alone if inside else without).local), grouped.name
        assert not torch.equal(alone.local, without.local)


@pytest.mark.parametrize("scale", [None, float("nan"), 0.0])
def test_refused_updates_change_no_bit_until_allow(scale: float | None) -> None:
    settings = OptimizerSection(name="muon", lr=1e-2)
    own, other = shards(values(0)), shards(values(0))
    optimizer = ShardedMuon(own, settings, mesh())

    def everything() -> list[Tensor]:
        tensors = [s.local for s in own] + [v for _, _, v in optimizer.state()] + optimizer.counts()
        return [t.clone() for t in tensors]

    steps(optimizer, own, range(1, 2))
    before = everything()
    optimizer.refuse_if(torch.tensor(True))
    steps(optimizer, own, range(2, 3), None if scale is None else torch.tensor(scale))
    optimizer.refuse_if(torch.tensor(False))
    steps(optimizer, own, range(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    optimizer.allow()
    steps(optimizer, own, range(2, 3))
    again = ShardedMuon(other, settings, mesh())
    steps(again, other, range(1, 3))
    assert all(torch.equal(a.local, b.local) for a, b in zip(own, other, strict=True))
    assert {float(count) for count in optimizer.counts()} == {2.0}


def test_each_parameter_has_the_states_that_are_declared() -> None:
    own = shards(values(0))
    kinds: dict[str, list[str]] = {s.name: [] for s in own}
    for kind, s, held in ShardedMuon(own, OptimizerSection(name="muon", lr=1e-2), mesh()).state():
        assert held.dtype == torch.float32
        kinds[s.name].append(kind)
    assert {n: tuple(k) for n, k in kinds.items()} == {s.name: MUON.states_of(s.name, s.whole) for s in own}
    assert kinds["model.layers.0.mlp.experts.up_proj"] == ["momentum"]
    assert kinds["lm_head.weight"] == ["exp_avg", "exp_avg_sq"]


def test_singular_values_end_near_one() -> None:
    x = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(orthogonalise(x).float())
    assert found.min() > 0.5
    assert found.max() < 1.5
