"""Taking nodes that failed away from a scheduler: Slurm's drain, Kubernetes' taint. As commands to read, or carried out.

Deciding and writing the commands is pure; only carry_out() runs anything.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from seatrial.check.findings import Finding, Target
from seatrial.check.node.run_tool import Order as Call
from seatrial.check.node.run_tool import Result, run_tool
from seatrial.check.report import Report
from seatrial.check.reports.report_exclude import failed_nodes

Scheduler = Literal["slurm", "kubernetes"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)
COMMANDS: dict[Scheduler, str] = {"slurm": "scontrol", "kubernetes": "kubectl"}

TAINT = "seatrial.dev/unfit"
TIMEOUT_S = 30.0  # of one command: slurmctld's own MessageTimeout is 10 s, kubectl may try twice
_LONGEST = 160  # characters of a reason: `sinfo -R` cuts, and what was measured stands in the report
# A reason becomes part of `scontrol`'s own syntax (key=value, quotes, newlines) and of tables.
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,:;/%()+_-]+")
_REASON = re.compile(r"reason=[A-Za-z0-9 .,:;/%()+_-]*")  # what needs no other quotes than these
# Of both ends of a pair one is good, and it is not known which (docs/check.md, who is to blame).
_UNDECIDED = ("PAI001",)
# A node that somebody has drained keeps the reason that he gave. One that is DOWN does not: it may come back by itself.
_OUT = "DRAIN"
_MOST = 0.5  # share of the nodes that goes without asking twice


@dataclass(frozen=True)
class Order:
    """What takes one node out, and what brings it back; `done` None as long as nobody carried it out.

    `output` is what the command said, `why` why it failed or was not needed.
    """

    scheduler: Scheduler
    node: str
    code: str
    command: tuple[str, ...]
    undo: tuple[str, ...]
    done: bool | None = None
    output: str = ""
    why: str = ""

    @property
    def text(self) -> str:
        """As a shell takes it, and as the schedulers' manuals write it."""
        words = [shlex.quote(w) if not _REASON.fullmatch(w) else f'reason="{w[7:]}"' for w in self.command]
        return " ".join(words)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "command": list(self.command), "undo": list(self.undo)}


def reasons(report: Report) -> dict[str, Finding]:
    """Node -> the finding for which it should go: of those that failed who is to blame first.

    Nodes of which it is not settled whether they or their partner are at fault are left out. InputError for a name that
    no host can have.
    """
    worst: dict[str, Finding] = {}
    for finding in report.findings:  # the worst first, blames before others
        node = finding.target.node
        if node is not None and finding.verdict == "FAIL" and finding.code not in _UNDECIDED:
            worst.setdefault(node, finding)
    return {node: worst[node] for node in failed_nodes(report) if node in worst}


def orders(scheduler: Scheduler, because: Mapping[str, Finding]) -> list[Order]:
    """One order a node, so that one that the scheduler does not know keeps no other from being carried out."""
    make = _slurm if scheduler == "slurm" else _kubernetes
    return [make(node, finding) for node, finding in because.items()]


def _slurm(node: str, finding: Finding) -> Order:
    """scontrol(1), UPDATE COMMAND: what runs there ends as it would, and nothing new begins."""
    rest = replace(finding.target, node=None)
    place = "" if rest == Target() else str(rest)
    message = finding.message.removeprefix(f"{finding.target}: ")
    words = _UNSAFE.sub(" ", f"seatrial {finding.code} {place}: {message}").replace(" :", ":")
    said = " ".join(words.split())[:_LONGEST].strip()
    update = ("scontrol", "update", f"nodename={node}")
    return Order(
        "slurm", node, finding.code, (*update, "state=drain", f"reason={said}"), (*update, "state=resume")
    )


def _kubernetes(node: str, finding: Finding) -> Order:
    """Kubernetes, "Taints and Tolerations": NoSchedule lets what runs there go on. --overwrite: an older code may stand there."""
    taint = ("kubectl", "taint", "nodes", node)
    return Order(
        "kubernetes",
        node,
        finding.code,
        (*taint, f"{TAINT}={finding.code}:NoSchedule", "--overwrite"),
        (*taint, f"{TAINT}:NoSchedule-"),
    )


def refusal(report: Report, wanted: Sequence[Order], *, force: bool) -> str:
    """Why `wanted` must not be carried out; empty if they may. More than half of the nodes go only with `force`."""
    if report.course is not None and report.course.simulated:
        return "the nodes are simulated"
    known = len(report.nodes)
    if len(wanted) > _MOST * known and not force:
        share = f"{len(wanted)} of {known} nodes"
        return f"{share} would go, more than half: look first whether it is not something that they share; --force does it"
    return ""


def carry_out(
    wanted: Sequence[Order], say: Callable[[str], None], timeout_s: float = TIMEOUT_S
) -> list[Order]:
    """Run each order, and say of each how it went. Never raises for what a scheduler does.

    After a command that is not there, or did not end in time, the others are not tried: they would fare no better.
    """
    found: list[Order] = []
    stop = ""
    for order in wanted:
        if stop:
            found.append(replace(order, done=False, why=f"not tried: {stop}"))
        elif order.scheduler == "slurm" and (state := _out_already(order.node, timeout_s)):
            found.append(replace(order, done=True, why=f"takes no work already ({state})"))
        else:
            result = run_tool(Call(order.command[0], order.command, timeout_s))
            found.append(replace(order, done=result.ok, output=_said(result), why=result.why))
            stop = result.why if result.ended in ("absent", "refused", "hung", "stuck") else ""
        say(_line(found[-1]))
    return found


def _said(result: Result) -> str:
    return " ".join((result.out + result.err).split())[:1000]


def _line(order: Order) -> str:
    how = "done" if order.done else "failed"
    more = f" ({order.why})" if order.why else ""
    output = f": {order.output}" if order.output and order.output not in order.why else ""
    return f"{how}: {order.text}{more}{output}"


def _out_already(node: str, timeout_s: float) -> str:
    """The node's state and reason, if it takes no work as it is; else empty, also where that cannot be told."""
    result = run_tool(Call("scontrol", ("scontrol", "show", "node", node, "--oneliner"), timeout_s))
    state = re.search(r"\bState=(\S+)", result.out)
    if not result.ok or state is None or _OUT not in state[1].upper():
        return ""
    reason = re.search(r"\bReason=(.*?)(?: \[[^\]]*\].*)?\s*$", result.out.strip())
    return f"{state[1]}{': ' + reason[1] if reason else ''}"


def installed() -> list[Scheduler]:
    """The schedulers whose command is on the PATH."""
    return [s for s in SCHEDULERS if shutil.which(COMMANDS[s]) is not None]
