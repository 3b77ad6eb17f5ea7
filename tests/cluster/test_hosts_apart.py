"""Hosts that share nothing but a folder, over a file system with caches: a run there has the bits of a local one."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from apart_hosts import COMMANDS, ApartHosts, install, skip_unless_possible
from recovery_runs import Trial, assert_same, lines, make_folder, one_node

from seatrial.record.folder import RunFolder
from seatrial.record.launches import read_outcome

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

NODES, SPARES = 3, 1
LOGIN = NODES + SPARES  # the host of `seatrial train`
SILENCE_S = 6.0  # one machine, with other work perhaps, plays five hosts
LAYOUT = (
    f"cluster.nodes={NODES}",
    "cluster.gpus_per_node=1",
    "cluster.device=cpu",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    f"parallel.replicate={NODES}",
    f"resilience.silence_s={SILENCE_S}",
    "train.global_batch=6",
    "train.microbatch=1",
    "train.steps=100",  # long enough for a fault in its midst
    "checkpoint.every_steps=20",
)
APART = (*LAYOUT, "cluster.launcher=apart", f"cluster.spares={SPARES}")
# A claim is refused at once where an old lease is seen, so caches do not delay a successor by their age; the load of
# this machine does.
TAKEN_OVER_WITHIN_S = SILENCE_S + 10.0
_ENDED_WITHIN_S = 240.0

Begin = Callable[..., Trial]


class Apart:
    """The hosts of one test, and the run in them."""

    def __init__(self, hosts: ApartHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.trial: Trial | None = None

    def train(self, *settings: str) -> Trial:
        """`seatrial train` on the login host."""
        assert self.trial is None
        self.trial = Trial(self.folder, *APART, *settings, prefix=self.hosts.command(LOGIN))
        return self.trial

    def end(self) -> None:
        """Wait for the end of the run, which must be a good one."""
        assert self.trial is not None
        _ended(self.trial)


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    skip_unless_possible()
    install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path / "site"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = make_folder(tmp_path / "work")
    with ApartHosts(LOGIN + 1, folder) as hosts:
        monkeypatch.setenv(COMMANDS, json.dumps([hosts.command(host) for host in range(LOGIN)]))
        made = Apart(hosts, folder)
        yield made
        if made.trial is not None:
            made.trial.kill_all()
            made.trial.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The same layout on a node of the virtual cluster."""
    skip_unless_possible()
    trial = Trial(make_folder(tmp_path_factory.mktemp("undisturbed") / "work"), *LAYOUT, *one_node(NODES))
    _ended(trial)
    return trial


def _ended(trial: Trial) -> None:
    try:
        _, err = trial.process.communicate(timeout=_ENDED_WITHIN_S)
        assert trial.process.returncode == 0, err
        trial.wait_gone(10.0)
    finally:
        trial.kill_all()
        trial.process.communicate()


def check_one_at_a_time(trial: Trial) -> None:
    """Every generation was begun once, in the order of the terms, and the last term ended the run."""
    folder = RunFolder(trial.run)
    # What a coordinator decided and could not write any more, since it was succeeded, its successor decides anew.
    term_of = {
        action["generation"]: line["term"]
        for line in lines(folder.coordinator_log)
        for action in line["actions"]
        if action["kind"] == "Start"
    }
    begun = [event["generation"] for event in trial.events("generation_started")]
    assert begun == sorted(set(begun))
    assert [term_of[generation] for generation in begun] == sorted(term_of[g] for g in begun)
    elected = [event["data"]["term"] for event in trial.events("coordinator_elected")]
    assert elected == sorted(set(elected))
    outcome = read_outcome(folder, 1)
    assert outcome is not None
    assert outcome.term == elected[-1]
    assert len(trial.events("run_finished")) == 1


def test_the_hosts_are_apart(apart: Apart) -> None:
    """What the other tests rest on: own names and memory, one folder, and caches that are as old as they may be."""
    hosts, folder = apart.hosts, apart.folder
    seen = [hosts.output(host, "hostname; stat -c %d /dev/shm; echo $TMPDIR; pwd") for host in (0, 1)]
    assert seen[0].splitlines()[0] == "host0" != socket.gethostname()
    assert seen[0].splitlines()[:2] != seen[1].splitlines()[:2]
    assert seen[0].splitlines()[2:] == ["/dev/shm/tmp", str(folder)]
    assert hosts.output(0, "cat new 2>&-|| echo none") == "none\n"
    assert hosts.output(1, "echo old > new; cat new") == "old\n"
    assert hosts.output(0, "cat new 2>&-|| echo none") == "none\n"  # it has been told so
    assert hosts.output(0, "ln job.toml new 2>&-|| echo taken") == "taken\n"
    assert hosts.output(2, "stat -c %s new") == "4\n"
    hosts.output(1, "echo more > draft; mv draft new")
    assert hosts.output(2, "stat -c %s new") == "4\n"  # of the file that had the name
    assert hosts.output(3, "stat -c %s new") == "5\n"
    assert hosts.output(2, "cat new") == "more\n"  # opened


@pytest.mark.long  # the tests of lost hosts compare the bits too
def test_it_trains_to_the_end_with_the_bits_of_a_local_run(apart: Apart, undisturbed: Trial) -> None:
    trial = apart.train()
    trial.until_step(1)
    for node, agent in trial.agents().items():
        assert agent in apart.hosts.processes(node)
    apart.end()
    assert_same(trial, undisturbed)
    check_one_at_a_time(trial)


@pytest.mark.long
def test_a_killed_rank_costs_no_bit(apart: Apart, undisturbed: Trial) -> None:
    trial = apart.train()
    trial.until_step(20)
    trial.kill_rank(1)
    apart.end()
    assert [(e["node"], e["rank"]) for e in trial.events("rank_failed")] == [(1, 1)]
    assert_same(trial, undisturbed)
    check_one_at_a_time(trial)


@pytest.mark.long  # a host that is cut off is replaced in the same way, and it coordinated
def test_a_killed_host_is_replaced_by_the_spare(apart: Apart, undisturbed: Trial) -> None:
    trial = apart.train()
    trial.until_step(20)
    lost = next(node for node in trial.pids() if node != trial.coordinator())
    apart.hosts.kill(lost)
    apart.end()
    assert [e["node"] for e in trial.events("node_lost")] == [lost]
    assert_same(trial, undisturbed)
    check_one_at_a_time(trial)


@pytest.mark.parametrize(
    "fault", [*(pytest.param(f, marks=pytest.mark.long) for f in ("killed", "without power")), "cut off"]
)
def test_the_loss_of_the_coordinators_host(apart: Apart, undisturbed: Trial, fault: str) -> None:
    """killed: its sockets are closed. Without power: nobody hears of it. Cut off: it lives, and reaches the folder."""
    trial = apart.train()
    trial.until_step(20)
    lost = trial.coordinator()
    at = time.monotonic()
    if fault != "killed":
        apart.hosts.down(lost)
    if fault != "cut off":
        apart.hosts.kill(lost)
    trial.until(lambda: trial.coordinator() != lost)
    taken_over = time.monotonic() - at
    trial.until_step(max(trial.steps()) + 1)
    print(f"{fault}: taken over after {taken_over:.1f} s, next step after {time.monotonic() - at:.1f} s")
    assert taken_over < TAKEN_OVER_WITHIN_S
    if fault == "cut off":
        # It has seen that it was succeeded, or that nobody hears it: its ranks are gone, its agent waits.
        assert trial.agents()[lost] in apart.hosts.processes(lost)
        apart.hosts.up(lost)
    apart.end()
    assert_same(trial, undisturbed)
    check_one_at_a_time(trial)


@pytest.mark.long  # in simulation: tests/sim
def test_a_host_that_the_network_leaves_early_does_not_take_over(apart: Apart) -> None:
    """It sees that the coordinator lives, although it looked for it before there was one."""
    trial = apart.train()
    trial.until_event("generation_started")
    cut = next(node for node in range(NODES) if node != trial.coordinator())
    apart.hosts.down(cut)
    apart.end()
    assert trial.events("node_lost")[0]["node"] == cut
    # Once the run is over its coordinator is gone.
    kinds = trial.kinds()
    assert kinds[: kinds.index("run_finished")].count("coordinator_elected") == 1
