"""The out-of-memory killer's counters, in each place where a kernel keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.control.agent.oom import OomWatch


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own_cgroup", "counter"),
    [
        ("0::/job/7", "job/7/memory.events"),
        ("0::/not/seen/from/here", "memory.events"),
        ("4:cpu,memory:/job\n0::/", "memory/job/memory.oom_control"),
    ],
)
def test_the_cgroups_own_counter_decides(tmp_path: Path, own_cgroup: str, counter: str) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", own_cgroup + "\n")
    write(proc / "vmstat", "oom_kill 5\n")
    write(cgroups / counter, "oom 0\noom_kill 1\n")
    watch = OomWatch(proc, cgroups)
    write(proc / "vmstat", "oom_kill 6\n")
    assert watch.struck() is False  # it was somebody else's
    write(cgroups / counter, "oom 1\noom_kill 2\n")
    assert watch.struck() is True


def test_the_machines_counter_can_only_acquit(tmp_path: Path) -> None:
    write(tmp_path / "vmstat", "nr_free_pages 3\noom_kill 5\n")
    watch = OomWatch(tmp_path, tmp_path / "none")
    assert watch.struck() is False
    write(tmp_path / "vmstat", "nr_free_pages 3\noom_kill 6\n")
    assert watch.struck() is None


def test_without_counters_nothing_is_claimed(tmp_path: Path) -> None:
    assert OomWatch(tmp_path, tmp_path).struck() is None
