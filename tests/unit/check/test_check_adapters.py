"""Taking nodes out: who goes and who does not, the exact commands, and what a kubectl that fails or hangs leads to."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.check.judging.check_run import CheckRun
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.report import Judged, Report
from seatrial.check.reports.adapters import Order, orders, reasons, refusal, run_orders

DOWN = Finding("NET001", "FAIL", Target(node="n2", port="mlx5_2/1"), "Down, physical state Polling")


def report(*findings: Finding, nodes: int = 8) -> Report:
    fine = tuple(Finding("NET001", "PASS", Target(node=f"n{i}"), "fine") for i in range(1, nodes + 1))
    return Report((Judged("f", None, "t", findings + fine),))


def test_only_nodes_that_failed_go_and_the_blame_is_the_reason() -> None:
    blame = Finding("BLM003", "FAIL", Target(node="n2", port="mlx5_2/1"), "n2 mlx5_2/1: slow 3 times")
    suspect = Finding("NET002", "WARN", Target(node="n3"), "slow")
    unknown = Finding("NET001", "UNJUDGED", Target(node="n4"), "?", why_unjudged="?")
    leaf = Finding("BLM005", "FAIL", Target(peer="leaf-a"), "leaf switch leaf-a: slow")
    because = reasons(report(DOWN, blame, suspect, unknown, leaf))
    assert because == {"n2": blame}


def test_node_whose_fault_is_unsettled_is_not_drained() -> None:
    unsettled = Finding("PAI001", "FAIL", Target(node="n5"), "n5 mlx5_0/1: 10% of the rate at best")
    assert reasons(report(unsettled)) == {}
    assert list(reasons(report(unsettled, DOWN))) == ["n2"]


def test_the_commands() -> None:
    because = reasons(report(DOWN))
    (drain,) = orders("slurm", because)
    assert drain.text == (
        'scontrol update nodename=n2 state=drain reason="seatrial NET001 mlx5_2/1: Down, physical state Polling"'
    )
    assert shlex.split(drain.text) == list(drain.command)
    assert shlex.join(drain.undo) == "scontrol update nodename=n2 state=resume"
    whole = Finding("BLM004", "FAIL", Target(node="n-1"), "n-1: does not answer from the start, asked twice")
    (drain,) = orders("slurm", {"n-1": whole})
    assert drain.command[-1] == "reason=seatrial BLM004: does not answer from the start, asked twice"
    (taint,) = orders("kubernetes", because)
    assert taint.text == "kubectl taint nodes n2 seatrial.dev/unfit=NET001:NoSchedule --overwrite"
    assert shlex.join(taint.undo) == "kubectl taint nodes n2 seatrial.dev/unfit:NoSchedule-"


@given(st.text(max_size=300))
def test_no_message_escapes_the_quotes_of_a_command(message: str) -> None:
    found = Finding("NET001", "FAIL", Target(node="n2", port=message[:20]), message)
    for scheduler in ("slurm", "kubernetes"):
        (order,) = orders(scheduler, {"n2": found})
        assert shlex.split(order.text) == list(order.command)
        assert "\n" not in order.text
        assert all(word.isprintable() and len(word) < 200 for word in order.command)


def test_a_name_that_no_host_has_is_refused() -> None:
    for name in ("-n", "a b", "$(reboot)", "a;b", ""):
        with pytest.raises(InputError):
            reasons(report(Finding("NET001", "FAIL", Target(node=name), "down")))


def test_more_than_half_and_simulated_nodes_are_refused() -> None:
    ill = [Finding("NET001", "FAIL", Target(node=f"n{i}"), "down") for i in range(1, 6)]
    half, more = report(*ill[:4]), report(*ill)
    assert refusal(half, orders("slurm", reasons(half)), force=False) == ""
    assert "5 of 8 nodes" in refusal(more, orders("slurm", reasons(more)), force=False)
    assert refusal(more, orders("slurm", reasons(more)), force=True) == ""
    invented = Report(half.judged, (), CheckRun(("n1",), simulated="c.toml"))
    assert "simulated" in refusal(invented, orders("slurm", reasons(invented)), force=True)


# -- carried out, with a kubectl that writes down what it is asked


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on the PATH; `behave` writes the executable into it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def behave(folder: Path, body: str) -> None:
    file = folder / "kubectl"
    file.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{body}\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def taints(*nodes: str) -> list[Order]:
    return orders("kubernetes", {n: Finding("BLM001", "FAIL", Target(node=n, gpu=2), "gone") for n in nodes})


def test_each_node_is_tainted_and_reported(kubectl: Path) -> None:
    behave(kubectl, 'echo "node/$3 tainted"')
    lines: list[str] = []
    done = run_orders(taints("n1", "n2"), lines.append)
    assert asked(kubectl) == [
        f"taint nodes {n} seatrial.dev/unfit=BLM001:NoSchedule --overwrite" for n in ("n1", "n2")
    ]
    assert [(o.done, o.output) for o in done] == [(True, "node/n1 tainted"), (True, "node/n2 tainted")]
    assert lines[0].startswith("done: kubectl taint nodes n1 ")
    assert lines[0].endswith(": node/n1 tainted")


def test_a_failed_command_is_reported_and_the_others_run(kubectl: Path) -> None:
    behave(
        kubectl, 'case "$3" in n1) echo "Error from server (NotFound): nodes n1 not found" >&2; exit 1;; esac'
    )
    lines: list[str] = []
    done = run_orders(taints("n1", "n2"), lines.append)
    assert [o.done for o in done] == [False, True]
    assert "exit code 1: Error from server (NotFound)" in done[0].why
    assert lines[0].startswith("failed: kubectl taint nodes n1")


@pytest.mark.cluster  # slow
def test_hung_kubectl_and_children_are_killed_and_rest_skipped(kubectl: Path) -> None:
    behave(kubectl, f"sleep 600 & echo $! > {kubectl}/child; wait")
    done = run_orders(taints("n1", "n2", "n3"), lambda text: None, timeout_s=1.0)
    assert [o.done for o in done] == [False, False, False]
    assert "did not end within 1 s" in done[0].why
    assert done[1].why.startswith("not run: ")
    assert len(asked(kubectl)) == 1
    with contextlib.suppress(ProcessLookupError):  # gone, and reaped
        handle = os.pidfd_open(int((kubectl / "child").read_text()))
        assert select.select([handle], [], [], 10)[0]  # gone
        os.close(handle)


def test_without_the_command_nothing_is_tried_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_orders(taints("n1", "n2"), lambda text: None)
    assert done[0].why == "kubectl: not installed"
    assert done[1].why == "not run: kubectl: not installed"
