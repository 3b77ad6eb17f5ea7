"""Outputs of perftest (ib_write_bw, ib_read_bw, ib_send_lat, ...): text of all versions, JSON old and new, errors.

Formats as printed by github.com/linux-rdma/perftest, perftest_parameters.h. "MB/sec" of old versions is MiB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from seatrial.check.outputs.perftest_json import looks_like_json, parse_json
from seatrial.check.outputs.perftest_judge import inventory, judge
from seatrial.check.outputs.perftest_run import ANY_ERROR, OWN_ERROR, Row, Run, Runs, consistent
from seatrial.check.outputs.tool import Lines, ParseError, Tool

_TITLE = re.compile(
    r"^\s*(?P<verb>(?:RDMA_(?:Write|Read|Atomic)|Write_with_immediate|WRITE_IMM|Send|ATOMIC\w*|Atomic\w*)[\w ]*?)\s*"
    r"(?P<both>Bidirectional )?\s*(?:Post List )?(?P<kind>BW|Latency)\b[\w ]*Test\s*$"
)
_SETTING = re.compile(r"(?:^|\s{2,}|\t)\s*(?P<name>[A-Z][\w.*-]*(?: [\w.*-]+)*)\s*:\s*(?P<value>\S+)")
_COLUMN = re.compile(
    r"#\w+|BW (?:peak|average)\[[^\]]+\]|BW Port\d\[[^\]]+\]|MsgRate(?: Port\d)?\[[^\]]+\]|CPU_Util\[%+\]"
    r"|t_\w+\[usec\]|[\d.]+% percentile\[usec\]|tps average"
)
_HEADER = re.compile(r"^\s*#bytes\s")
_RULE = re.compile(r"^\s*-{20,}\s*$")
_NUMBERS = re.compile(r"^\s*\d+\s+[\d.]")
_ADDRESS = re.compile(r"^\s*(?P<side>local|remote) address:\s*LID (?P<lid>\S+)")
_GID = re.compile(r"^\s*GID:\s*(?P<gid>\S+)")
_NUMBER = re.compile(r"^\d+(?:\.\d+)?$")
_DIRECTION = re.compile(r"^\s*(?P<side>Local|Remote) results:\s*$")  # --report-both, after the sum
# A settings line: its first name fills 16 columns or ends with a tab.
_SETTINGS = re.compile(r"^ ?[A-Za-z](?:[^:\t]{15}|[^:\t]{1,15}\t+ ?): ?\S")
_WAITING = "* Waiting for client to connect..."
# Other lines that client and server print.
_PLAIN = re.compile(
    r"\s*(?:\*+ ?(?:Waiting for client to (?:connect|rejoin)\.\.\. \*)?|Disabling dynamic polling|WARNING: BW peak won't be measured in this run\."
    r"|Conflicting CPU frequency values detected: .{1,80}|Using sampled CPU speed .{1,80}|Connected: .{1,40}|scnt=\d+, ccnt=\d+"
    r"|Perftest doesn't supports? CUDA tests with inline messages: inline size set to 0|(?:initializing|Listing all) CUDA(?: devices in system:)?"
    r"|CUDA device (?:\d+: PCIe address is \S+|integrated: \d)|Picking (?:device No\.|GPU number) \d+|\[pid = \d+, dev = \d+\] device name = \[.{1,60}\]"
    r"|creating CUDA Ctx|making it the current CUDA Ctx|(?:de)?allocat(?:ed|ing) GPU buffer .{0,100}|cuMemAlloc\(\) of a \d+ bytes GPU buffer|destroying current CUDA Ctx)\s*"
)


def matches(text: str) -> bool:
    """Whether the text has a test's title, its column line, its JSON, or an error text that only perftest prints."""
    if looks_like_json(text):
        return True
    if _WAITING in text:
        return True
    lines = text.splitlines() if "Test" in text or "#bytes" in text else []
    return any(_TITLE.match(line) or (_HEADER.match(line) and "[" in line) for line in lines) or (
        OWN_ERROR.search(text) is not None
    )


def parse(lines: Lines, file: str) -> Runs:
    """Parse every run, with its damage. Raises ParseError if there is neither a run nor an error text."""
    if looks_like_json(lines.text):
        return parse_json(lines, file)
    reader = _Reader(file)
    for number, line in lines:
        if reader.read_line(number, line):
            lines.claim(number)
    runs = tuple(reader.finished())
    if not runs and not reader.errors:
        raise ParseError("no perftest test in the output", file=file)
    return Runs(file, runs, tuple(reader.errors))


@dataclass
class _Open:
    """A run that is being parsed."""

    line: int
    run: Run
    columns: list[str] = field(default_factory=list)
    gids: list[str] = field(default_factory=list)
    lids: list[tuple[str, str]] = field(default_factory=list)
    direction: str = ""
    titles: int = 1
    last: list[str] = field(default_factory=list)


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.errors: list[tuple[str, int]] = []
        self._done: list[_Open] = []
        self._open: _Open | None = None
        self._waits: int | None = None  # line of a server that is waiting for a client

    def read_line(self, number: int, line: str) -> bool:
        """Parse one line; False if it is not perftest's."""
        if title := _TITLE.match(line):
            self._title(number, title)
            self._waits = None
            return True
        if ANY_ERROR.search(line):
            self.errors.append((line.strip(), number))
            return True
        self._waits = number if _WAITING in line else self._waits
        now = self._open
        if _PLAIN.fullmatch(line) or (now is None and not _HEADER.match(line)):
            return _PLAIN.fullmatch(line) is not None
        if now is None:
            now = self._open = _Open(number, Run(kind="", line=number))
        if direction := _DIRECTION.match(line):
            now.direction = direction["side"].lower()
            now.run = replace(now.run, complete=False)
        elif _HEADER.match(line):
            if now.columns and now.titles == 1 and not now.direction:
                return False
            self._columns(now, line, number)
        elif _RULE.match(line):
            if now.run.rows and now.run.rows[-1].direction == now.direction:
                now.run = replace(now.run, complete=True)
        elif _NUMBERS.match(line):
            self._row(now, line, number)
        elif address := _ADDRESS.match(line):
            now.lids.append((address["side"], address["lid"]))
        elif gid := _GID.match(line):
            now.gids.append(gid["gid"])
        elif _SETTINGS.match(line) and not now.columns:
            return self._settings(now, line, number)
        else:
            return False
        return True

    def _settings(self, now: _Open, line: str, number: int) -> bool:
        """Parse a settings line; False for a repeated one, unless it is from the other end of a loopback."""
        found = {s["name"].strip().lower(): s["value"] for s in _SETTING.finditer(line)}
        known = now.run.settings
        for name in (n for n, value in found.items() if known.get(n, value) != value):
            now.run = now.run.with_damage(f"`{name}` appears twice with different values", number)
        fresh = not found or not found.keys() <= known.keys() or now.titles > 1
        known.update({n: value for n, value in found.items() if n not in known})
        return fresh

    def _title(self, number: int, title: re.Match[str]) -> None:
        kind = "latency" if title["kind"] == "Latency" else "bandwidth"
        verb = title["verb"].replace("Bidirectional", "").strip()
        both = "Bidirectional" in title[0]
        # Server and client of a loopback test interleave their output in one file: one run, two titles.
        if self._open is not None and not self._open.run.rows and self._open.run.kind in ("", kind):
            self._open.titles += 1
            if self._open.run.verb not in ("", verb) or self._open.run.both_directions != both:
                self._open.run = self._open.run.with_damage(
                    "two different tests start, neither has a result", number
                )
            return
        if self._open is not None:
            self._done.append(self._open)
        self._open = _Open(number, Run(kind=kind, verb=verb, both_directions=both, line=number))

    def _columns(self, now: _Open, line: str, number: int) -> None:
        columns = _COLUMN.findall(line)
        kind = "bandwidth" if any(c.startswith("BW") for c in columns) else "latency"
        average = [c for c in columns if c.startswith("BW average")]
        if kind == "bandwidth" and not average:
            now.run = now.run.with_damage("no column for the average bandwidth", number)
        if now.columns and columns != now.columns:
            now.run = now.run.with_damage("its column line changes", number)
        if now.run.kind and kind != now.run.kind:
            now.run = now.run.with_damage("its columns do not match its test", number)
            return
        now.columns = columns
        unit = average[0][11:-1] if average else ""
        now.run = replace(now.run, kind=kind, unit=unit)

    def _row(self, now: _Open, line: str, number: int) -> None:
        words = line.split()
        if now.run.complete and line.split() != now.last:  # both ends of a loopback print the closing line
            now.run = now.run.with_damage("values after the closing line", number)
            return
        now.last = words
        if not now.columns:
            now.run = now.run.with_damage("values before a column header", number)
            return
        if len(words) != len(now.columns) or not all(_NUMBER.match(w) for w in words):
            now.run = now.run.with_damage("a row that does not fit its columns", number)
            return
        row = Row.of(dict(zip(now.columns, words, strict=True)), now.run.unit, number, now.direction)
        if row is None:
            now.run = now.run.with_damage("a row in an unknown unit", number)
            return
        now.run = replace(now.run, rows=(*now.run.rows, row))
        if not consistent(row):
            now.run = now.run.with_damage("a row with contradictory values", number)

    def finished(self) -> Iterator[Run]:
        for each in (*self._done, *([] if self._open is None else [self._open])):
            run = each.run
            lids = {lid for _, lid in each.lids if int_or(lid)}
            sides = {side for side, _ in each.lids}
            loopback = sides == {"local", "remote"} and (
                (len(lids) == 1 and len(each.lids) > 1 and not each.gids)
                or (len(each.gids) > 1 and len(set(each.gids)) == 1)
            )
            run = replace(run, loopback=loopback)
            if each.titles > 1 and not loopback:
                run = run.with_damage("two tests start that are not the ends of a loopback", run.line)
            if not run.verb:
                run = run.with_damage("the test's title is missing", run.line)
            if "device" not in run.settings:
                run = run.with_damage("the device's name is missing", run.line)
            seen = {row.direction for row in run.rows} | {each.direction}
            if len(seen) == 2 or (seen != {""} and not run.both_directions):
                run = run.with_damage("the result of one direction is missing", each.line)
            if not run.rows:
                run = run.with_damage("no result: the test did not finish, or no client connected", run.line)
            elif (
                each.titles == 1
                and not endless(run)
                and len({(r.direction, r.size_bytes) for r in run.rows}) < len(run.rows)
            ):
                run = run.with_damage("a size is listed twice", run.rows[-1].line)
            elif not run.complete and not endless(run):
                run = run.with_damage("the closing line is missing: truncated", run.rows[-1].line)
            yield run
        if self._waits is not None:
            yield Run(kind="", line=self._waits).with_damage(
                "a server waits for a client: no test has started", self._waits
            )


def endless(run: Run) -> bool:
    """Whether this is `--run_infinitely`, which prints one size repeatedly, and no closing line when it is stopped."""
    return len(run.rows) > 2 and len({row.size_bytes for row in run.rows}) == 1


def int_or(lid: str) -> int:
    """Parse a LID as perftest prints it ("0x01", "0000"); 0 if there is none or it is not a number."""
    try:
        return int(lid, 16)
    except ValueError:
        return 0


_BEGINS = re.compile(
    rf"(?:{_TITLE.pattern[1:-1].replace('?P<verb>', '?:').replace('?P<both>', '?:').replace('?P<kind>', '?:')})$"
    r'|\s*"?test_info"?\s*:|\s*(?:\* Waiting for client|WARNING: BW peak|Disabling dynamic polling|Perftest doesn)'
)
TOOLS = (Tool("perftest", matches, parse, judge, inventory, first_line=_BEGINS),)
