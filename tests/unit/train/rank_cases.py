"""A small model on one rank, and the same state cut as if several ranks held it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from seatrial.base.box import chunk
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.schema import OptimizerSection
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel, Settings, Shard
from seatrial.parallel.mesh import Mesh
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.step import train_step

torch.set_num_threads(1)  # on a busy machine several would wait for each other, in tensors as small as these

ARCH = Architecture(
    family="qwen2",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
)
SETTINGS = Settings(sequence_length=16, microbatch=2)
OPTIMIZER = OptimizerSection(lr=1e-2)


def mesh(layout: Layout | None = None, rank: int = 0, device: Any = None) -> Mesh:
    """A rank's place without any group."""
    layout = layout or Layout()
    groups = dict.fromkeys(("tensor", "pipeline", "shard", "replicate", "ends"))
    return Mesh(layout, rank, layout.coordinates(rank), device or torch.device("cpu"), **groups)


def build(seed: int = 0) -> tuple[ParallelModel, ShardedAdamW]:
    """A whole model on one rank."""
    model = ParallelModel(ARCH, mesh(), SETTINGS, RandomWeights(ARCH, seed))
    return model, ShardedAdamW(model.shards, OPTIMIZER)


def train(model: ParallelModel, optimizer: ShardedAdamW, steps: range) -> None:
    """Steps with data that their numbers determine, and one draw from the random state each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ARCH.vocab_size, (4, 17), generator=generator)
        train_step(model, optimizer, ids[:, :-1], ids[:, 1:], lr=1e-2, clip_norm=1.0)
        torch.rand(3)


def cut(model: ParallelModel, optimizer: ShardedAdamW, rank: int, layout: Layout) -> tuple[Any, ShardedAdamW]:
    """What one rank of a data-parallel layout would hold of the same state: rows; replica 0 owns them."""
    at = layout.coordinates(rank)
    shards = []
    for s in model.shards:
        offset, size = chunk(s.whole[0], layout.shard, at.shard)
        local = s.local[offset : offset + size].clone()
        box = s.box.narrow(0, offset, size)
        owner = s.owner and at.replicate == 0
        shards.append(replace(s, parameter=nn.Parameter(local), local=local, box=box, owner=owner))
    part = ShardedAdamW(shards, OPTIMIZER)
    whole = {(kind, s.name): values for kind, s, values in optimizer.state()}
    for kind, s, values in part.state():
        values.copy_(whole[kind, s.name][s.box.slices()])
    part.set_step(optimizer_updates(optimizer))
    return cast(Any, SimpleNamespace(shards=shards, mesh=mesh(layout, rank))), part


def optimizer_updates(optimizer: ShardedAdamW) -> int:
    return int(optimizer.counts()[0])


def everything(model: Any, optimizer: ShardedAdamW) -> dict[str, torch.Tensor]:
    """Copies of all that must be equal to the last bit."""
    found = {f"model/{s.name}/{i}": s.local.clone() for i, s in enumerate(model.shards)}
    found |= {f"{kind}/{s.name}": values.clone() for kind, s, values in optimizer.state()}
    found |= {f"step/{i}": count.clone() for i, count in enumerate(optimizer.counts())}
    return found | {"rng": torch.get_rng_state()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert different == []


def second_copy(s: Shard) -> Shard:
    """The copy of a tied embedding that stands in the last stage, with values of its own to tell them apart."""
    local = s.local + 1
    return replace(s, parameter=nn.Parameter(local), local=local, first=False, owner=False, counted=False)
