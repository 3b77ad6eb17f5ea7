"""State carried over in a process or broadcast by a replica, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from rank_cases import assert_same, build, cut, everything, optimizer_updates, train
from safetensors.torch import load_file

from seatrial.job.layout import Layout
from seatrial.train.recovery.carried import _buckets, carry, restore_carried


def test_carried_state_is_restored_in_a_new_model() -> None:
    torch.manual_seed(3)
    model, optimizer = build()
    train(model, optimizer, range(3))
    kept = carry(model, optimizer)
    then = everything(model, optimizer)
    assert all(kept.lasting[f"model/{s.name}"].data_ptr() == s.local.data_ptr() for s in model.shards), (
        "no copy"
    )
    train(model, optimizer, range(3, 5))
    straight = everything(model, optimizer)
    for values in kept.lasting.values():
        assert values.grad_fn is None

    model, optimizer = build()
    torch.manual_seed(3)
    train(model, optimizer, range(3))
    kept = carry(model, optimizer)
    other, its_optimizer = build(seed=1)
    train(other, its_optimizer, range(1))
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None, "what is carried keeps no model alive"
    restore_carried(kept, other, its_optimizer)
    assert_same(everything(other, its_optimizer), then)
    assert optimizer_updates(its_optimizer) == 3
    train(other, its_optimizer, range(3, 5))
    assert_same(everything(other, its_optimizer), straight)


def test_another_rank_or_layout_is_refused() -> None:
    model, optimizer = build()
    kept = carry(*cut(model, optimizer, 0, Layout(shard=2)))
    for rank, layout in ((1, Layout(shard=2)), (0, Layout(shard=4)), (0, Layout(replicate=2, shard=2))):
        with pytest.raises(ValueError, match="cannot use the state of rank 0"):
            restore_carried(kept, *cut(model, optimizer, rank, layout))
    part, its_optimizer = cut(model, optimizer, 0, Layout(shard=2))
    part.shards = part.shards[1:]
    with pytest.raises(ValueError, match="other tensors"):
        restore_carried(kept, part, its_optimizer)


def test_buckets_have_one_dtype_and_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.train.recovery.carried._BUCKET_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 5, 1, 20, 1)] + [torch.zeros(2, dtype=torch.int64), torch.zeros(1)]
    parts = [[t.numel() for t in bucket] for bucket in _buckets(tensors)]
    assert parts == [[4, 5, 1], [20], [1], [2], [1]]
    assert list(_buckets([])) == []


@pytest.mark.cluster
def test_replicas_without_state_receive_a_live_ones(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "share_ranks.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr

    def seen(when: str, rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        found = load_file(tmp_path / f"{when}-{rank}.safetensors")
        return found, found.pop("rng")

    given, _ = seen("before", 1)
    for rank in range(3):
        before, random_before = seen("before", rank)
        after, random_after = seen("after", rank)
        assert_same(after, given)
        assert torch.equal(random_after, random_before), "each has its own"
        assert rank == 1 or any(not torch.equal(before[key], given[key]) for key in given)
