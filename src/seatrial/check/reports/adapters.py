"""Remove failed nodes from a scheduler: Slurm's drain, Kubernetes' taint; as commands to read, or run.

Deciding and writing the commands is pure; only run_orders() runs anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.report import Report
from seatrial.check.node.run_tool import Order as Call
from seatrial.check.node.run_tool import Result, run_tool
from seatrial.check.reports.report_exclude import failed_nodes

Scheduler = Literal["slurm", "kubernetes"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)

TAINT = "seatrial.dev/unfit"
TIMEOUT_S = 30.0  # of one command: slurmctld's own MessageTimeout is 10 s, kubectl may try twice
_LONGEST = 160  # characters of a reason: `sinfo -R` truncates, and the report has the measurements
# A reason becomes part of `scontrol`'s own syntax (key=value, quotes, newlines) and of tables.
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,:;/%()+_-]+")
_REASON = re.compile(r"reason=[A-Za-z0-9 .,:;/%()+_-]*")  # needs no quotes other than these
# Of the two ends of a pair one is healthy, and it is unknown which (docs/check.md, Localising a fault).
_UNDECIDED = ("PAI001",)
# A node that is already drained keeps its reason. A node that is only DOWN is drained: it may come back by itself.
_OUT = "DRAIN"
_MOST = 0.5  # share of the nodes that may be removed without --force


@dataclass(frozen=True)
class Order:
    """The command that removes one node and the one that restores it; `done` is None until it was run.

    `output` is what the command printed; `why` is why it failed or was not needed.
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
        """The command line for a shell, quoted as in the schedulers' manuals."""
        words = [shlex.quote(w) if not _REASON.fullmatch(w) else f'reason="{w[7:]}"' for w in self.command]
        return " ".join(words)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "command": list(self.command), "undo": list(self.undo)}


def reasons(report: Report) -> dict[str, Finding]:
    """Node -> the finding to remove it for: the first of its failures, blames before others.

    Nodes for which it is undecided whether they or their partner are at fault are left out. InputError for a name
    that no host can have.
    """
    worst: dict[str, Finding] = {}
    for finding in report.findings:  # the worst first, blames before others
        node = finding.target.node
        if node is not None and finding.verdict == "FAIL" and finding.code not in _UNDECIDED:
            worst.setdefault(node, finding)
    return {node: worst[node] for node in failed_nodes(report) if node in worst}


def orders(scheduler: Scheduler, because: Mapping[str, Finding]) -> list[Order]:
    """One command per node, so that a node unknown to the scheduler does not prevent the others from being removed."""
    make = _slurm if scheduler == "slurm" else _kubernetes
    return [make(node, finding) for node, finding in because.items()]


def _slurm(node: str, finding: Finding) -> Order:
    """Drain as in scontrol(1), UPDATE COMMAND: running jobs finish normally, and no new ones start."""
    rest = replace(finding.target, node=None)
    place = "" if rest == Target() else str(rest)
    message = finding.message.removeprefix(f"{finding.target}: ")
    words = _UNSAFE.sub(" ", f"seatrial {finding.code} {place}: {message}").replace(" :", ":")
    text = " ".join(words.split())[:_LONGEST].strip()
    update = ("scontrol", "update", f"nodename={node}")
    return Order(
        "slurm", node, finding.code, (*update, "state=drain", f"reason={text}"), (*update, "state=resume")
    )


def _kubernetes(node: str, finding: Finding) -> Order:
    """Kubernetes, "Taints and Tolerations": NoSchedule keeps running pods. --overwrite replaces an older code."""
    taint = ("kubectl", "taint", "nodes", node)
    return Order(
        "kubernetes",
        node,
        finding.code,
        (*taint, f"{TAINT}={finding.code}:NoSchedule", "--overwrite"),
        (*taint, f"{TAINT}:NoSchedule-"),
    )


def refusal(report: Report, wanted: Sequence[Order], *, force: bool) -> str:
    """Why `wanted` must not be run; empty if it may be. More than half of the nodes only with `force`."""
    if report.check_run is not None and report.check_run.simulated:
        return "the nodes are simulated"
    known = len(report.nodes)
    if len(wanted) > _MOST * known and not force:
        share = f"{len(wanted)} of {known} nodes"
        return f"{share} would be removed, more than half: first check for a common cause; use --force to proceed"
    return ""


def run_orders(
    wanted: Sequence[Order], report: Callable[[str], None], timeout_s: float = TIMEOUT_S
) -> list[Order]:
    """Run each command and report each result through `report`. Never raises for what a scheduler does.

    After a command that is missing, cannot be run or timed out, the rest are skipped: they would fail the same way.
    """
    found: list[Order] = []
    stop = ""
    for order in wanted:
        if stop:
            found.append(replace(order, done=False, why=f"not run: {stop}"))
        elif order.scheduler == "slurm" and (state := _already_drained(order.node, timeout_s)):
            found.append(replace(order, done=True, why=f"already drained ({state})"))
        else:
            result = run_tool(Call(order.command[0], order.command, timeout_s))
            found.append(replace(order, done=result.ok, output=_message_of(result), why=result.why))
            stop = result.why if result.ended in ("absent", "refused", "hung", "stuck") else ""
        report(_line(found[-1]))
    return found


def _message_of(result: Result) -> str:
    return " ".join((result.out + result.err).split())[:1000]


def _line(order: Order) -> str:
    how = "done" if order.done else "failed"
    more = f" ({order.why})" if order.why else ""
    output = f": {order.output}" if order.output and order.output not in order.why else ""
    return f"{how}: {order.text}{more}{output}"


def _already_drained(node: str, timeout_s: float) -> str:
    """The node's state and reason if it is already drained; empty otherwise, also if that cannot be determined."""
    result = run_tool(Call("scontrol", ("scontrol", "show", "node", node, "--oneliner"), timeout_s))
    state = re.search(r"\bState=(\S+)", result.out)
    if not result.ok or state is None or _OUT not in state[1].upper():
        return ""
    reason = re.search(r"\bReason=(.*?)(?: \[[^\]]*\].*)?\s*$", result.out.strip())
    return f"{state[1]}{': ' + reason[1] if reason else ''}"
