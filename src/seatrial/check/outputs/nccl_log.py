"""Output of nccl-tests (all_reduce_perf and the others) and of NCCL_DEBUG=INFO: rows, ranks, topology, warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.outputs.tool import Lines, ParseError, lines_of

# Line prefixes that mpirun --tag-output and srun --label add.
_LABEL = re.compile(r"^(?:\[[0-9]+,[0-9]+\]<std(?:out|err)>: ?|[0-9]{1,5}: (?=\s*(?:#|[0-9]|\S+:[0-9]+:)))")
_RANK = re.compile(
    r"Rank\s+(?P<rank>[0-9]{1,6})\s+(?:Group\s+[0-9]+\s+)?Pid\s+[0-9]+ on\s+(?P<host>\S{1,120}) device\s+(?P<device>[0-9]{1,3}) \[(?P<pci>[0-9A-Fa-fx:.]+)\]\s+(?P<name>.{1,80}?)\s*$"
)
_RANGE = re.compile(
    r"(?:nThread (?P<threads>[0-9]{1,4}) nGpus (?P<gpus>[0-9]{1,3}) )?minBytes (?P<least>[0-9]+) maxBytes (?P<most>[0-9]+)(?: step: (?P<step>[0-9]{1,18})\((?P<unit>factor|bytes)\))?"
)
_REDUCED = re.compile(r"Reducing maxBytes to (?P<most>[0-9]+) due to memory limitation")
_START = re.compile(r"Collective test starting: (?P<test>\S+)")
_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(?P<count>[0-9]+)\s*(?P<word>\S+)?")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(?P<value>\S+)(?:\s+(?P<word>\S+))?")
# Start of a run of nccl-tests, and the errors of a run that failed before its table.
_BEGUN = re.compile(
    r"^#?\s*nThread [0-9]+ nGpus [0-9]+ minBytes |: Test NCCL failure \S+:[0-9]+|^NCCL failure \S+:[0-9]+ ",
    re.MULTILINE,
)
# Column names of nccl-tests 1 -> their current names.
_NAMES = {"bytes": "size", "N": "count", "op": "redop", "res": "error"}
_FAILED = re.compile(
    r"Test (?:NCCL |CUDA )?failure|: Test failure|\bNCCL failure\b|unhandled (?:cuda|system) error|FAILED\s*$"
)
_DEBUG = re.compile(
    r"^(?:\[[0-9 :T.Z+-]{10,40}\] )?(?P<host>[^\s:\[]{1,120}):(?P<pid>[0-9]+):(?P<tid>[0-9]+) \[(?P<device>[0-9]{1,3})\] (?P<rest>.*)$"
)
_WARN = re.compile(r"\bNCCL WARN (?P<text>.{1,300})")
_COMM = re.compile(
    r"\brank (?P<rank>[0-9]{1,6}) nRanks (?P<ranks>[0-9]{1,6}) nNodes (?P<nodes>[0-9]{1,6}) localRanks (?P<local>[0-9]{1,4})"
)
_CHANNELS = re.compile(
    r"(?P<coll>[0-9]{1,3}) coll channels,(?: [0-9]+ collnet channels,)?(?: (?P<nvls>[0-9]{1,3}) nvls channels,)?"
)
_NVLS = re.compile(r"NVLS multicast support is (?P<no>not )?available on dev (?P<device>[0-9]{1,3})")
_NETWORK = re.compile(r"Using network (?P<name>\S{1,60})")
# Other lines: titles, units, and the host lists that the scripts of oracle-quickstart/oci-hpc print.
_PLAIN = re.compile(
    r"#?\s*(?:nccl-tests version \S+.*|Collective test concluded: \S+|Using devices|out-of-place\s+in-place|NCCL version \S+"
    r"|\(B\)\s+\(elements\)(?:\s+\((?:us|GB/s|usec)\))+|MACHINEFILE)?\s*"
)
BEGINS = re.compile(
    rf"(?:{_LABEL.pattern[1:]})?(?:#?\s*(?:nccl-tests version \S|Collective test starting: |nThread [0-9]|MACHINEFILE$|size +count +type|Using devices|Rank +[0-9]+ .{0, 40}Pid)|NCCL version [0-9]"
    r"|(?:\[[0-9 :T.Z+-]{10,40}\] )?[^\s:\[]{1,120}:[0-9]+:[0-9]+ \[[0-9]{1,3}\] .{0,80}?NCCL (?:INFO|WARN) )"
)
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,9})?(?:e[+-]?[0-9]{1,4})?")


@dataclass(frozen=True)
class Row:
    """One message size in bytes; bandwidths in GB/s, the better of out and in place. `wrong`: None if unchecked."""

    line: int
    size: int
    algbw: float
    busbw: float
    wrong: float | None


@dataclass(frozen=True)
class Rank:
    """One rank of the run."""

    rank: int
    host: str
    device: int
    gpu: str


@dataclass
class NcclLog:
    """One run. `channels` and `nvls` are by (host, device)."""

    file: str
    test: str | None = None
    rows: list[Row] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    ranks_per_process: int = 1  # the number of ranks must be a multiple of it
    most_bytes: int | None = None
    step: tuple[int, str] | None = None  # from one size to the next: (2, "factor"), or (n, "bytes")
    out_of_bounds: tuple[int, int, bool] | None = None  # line, count, whether it says OK
    average: tuple[int, str, bool] | None = None  # line, text, whether it says FAILED
    failures: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    nodes: dict[int, int] = field(default_factory=dict)  # nNodes -> line
    most_ranks: int = 0  # of a communicator, from NCCL_DEBUG
    hosts: set[str] = field(default_factory=set)  # in the debug lines
    channels: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # channels, line
    nvls: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # NVLS channels, line
    multicast: set[tuple[str, int]] = field(default_factory=set)
    no_multicast: dict[tuple[str, int], int] = field(default_factory=dict)
    network: dict[str, int] = field(default_factory=dict)
    table: bool = False
    later: list[NcclLog] = field(default_factory=list)  # further runs in the same file

    def last_size(self) -> int | None:
        """The largest message that the run was meant to send, as far as known; some tests round sizes down."""
        if self.most_bytes is None or not self.rows:
            return self.most_bytes
        last, (step, unit) = self.rows[-1].size, self.step or (1, "bytes")
        after = last * step if unit == "factor" else last + step
        return last if after > self.most_bytes else self.most_bytes


def is_table(text: str) -> bool:
    """Whether there is a table of nccl-tests, or a run that failed before it."""
    return _BEGUN.search(text[:200_000]) is not None or any(
        _columns(_LABEL.sub("", x)) for x in lines_of(text[:200_000])
    )


def is_debug(text: str) -> bool:
    """Whether there are lines of NCCL_DEBUG and no table."""
    found = (_DEBUG.match(_LABEL.sub("", line)) for line in lines_of(text[:200_000]))
    return any(
        m is not None and re.search(r"\bNCCL (INFO|WARN) ", m["rest"]) for m in found
    ) and not is_table(text)


def _columns(line: str) -> list[str]:
    """The column names, "#wrong" as "wrong"; empty if the line is not the header of the table."""
    words = [_NAMES.get(w, w) for w in (w.lstrip("#") for w in line.split()) if w]
    return words if words[:2] == ["size", "count"] and "busbw" in words and "algbw" in words else []


def parse(lines: Lines, file: str) -> NcclLog:
    """Parse all runs. Raises ParseError if there is neither a run of nccl-tests nor a line of NCCL_DEBUG."""
    log = first = NcclLog(file, table=_BEGUN.search(lines.text) is not None)
    columns: list[str] = []
    names: list[tuple[int, str]] = []
    seen_debug = False
    for number, raw in lines:
        line = _LABEL.sub("", raw)
        if (found := _DEBUG.match(line)) and "NCCL" in found["rest"]:
            seen_debug = True
            _debug(log, found, number)
            lines.claim(number)
            continue
        if (log.rows or log.average) and _begins(line):
            log, columns = NcclLog(file, table=True), []
            first.later.append(log)
        words = line.split()
        if head := _columns(line):
            known, columns, log.table = not columns, head, True
        elif columns and words and _NUMBER.fullmatch(words[0]) and not line.lstrip().startswith("#"):
            row = _row(columns, words, number)
            # Sizes grow within a run; a row whose size does not grow belongs to another run.
            known = row is not None and (not log.rows or row.size > log.rows[-1].size)
            log.rows += [] if row is None else [row]
        else:
            known = _plain(log, line, number)
        if known:
            lines.claim(number)
        elif len(words) == 1:
            names.append((number, words[0]))
    hosts = {r.host for run in (first, *first.later) for r in run.ranks}
    lines.claim(*(number for number, name in names if name in hosts))
    if not first.table and not seen_debug:
        raise ParseError("neither a table of nccl-tests nor a line of NCCL_DEBUG", file=file)
    return first


def _begins(line: str) -> bool:
    """Whether a line precedes the table of a run."""
    rank = _RANK.search(line)
    return any((_START.search(line), _RANGE.search(line), _columns(line), rank and int(rank["rank"]) == 0))


def _plain(log: NcclLog, line: str, number: int) -> bool:
    """Parse a line outside the table. False if it does not belong to this run: a run prints each line once."""
    first = True
    if found := _RANK.search(line):
        first = int(found["rank"]) == len(log.ranks)
        log.ranks.append(Rank(int(found["rank"]), found["host"], int(found["device"]), found["name"]))
    elif found := _RANGE.search(line):
        first = log.most_bytes is None
        log.most_bytes = int(found["most"])
        log.step = None if found["step"] is None else (int(found["step"]), found["unit"])
        log.ranks_per_process = int(found["threads"] or 1) * int(found["gpus"] or 1) or 1
    elif found := _REDUCED.search(line):
        log.most_bytes = int(found["most"])
    elif found := _START.search(line):
        first = log.test is None
        log.test = found["test"]
    elif found := _BOUNDS.search(line):
        first = log.out_of_bounds is None
        log.out_of_bounds = (number, int(found["count"]), found["word"] == "OK")
    elif (found := _AVERAGE.search(line)) and found["word"] in (None, "OK", "FAILED"):
        first = log.average is None
        log.average = (number, found["value"], found["word"] == "FAILED")
    elif _FAILED.search(line):
        log.failures.append((number, line.strip()[:200]))
    else:
        return _PLAIN.fullmatch(line) is not None
    return first


def _row(columns: list[str], words: list[str], number: int) -> Row | None:
    """One row by the names of its columns; None if it does not fit them."""
    # Tests without an operation leave its column empty in older versions.
    if (
        "redop" in columns
        and len(words) == len(columns) - 1
        and _NUMBER.fullmatch(words[columns.index("redop")])
    ):
        columns = [c for c in columns if c != "redop"]
    if len(words) != len(columns):
        return None
    groups: list[dict[str, str]] = [{}]
    for name, word in zip(columns, words, strict=True):
        if name in ("time", "cputime"):
            groups.append({})  # out of place, then in place
        groups[-1][name] = word
    if not words[0].isdecimal() or len(groups) < 2:
        return None
    best: tuple[float, float] = (-1.0, -1.0)
    wrong: float | None = None
    for group in groups[1:]:
        bus, alg, bad = (group.get(k, "") for k in ("busbw", "algbw", "wrong"))
        if "error" in group and not bad:
            bad = "0" if _small(group["error"]) else group["error"]
        if (
            not _NUMBER.fullmatch(bus)
            or not _NUMBER.fullmatch(alg)
            or not (bad == "N/A" or _NUMBER.fullmatch(bad))
        ):
            return None
        best = max(best, (float(bus), float(alg)))
        if bad != "N/A":
            wrong = (wrong or 0.0) + float(bad)
    return Row(number, int(words[0]), best[1], best[0], wrong) if best[0] >= 0 else None


def _small(error: str) -> bool:
    # Older versions print the largest relative difference; nccl-tests accepts up to 1e-2 for half and 1e-5 for float.
    return _NUMBER.fullmatch(error) is not None and abs(float(error)) < 1e-2


def _debug(log: NcclLog, found: re.Match[str], number: int) -> None:
    rest, where = found["rest"], (found["host"], int(found["device"]))
    log.hosts.add(found["host"])
    if warning := _WARN.search(rest):
        log.warnings.append((number, warning["text"].strip()))
    elif comm := _COMM.search(rest):
        log.nodes.setdefault(int(comm["nodes"]), number)
        log.most_ranks = max(log.most_ranks, int(comm["ranks"]))
    elif channels := _CHANNELS.search(rest):
        log.channels[where] = (int(channels["coll"]), number)
        if channels["nvls"] is not None:
            log.nvls[where] = (int(channels["nvls"]), number)
    elif nvls := _NVLS.search(rest):
        if nvls["no"]:
            log.no_multicast[where] = number
        else:
            log.multicast.add(where)
    elif network := _NETWORK.search(rest):
        log.network.setdefault(network["name"], number)
