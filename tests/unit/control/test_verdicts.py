"""What the user is told of an end: who failed of itself, and who only followed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from seatrial.control.coordinator.verdicts import ProcessFailure, Verdicts
from seatrial.control.machine.types import Finish
from seatrial.record import messages as msg
from seatrial.record.failure import Failure, RankError
from seatrial.record.folder import RunFolder


@pytest.fixture
def verdicts(tmp_path: Path) -> Verdicts:
    made = Verdicts(RunFolder(tmp_path))
    made.generation_started(3)
    return made


def exited(rank: int = 2, status: int = 1, **more: Any) -> msg.RankExited:
    values: dict[str, Any] = {"generation": 3, "local": 0, "pid": 5, "time": 100.0, "signalled": None}
    values |= {"oom_killed": False, "ran": True, "never_began": False, "log": "rank.log"}
    return msg.RankExited(rank=rank, status=status, **values | {"tail": "last words"} | more)


def error(kind: str = "ValueError", message: str = "no", **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "time": 99.0,
        "rank": 2,
        "node": 1,
        "type": kind,
        "message": message,
        "traceback": "Traceback",
    }
    return {"error": RankError(**values | {"consequence": False, "exit_code": 1, "hint": None} | more)}


CONSEQUENCE = error("RuntimeError", "Connection closed by peer", consequence=True)


def failed(verdicts: Verdicts, message: str = "too few nodes") -> Failure:
    outcome = verdicts.outcome(Finish("failed", message), term=4)
    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.term) == (outcome.failure.exit_code, 4)
    return outcome.failure


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (exited(status=7), ("worker_exit", "ended with exit code 7", False)),
        (exited(status=-signal.SIGKILL), ("worker_killed", "was killed by SIGKILL", False)),
        (
            exited(status=-signal.SIGKILL, oom_killed=True),
            ("oom", "was killed by SIGKILL (out of memory)", False),
        ),
        (exited(status=-signal.SIGSEGV), ("worker_crash", "was killed by SIGSEGV", False)),
        (exited(**error()), ("app_error", "ValueError: no", False)),
        (exited(**CONSEQUENCE), ("peer_lost", "RuntimeError: Connection closed by peer", True)),
    ],
    ids=["exit", "killed", "oom", "crash", "error", "consequence"],
)
def test_an_end_and_its_signal(verdicts: Verdicts, values: msg.RankExited, wanted: Any) -> None:
    ended = verdicts.process_ended(1, values)
    assert isinstance(ended, ProcessFailure)
    assert (ended.signal, ended.cause, ended.consequence) == wanted
    assert ended.message.startswith("rank 2 on node 1 ")
    assert ended.event == "rank_failed"


@pytest.mark.parametrize(
    "values",
    [
        exited(status=0),
        exited(status=-9, signalled=99.0),
        exited(signalled=90.0, **error()),  # it failed after it was told to stop
        exited(never_began=True),
        exited(generation=2),
    ],
    ids=["in order", "killed by us", "failed when stopped", "never began", "of another generation"],
)
def test_what_is_not_a_failure(verdicts: Verdicts, values: msg.RankExited) -> None:
    assert verdicts.process_ended(1, values) is None
    assert failed(verdicts).rank is None


def test_an_error_before_our_signal_counts(verdicts: Verdicts) -> None:
    ended = verdicts.process_ended(1, exited(signalled=99.5, **error()))
    assert ended is not None
    assert failed(verdicts).cause == "ValueError: no"


def test_an_exit_just_before_our_signal_counts_in_the_outcome(verdicts: Verdicts) -> None:
    """While ranks are being stopped it is no news, but it may be why the run failed."""
    assert verdicts.process_ended(1, exited(status=-9, signalled=100.5)) is None
    assert failed(verdicts).message == "rank 2 on node 1 was killed by SIGKILL"


def test_a_fork_server_is_its_nodes_failure(verdicts: Verdicts) -> None:
    ended = verdicts.process_ended(1, msg.ForkServerExited(5, -9, 100.0, oom_killed=False, generation=3))
    assert ended is not None
    assert (ended.event, ended.cause) == ("nursery_failed", "its fork server was killed by SIGKILL")
    failure = failed(verdicts)
    assert (failure.node, failure.rank) == (1, None)
    assert failure.cause == "the fork server was killed by SIGKILL"


def test_of_many_failures_the_root_failure_is_reported(verdicts: Verdicts) -> None:
    verdicts.process_ended(0, exited(rank=0, time=98.0, **CONSEQUENCE))
    verdicts.process_ended(1, exited(rank=3, status=-9))
    failure = failed(verdicts, "rank 3 has failed 3 times")
    assert failure.message == "rank 3 on node 1 was killed by SIGKILL"
    assert (failure.node, failure.rank, failure.log, failure.tail) == (
        1,
        3,
        "rank.log",
        "last words",
    )


def test_a_lost_node_goes_before_those_that_missed_it(verdicts: Verdicts) -> None:
    """Where ranks cannot park, all others fail by it."""
    verdicts.process_ended(0, exited(rank=0, **CONSEQUENCE))
    assert failed(verdicts).rank == 0
    verdicts.node_lost(1, "its agent exited")
    failure = failed(verdicts)
    assert (failure.node, failure.rank, failure.cause) == (1, None, "its agent exited")
    assert failure.hint == "too few nodes"
    verdicts.process_ended(0, exited(rank=1, status=9))
    assert failed(verdicts).rank == 1, "but not before a failure of its own"


def test_the_blamed_node_is_named_if_no_process_failed_by_itself(verdicts: Verdicts) -> None:
    """A rank that hangs is killed by us: its end tells nothing."""
    verdicts.blamed(1, 3, "is stopped by a signal")
    verdicts.blamed(0, 1, "a consequence of that")
    verdicts.process_ended(1, exited(rank=3, status=-9, signalled=99.0))
    failure = failed(verdicts, "is stopped by a signal")
    assert (failure.node, failure.rank) == (1, 3)
    assert failure.message == "rank 3 on node 1: is stopped by a signal"
    assert "coordinator.log" in failure.hint


def test_without_a_culprit_no_node_or_rank_is_named(verdicts: Verdicts) -> None:
    failure = failed(verdicts, "too few nodes: 1 are usable, 2 are needed")
    assert (failure.node, failure.rank) == (None, None)
    assert failure.message == "too few nodes: 1 are usable, 2 are needed"


def test_a_new_generation_begins_without_old_failures(verdicts: Verdicts) -> None:
    verdicts.process_ended(1, exited(status=7))
    verdicts.node_lost(1, "its agent exited")
    verdicts.blamed(1, 2, "slow")
    verdicts.generation_started(4)
    assert failed(verdicts).node is None
    assert verdicts.process_ended(1, exited(status=7)) is None


def test_bad_input_keeps_its_exit_code_and_words(verdicts: Verdicts) -> None:
    values = error("InputError", "the port is in use", exit_code=2, hint="choose another", traceback=None)
    verdicts.process_ended(0, exited(rank=0, status=2, **values))
    failure = failed(verdicts)
    assert (failure.exit_code, failure.cause, failure.hint) == (
        2,
        "the port is in use",
        "choose another",
    )


@pytest.mark.parametrize(("how", "code"), [("done", 0), ("preempted", 75), ("interrupted", 130)])
def test_ends_in_order_have_no_failure(verdicts: Verdicts, how: Any, code: int) -> None:
    verdicts.process_ended(1, exited(status=7))
    assert verdicts.outcome(Finish(how, ""), 1) == msg.Outcome(code, 1, None)
