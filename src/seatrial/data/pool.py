"""Turn parts into results, in this process or in several; in whatever order they finish."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from seatrial.base.errors import RunFailed
from seatrial.base.lines import Channel
from seatrial.base.process import python, status_text
from seatrial.data import readers
from seatrial.data.parts import Part
from seatrial.data.readers import Reader
from seatrial.data.tokenise import PartResult, tokenise_part
from seatrial.data.tokenizer import Tokenizer, digest_with_template

# Each process uses one core. Without these a tokenizer would start as many threads as there are cores in each.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

# Called with (part, bytes of it that have been read, what is being read).
Progress = Callable[[Part, int, str], None]


@dataclass(frozen=True)
class Work:
    """Settings shared by all parts."""

    tokenizer_spec: str
    tokenizer: Tokenizer
    text_key: str
    folder: Path  # of the parts' files


class InProcess:
    """Processes the parts in this process, in sequence. The tokenizer may use every core with threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._only_check = False

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def only_check(self) -> None:
        """From now on only read parts, to find problems."""
        self._only_check = True

    def results(self, parts: Sequence[Part], progress: Progress) -> Iterator[PartResult]:
        """The result of each of `parts`; OSError if one cannot be written."""
        work = self._work
        reader = Reader(work.text_key, work.folder, chat=work.tokenizer.chat)
        for part in parts:

            def report(done: int, name: str, part: Part = part) -> None:
                progress(part, done, name)

            yield tokenise_part(
                part, reader, work.tokenizer, work.folder, report, only_check=self._only_check
            )


class Pool:
    """Context manager: `n` processes that process parts in parallel; they end with this process, however it ends."""

    def __init__(self, work: Work, n: int) -> None:
        self._work = work
        self._n = n
        self._only_check = False
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        try:
            while len(self._workers) < self._n:
                self._workers.append(_Worker(self._work))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def only_check(self) -> None:
        """From now on only read parts, to find problems."""
        self._only_check = True

    def results(self, parts: Sequence[Part], progress: Progress) -> Iterator[PartResult]:
        """The results of `parts`, each as soon as it is available; OSError if one cannot be written.

        RunFailed if a process ended before its work was done.
        """
        waiting = list(reversed(parts))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            busy = sum(self._give(worker, waiting) for worker in self._workers)
            while busy:
                for key, _ in selector.select():
                    worker = key.data
                    for result in worker.results(progress):
                        busy -= 1
                        # Before the result is used, so that the worker does not wait for us.
                        busy += self._give(worker, waiting)
                        yield result

    def _give(self, worker: _Worker, waiting: list[Part]) -> bool:
        if not waiting:
            return False
        worker.give(waiting.pop(), only_check=self._only_check)
        return True


class _Worker:
    def __init__(self, work: Work) -> None:
        self.channel, theirs = Channel.pair()
        self._part: Part | None = None
        try:
            self._process = subprocess.Popen(
                python(
                    "seatrial.data.part_worker",
                    "--channel",
                    str(theirs.fileno()),
                    "--parent",
                    str(os.getpid()),
                ),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.channel.send(
            {
                "tokenizer": work.tokenizer_spec,
                "tokenizer_digest": digest_with_template(work.tokenizer),
                "text_key": work.text_key,
                "piece_bytes": readers.PIECE_BYTES,
                "folder": str(work.folder),
            }
        )

    def give(self, part: Part, *, only_check: bool) -> None:
        self._part = part
        self.channel.send({"part": part.as_json(), "only_check": only_check})

    def results(self, progress: Progress) -> Iterator[PartResult]:
        for message in self.channel.receive():
            if "failed" in message:
                raise OSError(message.get("errno"), message["failed"])
            assert self._part is not None
            if "result" in message:
                yield PartResult.from_json(message["result"])
            else:
                progress(self._part, message["done"], message["name"])
        if self.channel.closed:
            raise RunFailed(
                f"a tokeniser process {status_text(self._process.wait())}",
                hint="if the kernel killed it for memory, use fewer --workers; run the same command again: finished work "
                "is kept",
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()
