"""What a shell or a loader says instead of a tool's output: not installed, not allowed, killed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.findings import Finding, Target
from seatrial.check.outputs.network import at
from seatrial.check.tool import Context, ParseError, Tool

_LONGEST_LINES = 20  # a message and what stands around it, and no log that mentions one
_AT_THE_END = 3
_MESSAGES = (
    # bash, dash, zsh, busybox: "bash: ibstat: command not found", "sh: 1: ibstat: not found"
    re.compile(r"^(?:-?(?:ba|da|z|k)?sh|\S*/(?:ba|da|z)?sh|timeout|sudo|env|nohup|srun|exec|ssh)\S*: .*\S"),
    re.compile(r"\bcommand not found\b|\bkommando nicht gefunden\b|\bBefehl nicht gefunden\b|commande introuvable|orden no encontrada|未找到命令|コマンドが見つかりません|команда не найдена", re.IGNORECASE),
    re.compile(r"^\S+: error while loading shared libraries: "),
    re.compile(r"^(?:Killed|Terminated|Segmentation fault|Aborted|Bus error)(?: \(core dumped\))?$"),
    re.compile(r"^\S+: (?:Permission denied|No such file or directory|cannot open|Operation not permitted)"),
    re.compile(r"^ibpanic: |^ibwarn: |^can't open MAD port|^mad_rpc_open_port: ", re.IGNORECASE),
    re.compile(r"^Permission denied \(publickey|^ssh: connect to host "),
)  # fmt: skip


@dataclass(frozen=True)
class ShellFacts:
    """The first message."""

    file: str
    message: str
    line: int


def _message(text: str) -> tuple[int, str] | None:
    """The first message and its line: in a short text anywhere, in a long one at its end, where a run was killed."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > _LONGEST_LINES:
        lines = lines[-_AT_THE_END:]
    return next(((n, line) for n, line in lines if any(m.search(line) for m in _MESSAGES)), None)


def matches(text: str) -> bool:
    """Such a message."""
    return _message(text) is not None


def parse(text: str, file: str) -> ShellFacts:
    """Raises ParseError where `matches` is false."""
    found = _message(text)
    if found is None:
        raise ParseError("no message of a shell in it", file=file)
    return ShellFacts(file, found[1], found[0])


def judge(facts: ShellFacts, context: Context) -> list[Finding]:
    """UNJUDGED with the message."""
    why = f"the tool did not run: {facts.message[:200]}"
    target = Target(node=context.node)
    return [
        Finding("FILE007", "UNJUDGED", target, why, why_unjudged=why, evidence=(at(facts.file, facts.line),))
    ]


TOOLS = (Tool("shell", matches, parse, judge),)
