"""One rank: `python -m seatrial.train.worker RUN_FOLDER --generation N`, with torchrun's environment.

Every way of starting ranks ends here: forked by the nursery, started by an agent, or by torchrun itself. With an
agent (SEATRIAL_ATTENDANT in the environment) it is told which rank of which generation it is, perhaps several times.
Without one nobody supervises it: the ranks begin a generation of their own.
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
from seatrial.checkpoint.write import PeerSaveFailed
from seatrial.record.folder import RunFolder
from seatrial.train.attendant import Attendant
from seatrial.train.leg import Leg, Worker
from seatrial.train.rank import Place, train_rank
from seatrial.train.replicas import CorruptState


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; the exit code. A failure is written to the rank's error file and its log."""
    parser = argparse.ArgumentParser(prog="seatrial.train.worker", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--generation", type=int, default=None)
    arguments = parser.parse_args(argv)
    folder = RunFolder(arguments.run)
    attendant = Attendant.from_environment()
    if attendant is not None:
        return _serve(folder, attendant)
    place = None
    try:
        place = Place.from_environment()
        train_rank(folder, arguments.generation, place)
    except Exception as error:  # noqa: BLE001  the process ends here, whatever it was, and must say why
        return _report(error, folder, arguments.generation or folder.last_generation(), place)
    return EXIT_DONE


def _serve(folder: RunFolder, attendant: Attendant) -> int:
    """One leg after the other, as the agent orders; the exit code."""
    worker: Worker | None = None
    log: Path | None = None
    while (order := attendant.next_order()) is not None:
        if "exit" in order:
            return int(order["exit"])
        leg = Leg.from_message(order["leg"])
        if log is not None and log != leg.log:
            try:
                _reopen_log(leg.log)
            except OSError as error:  # a full disk: the old one takes what it can
                complain(f"could not open {leg.log}: {error}")
        log = leg.log
        try:
            if worker is None:
                worker = Worker(folder, attendant, leg.inputs)
            how = worker.run(leg)
        except Exception as error:  # noqa: BLE001  whatever it was, it ends this leg and must be told
            left = attendant.abandoned or is_consequence(error, leg.place.rank)
            if worker is None or not worker.can_park or not left:
                return _report(error, folder, leg.generation, leg.place)
            complain(f"generation {leg.generation} is over: {error}")
            message = str(error)
            traceback.clear_frames(error.__traceback__)  # they hold the model, and with it the groups
            del error
            attendant.parked(worker.keep(), message)
            continue
        attendant.finished(how, worker.step)
        if how == "done":
            return EXIT_DONE
    return EXIT_FAILED


def _reopen_log(path: Path) -> None:
    """From now on stdout and stderr of this process go to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


# What torch says when another process of the group went away, in gloo's and in NCCL's words.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|connectFullMesh|socket error"
    r"|remote process exited|NCCL .*(unhandled system error|remote error)|store.*(wait|get).*timeout"
    r"|the store's port was taken|recv\(\),? "
    r"failed|Failed to recv",
    re.IGNORECASE,
)


def is_consequence(error: BaseException, rank: int | None = None) -> bool:
    """Whether `error` only says that some other process went away, or failed; `rank` is our own.

    The pipeline wraps what happened in its stages in errors of its own, so the whole chain is looked at.
    """
    if isinstance(error, PeerSaveFailed):
        return True
    if isinstance(error, CorruptState):
        return rank not in error.blamed  # all ranks stop alike for it
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, RuntimeError | ConnectionError) and _PEER_GONE.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _report(error: Exception, folder: RunFolder, generation: int, place: Place | None) -> int:
    when = time.time()
    text = "".join(traceback.format_exception(error))
    ours = isinstance(error, SeatrialError)
    code = error.exit_code if isinstance(error, SeatrialError) else EXIT_FAILED
    complain(error.render() if isinstance(error, SeatrialError) else text)
    if place is not None:
        path = folder.rank_error(generation, place.node, place.rank)
        record = {
            "time": when,
            "rank": place.rank,
            "node": place.node,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": None if ours else text,
            "consequence": is_consequence(error, place.rank),
            "exit_code": code,
            "hint": error.hint if isinstance(error, SeatrialError) else None,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, json.dumps(record))
        except OSError as second:
            complain(f"could not write {path}: {second}")
        if place.device == "cuda":
            # The ordinary end would wait for collectives that peers will never join, and nobody would hear of this.
            sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
