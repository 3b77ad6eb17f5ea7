"""Combine parts, in whatever order they finish, into shards and problems in the order of the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data import pool
from seatrial.data.manifest import ShardFile
from seatrial.data.parts import Part
from seatrial.data.readers import MAX_PROBLEMS, foreign_problem, merged
from seatrial.data.tokenise import PartResult, load_part
from seatrial.data.workspace import Done, Reached, Workspace
from seatrial.data.writer import StoreWriter, WorkFolder

# Called with (bytes read, bytes in total, what is being read).
Progress = Callable[[int, int, str], None]


class Team(Protocol):
    """The workers that process the parts."""

    def only_check(self) -> None: ...

    def results(self, parts: Sequence[Part], progress: pool.Progress) -> Iterator[PartResult]: ...


class Assembly:
    """Combines the results of `parts`, starting from what is `done`."""

    def __init__(
        self, space: Workspace, parts: Sequence[Part], done: Done, progress: Progress | None
    ) -> None:
        self._space = space
        self._parts = parts
        self._done = done
        self._reached = done.reached
        self._appending = False
        self._part_begins = 0  # tokens in the store before the part that is being appended
        self._waiting = dict(done.results)
        self._problems: list[Diagnostic] = []
        self._stopped = False  # a part has problems: no store will be made
        self._progress = progress
        self._total = sum(part.size for part in parts)
        # Bytes read of each part in progress; below, the total size of finished parts.
        self._in_progress: dict[int, int] = {}
        self._finished = sum(p.size for p in parts[: done.reached.part])
        self._finished += sum(parts[number].size for number in done.results)
        self.work_folder = WorkFolder(space.folder, done.shards, self._shard_done, space.clear_up)

    def run(self, team: Team, writer: StoreWriter) -> Reached:
        """Have `team` process the missing parts, append everything to `writer`; returns the final counts.

        Raises InputError with the first MAX_PROBLEMS problems of the sources.
        """
        missing = [
            part for part in self._parts[self._reached.part :] if part.number not in self._done.results
        ]
        self._report(missing[0].spans[0].file.name if missing else "what is done")
        self._append_available(writer)
        for result in team.results(missing, self._read):
            self._waiting[result.number] = result
            self._stopped |= bool(result.problems)
            part = self._parts[result.number]
            self._in_progress.pop(part.number, None)
            self._finished += part.size
            self._report(part.spans[-1].file.name)
            self._append_available(writer)
            if self._stopped:
                team.only_check()
        if self._problems:
            raise InputError(merged(self._problems))
        return self._reached

    def _read(self, part: Part, done: int, name: str) -> None:
        self._in_progress[part.number] = done
        self._report(name)

    def _report(self, name: str) -> None:
        if self._progress is not None:
            self._progress(self._finished + sum(self._in_progress.values()), self._total, name)

    def _append_available(self, writer: StoreWriter) -> None:
        """Process the results that are available without a gap."""
        while (result := self._waiting.pop(self._reached.part, None)) is not None:
            part, now = self._parts[result.number], self._reached
            # For a file cut into several parts, these counts continue from one part to the next.
            if not part.goes_on:
                now = replace(now, lines=0, read=0, foreign=0)
            self._problems += [
                problem if problem.line is None else replace(problem, line=problem.line + now.lines)
                for problem in result.problems
            ]
            if len(self._problems) >= MAX_PROBLEMS:
                raise InputError(merged(self._problems)[:MAX_PROBLEMS])
            if not self._stopped:
                self._part_begins = writer.n_tokens - now.tokens
                self._appending, done = True, 0
                for tokens, starts, counted in load_part(result, self._space.parts, writer.dtype):
                    first = max(0, now.tokens - done)  # earlier ones are already in the store
                    of_rest = None if counted is None else counted[first:]
                    writer.append(tokens[first:], starts[starts >= first] - first, of_rest)
                    done += len(tokens)
                self._appending = False
            self._reached = now = _counted(now, result)
            if not self._stopped and (problem := _non_text_problem(part, now)) is not None:
                self._problems.append(problem)
                self._stopped = True

    def _shard_done(self, shards: list[ShardFile]) -> None:
        reached = self._reached
        if self._appending:
            reached = replace(reached, tokens=sum(s.n_tokens for s in shards) - self._part_begins)
        self._space.save(self._parts, reached, shards)


def _non_text_problem(part: Part, reached: Reached) -> Diagnostic | None:
    """The problem if a file split into parts has too many non-text bytes up to `part`."""
    file, last = part.spans[0].file, part.spans[0].end is None
    if last and not part.goes_on:
        return None  # a file in one part: already checked by its reader
    if not last and file.kind == "parquet":
        return None  # the size of its text is known only at its end
    return foreign_problem(file.path, reached.foreign, reached.read if last else file.size)


def _counted(now: Reached, result: PartResult) -> Reached:
    """`now` plus the counts of one more part."""
    replaced = {file: n for file, n in result.replaced.items() if n}
    return Reached(
        part=now.part + 1,
        tokens=0,
        lines=now.lines + result.lines,
        read=now.read + result.read,
        foreign=now.foreign + result.foreign,
        empty=now.empty + result.empty,
        replaced=now.replaced + sum(replaced.values()),
        replaced_files=now.replaced_files + sum(file != now.last_replaced for file in replaced),
        last_replaced=next(reversed(replaced), now.last_replaced),
    )
