"""A stage's grip on processes: only those of its own run, and all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_jobs import job
from test_weights import save

from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.verified import verify
from seatrial.drill import stage as stages
from seatrial.drill.scene import kernel_log
from seatrial.drill.stage import Stage
from seatrial.record import events


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, job(), limit_s=5.0)
    yield stage
    stage.close()


def sleeper(token: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, stages._RUN: token}
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def tell(stage: Stage, kind: str, *, rank: int | None = None, pid: int = 0, node: int = 1) -> None:
    stage.folder.path.mkdir(exist_ok=True)
    events.append(stage.folder, kind, "", generation=1, node=node, rank=rank, data={"pid": pid})
    stage.poll()


def test_a_process_of_somebody_else_is_never_signalled(stage: Stage) -> None:
    """The rank has ended and its number belongs to another process now."""
    stranger = sleeper("another run")
    try:
        tell(stage, "rank_started", rank=3, pid=stranger.pid)
        assert not stage.alive(3)
        stage.kill_rank(3)
        assert stranger.poll() is None
    finally:
        end(stranger)


def test_its_own_are_and_the_log_says_so(stage: Stage, tmp_path: Path) -> None:
    own = sleeper(stage.token)
    try:
        tell(stage, "rank_started", rank=3, pid=own.pid)
        assert stage.alive(3)
        stage.kill_rank(3)
        assert own.wait() == -9
    finally:
        end(own)
    assert [(i.kind, i.node, i.rank) for i in stage.injections] == [("kill_rank", 1, 3)]
    assert (tmp_path / f"{stage.job.name}.injections.jsonl").read_text().count("\n") == 1


def test_what_is_left_is_named_and_killed(stage: Stage) -> None:
    own = sleeper(stage.token)
    try:
        stage.wait_gone(within_s=0.0)
        assert stage.left == [f"{own.pid} {sys.executable} -c input()"]
        assert own.wait() == -9
    finally:
        end(own)


def test_close_leaves_nothing(stage: Stage) -> None:
    own = sleeper(stage.token)
    try:
        stage.close()
        assert own.wait() == -9
    finally:
        end(own)


def test_it_knows_who_is_where(stage: Stage) -> None:
    tell(stage, "node_joined", node=7)
    tell(stage, "coordinator_elected", node=0)  # of whom all have to hear anew
    tell(stage, "node_joined", node=0)
    tell(stage, "node_joined", node=1)
    tell(stage, "agent_started", pid=12, node=1)
    tell(stage, "rank_started", rank=3, pid=7, node=1)
    scene = stage.scene
    assert (scene.present, scene.coordinator, scene.agents, scene.training_nodes()) == (
        {0, 1},
        0,
        {1: 12},
        [1],
    )
    tell(stage, "node_lost", node=1)
    tell(stage, "generation_started", node=0)
    tell(stage, "rank_started", rank=3, pid=8, node=2)
    first = scene.events[5].time
    assert (scene.present, scene.ranks[3].pid, scene.node_of(3, first), scene.node_of(3, first + 60)) == (
        {0},
        8,
        1,
        2,
    )


def test_a_damaged_checkpoint_is_damaged(stage: Stage) -> None:
    stage.folder.path.mkdir()
    newest = save(stage.folder.checkpoints)
    verify(newest)
    stage.damage_newest_checkpoint()
    with pytest.raises(Damaged, match="XXH3-128"):
        verify(newest)
    assert stage.injections[0].data == {"checkpoint_step": 5}


def test_a_kernel_log_line_looks_like_the_kernels(stage: Stage) -> None:
    stage._kernel.mkdir()
    stage.write_kernel_log(1, 79, "GPU has fallen off the bus.")
    line = kernel_log(stage._kernel, 1).read_text()
    head, _, text = line.partition(";")
    assert text == "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    priority, number, since_boot_us, flags = head.split(",")
    assert (priority, flags) == ("4", "-")
    assert int(number) > 0
    assert int(since_boot_us) > 0


def test_a_checkpoint_that_is_still_written_is_waited_for(stage: Stage) -> None:
    tell(stage, "checkpoint_saved")
    stage.wait_saved(1)
    with pytest.raises(stages.RunEnded):
        stage.wait_saved(2)
