"""One rank: `python -m seatrial.train.worker RUN_FOLDER --generation N`, with torchrun's environment.

The entry point of every rank: forked by the fork server, started by an agent, or by torchrun. An agent
(SEATRIAL_SUPERVISOR in the environment) tells it which rank of which generation it is, possibly several times.
Without one it is unsupervised: the ranks start a generation themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.complain import complain
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, SeatrialError
from seatrial.base.process import make_log_folder, open_log
from seatrial.checkpoint.write import PeerSaveFailed
from seatrial.record import messages as msg
from seatrial.record.failure import RankError
from seatrial.record.folder import RunFolder
from seatrial.train.generation import GenerationSpec, TrainWorker
from seatrial.train.health.replicas import CorruptState
from seatrial.train.rank import RankEnvironment, train_rank
from seatrial.train.supervision.supervisor_client import SupervisorClient


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; returns the exit code. A failure is written to the rank's error file and its log."""
    parser = argparse.ArgumentParser(prog="seatrial.train.worker", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--generation", type=int, default=None)
    arguments = parser.parse_args(argv)
    folder = RunFolder(arguments.run)
    supervisor_client = SupervisorClient.from_environment()
    if supervisor_client is not None:
        return _serve(folder, supervisor_client)
    environment = None
    try:
        environment = RankEnvironment.from_environment()
        train_rank(folder, arguments.generation, environment)
    except Exception as error:  # noqa: BLE001  the process's last frame: every error must be reported
        return _report(error, folder, arguments.generation or folder.last_generation(), environment)
    return EXIT_DONE


def _serve(folder: RunFolder, supervisor_client: SupervisorClient) -> int:
    """Run the generations that the agent orders; returns the exit code."""
    worker: TrainWorker | None = None
    log: Path | None = None
    while (order := supervisor_client.next_order()) is not None:
        if isinstance(order, msg.Exit):
            return order.code
        generation_spec = GenerationSpec.from_message(order)
        if log is not None and log != generation_spec.log:
            try:
                _reopen_log(generation_spec.log)
            except OSError as error:  # a full disk: keep writing to the old one
                complain(f"could not open {generation_spec.log}: {error}")
        log = generation_spec.log
        try:
            if worker is None:
                worker = TrainWorker(folder, supervisor_client, generation_spec.inputs)
            how = worker.run(generation_spec)
        except Exception as error:  # noqa: BLE001  any exception ends this generation and must be reported
            left = supervisor_client.abandoned or is_consequence(error, generation_spec.environment.rank)
            if worker is None or not worker.can_park or not left:
                return _report(error, folder, generation_spec.generation, generation_spec.environment)
            complain(f"generation {generation_spec.generation} is over: {error}")
            message = str(error)
            traceback.clear_frames(error.__traceback__)  # they reference the model, and with it the groups
            del error
            supervisor_client.parked(worker.keep(), message)
            continue
        supervisor_client.finished(how, worker.step)
        if how == "done":
            return EXIT_DONE
    return EXIT_FAILED


def _reopen_log(path: Path) -> None:
    """Redirect stdout and stderr of this process to `path`."""
    make_log_folder(path)
    sys.stdout.flush()
    sys.stderr.flush()
    fd = open_log(path)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


# Error messages of gloo and NCCL when another process of the group has exited.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|connectFullMesh|socket error"
    r"|remote process exited|NCCL .*(unhandled system error|remote error)|store.*(wait|get).*timeout"
    r"|the store's port was taken|recv\(\),? "
    r"failed|Failed to recv",
    re.IGNORECASE,
)


def is_consequence(error: BaseException, rank: int | None = None) -> bool:
    """Whether `error` only follows from another process's exit or failure; `rank` is this one.

    Pipelining wraps the errors of its stages, so the whole chain is examined.
    """
    if isinstance(error, PeerSaveFailed):
        return True
    if isinstance(error, CorruptState):
        return rank not in error.blamed  # it is raised in all ranks
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, RuntimeError | ConnectionError) and _PEER_GONE.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _report(error: Exception, folder: RunFolder, generation: int, environment: RankEnvironment | None) -> int:
    when = time.time()
    text = "".join(traceback.format_exception(error))
    ours = isinstance(error, SeatrialError)
    code = error.exit_code if isinstance(error, SeatrialError) else EXIT_FAILED
    complain(error.render() if isinstance(error, SeatrialError) else text)
    if environment is not None:
        path = folder.rank_error(generation, environment.node, environment.rank)
        record = RankError(
            time=when,
            rank=environment.rank,
            node=environment.node,
            type=type(error).__name__,
            message=str(error),
            traceback=None if ours else text,
            consequence=is_consequence(error, environment.rank),
            exit_code=code,
            hint=error.hint if isinstance(error, SeatrialError) else None,
        )
        try:
            make_log_folder(path)
            atomic.write_text(path, json.dumps(vars(record)))
        except OSError as second:
            complain(f"could not write {path}: {second}")
        if environment.device != "cpu":
            # A normal exit would wait for collectives that peers never join.
            sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
