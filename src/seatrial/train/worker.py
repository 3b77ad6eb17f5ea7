"""One rank: `python -m seatrial.train.worker RUN_FOLDER --generation N`, with torchrun's environment.

Every way of starting ranks ends here: forked by the nursery, started by an agent, or by torchrun itself. Without
`--generation` nobody supervises the ranks: they begin a generation of their own.
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
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, SeatrialError
from seatrial.checkpoint.write import PeerSaveFailed
from seatrial.record.folder import RunFolder
from seatrial.train.rank import Place, train_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; the exit code. A failure is written to the rank's error file and its log."""
    parser = argparse.ArgumentParser(prog="seatrial.train.worker", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--generation", type=int, default=None)
    arguments = parser.parse_args(argv)
    folder = RunFolder(arguments.run)
    place = None
    try:
        place = Place.from_environment()
        train_rank(folder, arguments.generation, place)
    except Exception as error:  # noqa: BLE001  the process ends here, whatever it was, and must say why
        return _report(error, folder, arguments.generation or folder.last_generation(), place)
    return EXIT_DONE


# What torch says when another process of the group went away, in gloo's and in NCCL's words.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|connectFullMesh|socket error"
    r"|remote process exited|NCCL .*(unhandled system error|remote error)|store.*(wait|get).*timeout|recv(),? "
    r"failed|Failed to recv",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """Whether `error` only says that some other process went away, or failed.

    The pipeline wraps what happened in its stages in errors of its own, so the whole chain is looked at.
    """
    if isinstance(error, PeerSaveFailed):
        return True
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
    print(error.render() if isinstance(error, SeatrialError) else text, file=sys.stderr, flush=True)
    if place is not None:
        path = folder.rank_error(generation, place.node, place.rank)
        record = {
            "time": when,
            "rank": place.rank,
            "node": place.node,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": None if ours else text,
            "consequence": is_consequence(error),
            "exit_code": code,
            "hint": error.hint if isinstance(error, SeatrialError) else None,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, json.dumps(record))
        except OSError as second:
            print(f"could not write {path}: {second}", file=sys.stderr, flush=True)
        if place.device == "cuda":
            # The ordinary end would wait for collectives that peers will never join, and nobody would hear of this.
            sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
