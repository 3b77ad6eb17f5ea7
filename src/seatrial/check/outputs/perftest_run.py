"""Data of a perftest run, and the error texts that perftest prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from seatrial.check.judging.findings import Verdict

_GBIT_S = {"Gb/sec": 1.0, "MB/sec": 2**20 * 8 / 1e9, "MiB/sec": 2**20 * 8 / 1e9}


@dataclass(frozen=True)
class Row:
    """One line of results: bandwidth in Gb/s as printed (with -b the sum of both directions), times in µs."""

    size_bytes: int
    iterations: int
    gbit_s: float | None
    messages_m_s: float | None  # millions of messages a second
    # The relative rounding error of both printed figures, which limits how well they agree.
    printed_step: float
    times_us: Mapping[str, float]  # "min", "max", "typical", "avg", "99", "99.9"
    line: int
    direction: str = ""  # "local" or "remote" if it is one of two (--report-both)
    ports_gbit_s: tuple[float, ...] = ()  # per port if `gbit_s` is the sum of two (--report-per-port)

    @classmethod
    def of(cls, values: Mapping[str, str], unit: str, line: int, direction: str = "") -> Row | None:
        """Build a row from column name -> text; None if the unit of the bandwidth is unknown."""
        average = next((v for name, v in values.items() if name.startswith("BW average")), None)
        if average is not None and unit not in _GBIT_S:
            return None
        rate = next((v for name, v in values.items() if name.startswith("MsgRate[")), None)
        return cls(
            int(float(values["#bytes"])),
            int(float(values.get("#iterations", "0"))),
            None if average is None else float(average) * _GBIT_S[unit],
            None if rate is None else float(rate),
            _step(average) + _step(rate),
            {_time(name): float(v) for name, v in values.items() if "[usec]" in name},
            line,
            direction,
            tuple(float(v) * _GBIT_S[unit] for name, v in values.items() if name.startswith("BW Port")),
        )


def _step(text: str | None) -> float:
    """Half of the last digit of a printed number, relative to the number."""
    if text is None or not float(text):
        return 0.0
    decimals = len(text.partition(".")[2])
    return float(0.5 * 10.0**-decimals / float(text))


def _time(column: str) -> str:
    name = column.removesuffix("[usec]").strip()
    return name.removeprefix("t_").removesuffix("% percentile")


def consistent(row: Row) -> bool:
    """Whether the figures of a row agree: rate x size is the bandwidth; minimum, typical and maximum are in order."""
    if row.gbit_s is not None and row.messages_m_s is not None:
        carried = row.messages_m_s * row.size_bytes * 8 / 1e3
        if abs(carried - row.gbit_s) > max(0.005, 2 * row.printed_step) * row.gbit_s:
            return False
    times = row.times_us
    order = [times[k] for k in ("min", "typical", "99", "99.9", "max") if k in times]
    if order != sorted(order):
        return False
    return not {"min", "avg", "max"} <= times.keys() or times["min"] <= times["avg"] <= times["max"]


@dataclass(frozen=True)
class Run:
    """One test, from its title to its closing line."""

    kind: str  # "bandwidth", "latency", "" if unknown
    line: int
    verb: str = ""  # "RDMA_Write", "RDMA_Read", "Send", ...
    both_directions: bool = False
    unit: str = ""
    loopback: bool = False
    complete: bool = False
    rows: tuple[Row, ...] = ()
    # "device", "number of qps", "link type", in small letters.
    settings: dict[str, str] = field(default_factory=dict)
    damage: tuple[tuple[str, int | None], ...] = ()

    @property
    def device(self) -> str | None:
        return self.settings.get("device")

    @property
    def two_ports(self) -> bool:
        """Whether the test uses both ports of the device, whose bandwidths are added."""
        return "ON" in (self.settings.get("dual-port"), self.settings.get("dual port"))

    @property
    def queue_pairs(self) -> int:
        text = self.settings.get("number of qps", "1")
        return int(text) if text.isdecimal() else 1

    @property
    def name(self) -> str:
        """Name of the command: "ib_write_bw"."""
        verb = self.verb.lower().removeprefix("rdma_").split("_")[0] or "?"
        return f"ib_{verb}_{'lat' if self.kind == 'latency' else 'bw'}"

    def with_damage(self, problem: str, line: int | None) -> Run:
        """Copy of this run with one more problem in `damage`."""
        return replace(self, damage=(*self.damage, (problem, line)))


@dataclass(frozen=True)
class Runs:
    """All runs of one file. `errors`: perftest's own error texts, with their lines."""

    file: str
    runs: tuple[Run, ...]
    errors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Error:
    """An error text of perftest. `own`: only perftest prints it, so the text alone identifies the tool."""

    pattern: re.Pattern[str]
    code: str
    verdict: Verdict
    message: str
    own: bool = True
    symptom: bool = False  # follows from another error that says more


def _error(
    pattern: str, code: str, verdict: Verdict, message: str, own: bool = True, symptom: bool = False
) -> Error:
    return Error(re.compile(pattern), code, verdict, message, own, symptom)


# The first entry that matches a line counts. Texts: github.com/linux-rdma/perftest, src/, all versions since 3.0.
ERRORS: tuple[Error, ...] = (
    _error(
        r"Couldn't connect to (?P<peer>\S+?):(?P<port>\d+)", "NET006", "FAIL", "no server responded at the peer"
    ),
    _error(r"Unable to resolve|getaddrinfo.*for (?P<peer>\S+):\d+|[^\n]{0,80}for ai_family: .* service:", "NET006", "FAIL", "the peer's name could not be resolved"),
    _error(
        r"Did not detect devices|Unable to find the Infiniband/RoCE device|No IB devices found",
        "NET007",
        "UNJUDGED",
        "this host shows no RDMA device",
    ),
    _error(r"If device exists, check if driver is up", "NET007", "UNJUDGED", "this host shows no RDMA device", symptom=True),
    _error(r"IB device (?P<device>\S+) not found", "NET007", "FAIL", "the requested device does not exist"),
    _error(r"Port number (?P<number>\d+) state is (?P<state>\w+)", "NET001", "FAIL", "the port is not active"),
    _error(
        r"Completion with error|Failed status (?P<status>\d+): ?wr_id|Bad wc status|Completion with status|syndrom 0x",
        "NET012",
        "FAIL",
        "a transfer ended with an error",
    ),
    _error(
        r"Couldn't allocate MR|Couldn't create MR|Failed to create MR|failed to allocate memory region",
        "NET006",
        "FAIL",
        "memory could not be registered, most likely because of the locked-memory limit",
    ),
    _error(r"Failed to modify (?:XRC )?QP.* to (?:INIT|RTR|RTS)|Failed to modify QP", "NET006", "FAIL", "the two sides could not be connected (GID index, MTU, partition key)"),
    _error(r"[\w ]{1,40}mismatch: local=|Current implementation is not compatible with versions", "NET006", "UNJUDGED", "the two sides run different versions or settings"),
    _error(r"[Vv]ersions? (?:are )?mismatch", "NET006", "UNJUDGED", "the two sides run different versions or settings", own=False),
    _error(
        r"Unable to create QP|Failed to create QP",
        "NET006",
        "FAIL",
        "the queue pair could not be created (too much inline data for this device, or the locked-memory limit)",
    ),
    _error(r"Couldn't create IB resources|Unable to Connect the HCA's through the link", "NET006", "FAIL", "it ended with an error", symptom=True),
    _error(
        r"Parser function exited with Error|Message Size should be between|is an invalid option|Invalid (?:Connection|Command)",
        "NET006",
        "UNJUDGED",
        "it was called with unknown options",
    ),
    _error(
        r"Unable to init the socket connection|Unable to open file descriptor for socket|Exchanging .* failed|Failed to exchange"
        r"|Couldn't listen to port|accept\(\) failed|Couldn't read remote address|Couldn't parse line <",
        "NET006",
        "FAIL",
        "the two sides could not communicate over their TCP connection",
        symptom=True,
    ),
    _error(
        r"^\s*(?:Couldn't|Failed to|Unable to|Failed:) (?:get context|query port|query device|create|allocate|set up|post|request CQ|"
        r"negotiate|set the link layer|open device|run)",
        "NET006",
        "FAIL",
        "it ended with an error",
        own=False,
        symptom=True,
    ),
)  # fmt: skip


def _any_of(errors: Iterable[Error]) -> str:
    return "|".join(re.sub(r"\?P<\w+>", "?:", e.pattern.pattern) for e in errors)


# One search instead of one per pattern. An error text identifies the tool only at the start of a line: inside a line of
# a log it is another program's.
ANY_ERROR = re.compile(_any_of(ERRORS), re.MULTILINE)
OWN_ERROR = re.compile(rf"^[ \t]*(?:{_any_of(e for e in ERRORS if e.own)})", re.MULTILINE)


def classify(text: str) -> tuple[Error, re.Match[str]]:
    """The first of ERRORS that matches a line, and the match; the line must match one."""
    for error in ERRORS:
        if found := error.pattern.search(text):
            return error, found
    raise AssertionError(f"not an error text: {text!r}")
