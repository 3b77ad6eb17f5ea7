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
from seatrial.drill import drill_run as drill_runs
from seatrial.drill.drill_run import DrillRun
from seatrial.drill.run_state import kernel_log
from seatrial.record import events


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DrillRun]:
    run = DrillRun(tmp_path, job(), limit_s=5.0)
    yield run
    run.close()


def sleeper(token: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, drill_runs._RUN: token}
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def tell(run: DrillRun, kind: str, *, rank: int | None = None, pid: int = 0, node: int = 1) -> None:
    run.folder.path.mkdir(exist_ok=True)
    events.append(run.folder, kind, "", generation=1, node=node, rank=rank, data={"pid": pid})
    run.poll()


def test_a_process_of_another_run_is_never_signalled(run: DrillRun) -> None:
    """The rank has ended and its number belongs to another process now."""
    stranger = sleeper("another run")
    try:
        tell(run, "rank_started", rank=3, pid=stranger.pid)
        assert not run.alive(3)
        run.kill_rank(3)
        assert stranger.poll() is None
    finally:
        end(stranger)


def test_own_processes_are_signalled_and_the_fault_is_logged(run: DrillRun, tmp_path: Path) -> None:
    own = sleeper(run.token)
    try:
        tell(run, "rank_started", rank=3, pid=own.pid)
        assert run.alive(3)
        run.kill_rank(3)
        assert own.wait() == -9
    finally:
        end(own)
    assert [(i.kind, i.node, i.rank) for i in run.injections] == [("kill_rank", 1, 3)]
    assert (tmp_path / f"{run.job.name}.injections.jsonl").read_text().count("\n") == 1


def test_what_is_left_is_named_and_killed(run: DrillRun) -> None:
    own = sleeper(run.token)
    try:
        run.wait_gone(within_s=0.0)
        assert run.left == [f"{own.pid} {sys.executable} -c input()"]
        assert own.wait() == -9
    finally:
        end(own)


def test_close_leaves_nothing(run: DrillRun) -> None:
    own = sleeper(run.token)
    try:
        run.close()
        assert own.wait() == -9
    finally:
        end(own)


def test_it_tracks_nodes_and_processes_of_ranks(run: DrillRun) -> None:
    tell(run, "node_joined", node=7)
    tell(run, "coordinator_elected", node=0)  # of whom all have to hear anew
    tell(run, "node_joined", node=0)
    tell(run, "node_joined", node=1)
    tell(run, "agent_started", pid=12, node=1)
    tell(run, "rank_started", rank=3, pid=7, node=1)
    state = run.state
    assert (state.present, state.coordinator, state.agents, state.training_nodes()) == (
        {0, 1},
        0,
        {1: 12},
        [1],
    )
    tell(run, "node_lost", node=1)
    tell(run, "generation_started", node=0)
    tell(run, "rank_started", rank=3, pid=8, node=2)
    first = state.events[5].time
    assert (state.present, state.ranks[3].pid, state.node_of(3, first), state.node_of(3, first + 60)) == (
        {0},
        8,
        1,
        2,
    )


def test_a_damaged_checkpoint_is_damaged(run: DrillRun) -> None:
    run.folder.path.mkdir()
    newest = save(run.folder.checkpoints)
    verify(newest)
    run.damage_newest_checkpoint()
    with pytest.raises(Damaged, match="XXH3-128"):
        verify(newest)
    assert run.injections[0].data == {"checkpoint_step": 5}


def test_a_kernel_log_line_looks_like_the_kernels(run: DrillRun) -> None:
    run._kernel.mkdir()
    run.write_kernel_log(1, 79, "GPU has fallen off the bus.")
    line = kernel_log(run._kernel, 1).read_text()
    head, _, text = line.partition(";")
    assert text == "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    priority, number, since_boot_us, flags = head.split(",")
    assert (priority, flags) == ("4", "-")
    assert int(number) > 0
    assert int(since_boot_us) > 0


def test_a_checkpoint_that_is_still_written_is_waited_for(run: DrillRun) -> None:
    tell(run, "checkpoint_saved")
    run.wait_saved(1)
    with pytest.raises(drill_runs.RunEnded):
        run.wait_saved(2)
