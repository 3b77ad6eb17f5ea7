"""Compute time excludes communication, also inside a layer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from seatrial.job.architecture import Architecture
from seatrial.model import decoder
from seatrial.model.decoder import Decoder
from seatrial.parallel import collectives, overlap
from seatrial.parallel.tensor import apply_tensor_parallel
from seatrial.train import meter
from seatrial.train.meter import OwnWorkTimer

ARCH = Architecture(
    family="qwen2", vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=16, rope_theta=1e4, rms_norm_eps=1e-6,
    tie_word_embeddings=False, qkv_bias=True, qk_norm=False, initializer_range=0.1,
)  # fmt: skip
WAIT_S, WORK_S = 1000.0, 1.0


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("in_parts", [False, True])
def test_communication_is_not_compute_time(
    in_parts: bool, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def taking(seconds: float, whole: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return whole(*args, **kwargs)

        return call

    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    monkeypatch.setattr(overlap, "wait", taking(WAIT_S, overlap.wait))
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(collectives, name, taking(WAIT_S, getattr(collectives, name)))
    # Of the first layer's parts these are counted either way; its products where they wait for nobody.
    monkeypatch.setattr(decoder.F, "silu", taking(WORK_S, decoder.F.silu))
    monkeypatch.setattr(decoder, "rotate", taking(WORK_S, decoder.rotate))

    with torch.device("meta"):
        model = Decoder(ARCH)
    apply_tensor_parallel(model, group, 0, 8, in_parts=in_parts)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    watched = OwnWorkTimer(torch.device("cpu"))
    before = model.blocks[0].mlp.project
    watched.watch(SimpleNamespace(stages=[model], settings=SimpleNamespace(compile=False)))  # type: ignore[arg-type]
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert now > 10 * WAIT_S, "nothing was waited for"
    assert watched.read() == 3 * WORK_S  # two rotations, one silu

    watched.unwatch()
    assert model.blocks[0].mlp.project == before
    model(torch.zeros(2, 8, dtype=torch.int64))
    assert watched.read() == 0
