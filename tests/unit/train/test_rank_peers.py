"""A rank that lost its peers at any point can join another world."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from seatrial.train.supervision.peers import teardown


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    teardown()


def join(store: Path, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=0,
        world_size=world_size,
        timeout=timedelta(milliseconds=200),
    )


def name_of_the_world() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


@pytest.mark.cluster  # slow
def test_group_names_restart_after_a_failed_rendezvous(tmp_path: Path) -> None:
    """Its peers may be new processes, for which it is the first; a name that differs is a wait without end."""
    with pytest.raises(RuntimeError):
        join(tmp_path / "first", 2)  # the other one never comes
    assert not dist.is_initialized()
    teardown()
    join(tmp_path / "second", 1)
    assert name_of_the_world() == "0"
    teardown()
    join(tmp_path / "third", 1)
    assert name_of_the_world() == "0"
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 1.0


def test_teardown_without_a_process_group_is_a_no_op() -> None:
    teardown()
    assert not dist.is_initialized()
