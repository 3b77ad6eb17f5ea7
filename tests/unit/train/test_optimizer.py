"""AdamW on shards against torch's own on whole tensors; with bf16 moments against torch's with moments rounded after each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from seatrial.base.box import Box
from seatrial.job.schema import GroupSection, OptimizerSection
from seatrial.parallel.build import Shard
from seatrial.train import optimizer as optimizers
from seatrial.train.optimizer import Bf16AdamW, Lion, ShardedAdamW, ShardedOptimizer

SETTINGS = OptimizerSection(lr=1e-2, weight_decay=0.1)


def shard(name: str, parameter: nn.Parameter, *, holders: int = 1, counted: bool = True) -> Shard:
    shape = tuple(parameter.shape)
    return Shard(
        name,
        parameter,
        parameter.detach(),
        Box.whole(shape),
        shape,
        holders,
        first=True,
        owner=True,
        counted=counted,
    )


def make() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return (
        nn.Parameter(torch.randn(6, 5, generator=generator)),
        nn.Parameter(torch.randn(5, generator=generator)),
    )


def gradients(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(6, 5, generator=generator), torch.randn(5, generator=generator)


def torch_adamw(matrix: nn.Parameter, norm: nn.Parameter) -> torch.optim.AdamW:
    groups = [{"params": [matrix]}, {"params": [norm], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)


def test_matches_torch_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = make(), make()
    sharded = ShardedAdamW([shard("w", ours[0]), shard("norm", ours[1])], SETTINGS)
    peer = torch_adamw(*theirs)
    for step in range(5):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        norm = nn.utils.clip_grad_norm_(theirs, 1.0)
        assert sharded.squared_norm().sqrt() == pytest.approx(float(norm), rel=1e-6)
        scale = (1.0 / (sharded.squared_norm().sqrt() + 1e-6)).clamp(max=1.0)
        sharded.update(1e-2, scale)
        peer.step()
        assert all(p.grad is None for p in ours)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


BF16 = OptimizerSection(name="adamw_bf16", lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("part", [10, 1 << 23])
def test_bf16_moments_match_torch_adamw_with_rounded_moments(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Also with a rule that gets two of six rows at once."""
    monkeypatch.setattr(optimizers, "_PART", part)
    ours, theirs = make(), make()
    sharded = Bf16AdamW([shard("w", ours[0]), shard("norm", ours[1])], BF16)
    peer = torch_adamw(*theirs)
    for step in range(8):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        sharded.update(1e-2, None)
        peer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        for state in peer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())
    for key, s, values in sharded.state():
        peers = peer.state[theirs[0] if s.name == "w" else theirs[1]][key]
        assert values.dtype == torch.bfloat16
        torch.testing.assert_close(values.float(), peers, rtol=2**-7, atol=0)
    assert not torch.equal(ours[0], make()[0])


LION = OptimizerSection(name="lion", lr=1e-2, weight_decay=0.1, beta2=0.99)


def test_lion_is_the_papers() -> None:
    """Algorithm 2 of arXiv:2302.06675, in fp64."""
    ours, theirs = make(), [p.detach().double() for p in make()]
    sharded = Lion([shard("w", ours[0]), shard("norm", ours[1])], LION)
    momenta = [torch.zeros_like(p) for p in theirs]
    for step in range(6):
        for i, (p, g) in enumerate(zip(ours, gradients(step), strict=True)):
            p.grad = g.clone()
            decay = 0.1 if p.dim() == 2 else 0.0
            direction = torch.sign(0.9 * momenta[i] + 0.1 * g.double())
            theirs[i] -= 1e-2 * (direction + decay * theirs[i])
            momenta[i] = 0.99 * momenta[i] + 0.01 * g.double()
        sharded.update(1e-2, None)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().double(), q, rtol=1e-6, atol=1e-6)
    for (kind, _, values), momentum in zip(sharded.state(), momenta, strict=True):
        assert kind == "exp_avg"
        torch.testing.assert_close(values.double(), momentum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", [("w", "norm"), ("norm", "w")])
def test_groups_are_those_of_torch(names: tuple[str, str]) -> None:
    """Bit for bit; of a norm too, which decays only because its group does."""
    groups = [
        GroupSection(match="w", lr_factor=0.3, weight_decay=0.7),
        GroupSection(match="*o*", lr_factor=1.7, weight_decay=0.2),
    ]
    ours, theirs = (
        dict(zip(("w", "norm"), make(), strict=True)),
        dict(zip(("w", "norm"), make(), strict=True)),
    )
    shards = [shard(name, ours[name]) for name in names]
    sharded = ShardedAdamW(shards, SETTINGS.model_copy(update={"groups": groups}))
    peer = torch.optim.AdamW(
        [
            {"params": [theirs["w"]], "weight_decay": 0.7},
            {"params": [theirs["norm"]], "weight_decay": 0.2},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for step, lr in enumerate((1e-2, 7e-3, 2e-3)):
        for p, q, g in zip(ours.values(), theirs.values(), gradients(step), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        for group, factor in zip(peer.param_groups, (0.3, 1.7), strict=True):
            group["lr"] = lr * factor
        sharded.update(lr, None)
        peer.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize(("kind", "settings"), [(ShardedAdamW, SETTINGS), (Bf16AdamW, BF16), (Lion, LION)])
def test_a_group_trains_as_alone(kind: type[ShardedOptimizer], settings: OptimizerSection) -> None:
    """As all parameters do with its weight decay and so much of the learning rate; the others as without groups."""
    group = GroupSection(match="b", lr_factor=0.3, weight_decay=0.7)
    both, alone = [make()[0] for _ in "ab"], [make()[0] for _ in "ab"]
    grouped = kind(
        [shard(name, p) for name, p in zip("ab", both, strict=True)],
        settings.model_copy(update={"groups": [group]}),
    )
    others = [
        kind([shard("a", alone[0])], settings),
        kind([shard("b", alone[1])], settings.model_copy(update={"weight_decay": 0.7})),
    ]
    for step in range(3):
        for p in (*both, *alone):
            p.grad = gradients(step)[0].clone()
        grouped.update(1e-2, None)
        for other, factor in zip(others, (1.0, 0.3), strict=True):
            other.update(1e-2 * factor, None)
    assert all(torch.equal(p, q) for p, q in zip(both, alone, strict=True))
    assert not torch.equal(*both)


def test_replicated_parameters_count_once_in_the_norm() -> None:
    a, b = make()
    a.grad, b.grad = torch.ones(6, 5), torch.ones(5)
    whole = ShardedAdamW([shard("a", a), shard("b", b)], SETTINGS).squared_norm()
    assert float(whole) == pytest.approx(35)
    half = ShardedAdamW([shard("a", a), shard("b", b, holders=2)], SETTINGS).squared_norm()
    assert float(half) == pytest.approx(32.5)
    tied = ShardedAdamW([shard("a", a), shard("b", b, counted=False)], SETTINGS).squared_norm()
    assert float(tied) == pytest.approx(30)


def test_a_nan_gradient_makes_the_norm_nan() -> None:
    a, b = make()
    a.grad, b.grad = torch.ones(6, 5), torch.ones(5)
    b.grad[3] = float("nan")
    assert ShardedAdamW([shard("a", a), shard("b", b)], SETTINGS).squared_norm().isnan()


def test_restored_state_continues_bit_identically(tmp_path: Path) -> None:
    """Saved after two steps and filled into a new optimizer, the third step is the same to the last bit."""
    ours = make()
    first = ShardedAdamW([shard("w", ours[0]), shard("norm", ours[1])], SETTINGS)
    for step in range(2):
        for p, g in zip(ours, gradients(step), strict=True):
            p.grad = g
        first.update(1e-2, None)
    again = tuple(nn.Parameter(p.detach().clone()) for p in ours)
    second = ShardedAdamW([shard("w", again[0]), shard("norm", again[1])], SETTINGS)
    for (kind, s, values), (kind2, s2, copy) in zip(first.state(), second.state(), strict=True):
        assert (kind, s.name) == (kind2, s2.name)
        copy.copy_(values)
    second.set_step(2)
    for p, q, g in zip(ours, again, gradients(2), strict=True):
        p.grad, q.grad = g.clone(), g.clone()
    first.update(1e-2, None)
    second.update(1e-2, None)
    for p, q in zip(ours, again, strict=True):
        assert torch.equal(p, q)


def test_a_rank_with_an_empty_shard() -> None:
    empty = nn.Parameter(torch.empty(0, 5))
    full = make()[0]
    optimizer = ShardedAdamW(
        [
            Shard(
                "e",
                empty,
                empty.detach(),
                Box((6, 0), (0, 5)),
                (6, 5),
                1,
                first=True,
                owner=True,
                counted=True,
            ),
            shard("w", full),
        ],
        SETTINGS,
    )
    full.grad = torch.ones(6, 5)
    empty.grad = torch.empty(0, 5)
    assert float(optimizer.squared_norm()) == pytest.approx(30)
    optimizer.update(1e-2, None)


@pytest.mark.parametrize("scale", [None, float("nan"), 0.0])
@pytest.mark.parametrize(("kind", "settings"), [(ShardedAdamW, SETTINGS), (Bf16AdamW, BF16), (Lion, LION)])
def test_refused_updates_change_no_bit_until_allow(
    kind: type[ShardedOptimizer], settings: OptimizerSection, scale: float | None
) -> None:
    ours = make()
    optimizer = kind([shard("w", ours[0]), shard("norm", ours[1])], settings)

    def step(number: int, factor: float | None) -> None:
        for p, g in zip(ours, gradients(number), strict=True):
            p.grad = g
        optimizer.update(1e-2, None if factor is None else torch.tensor(factor))

    def everything() -> list[torch.Tensor]:
        own = [p.detach() for p in ours] + [values for _, _, values in optimizer.state()]
        return [t.clone() for t in own + optimizer.counts()]

    step(0, 0.5)
    before = everything()
    optimizer.refuse_if(torch.tensor(True))
    step(1, scale)
    optimizer.refuse_if(torch.tensor(False))  # the step after, which nothing is wrong with
    step(2, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert all(p.grad is None for p in ours)
    optimizer.allow()
    step(1, 0.5)
    after = everything()
    other = make()
    again = kind([shard("w", other[0]), shard("norm", other[1])], settings)
    for number in range(2):
        for p, g in zip(other, gradients(number), strict=True):
            p.grad = g
        again.update(1e-2, torch.tensor(0.5))
    assert all(torch.equal(a.detach(), b) for a, b in zip(other, after[:2], strict=True))
