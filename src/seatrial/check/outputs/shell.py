"""Messages of a shell or a loader in place of a tool's output: not installed, not permitted, killed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.network import at
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool

_LONGEST_LINES = 20  # a longer text is a log that may only mention such a message
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


def _messages(lines: Lines) -> list[tuple[int, str]]:
    """Messages with their lines: anywhere in a short text, only near the end of a long one (a run that was killed)."""
    entries = [(n, line.strip()) for n, line in lines if line.strip()]
    if len(entries) > _LONGEST_LINES:
        entries = entries[-_AT_THE_END:]
    return [(n, line) for n, line in entries if any(m.search(line) for m in _MESSAGES)]


def matches(text: str) -> bool:
    """Whether the text has such a message."""
    return bool(_messages(Lines.of(text)))


def parse(lines: Lines, file: str) -> ShellFacts:
    """Parse the first message. Raises ParseError if `matches` is false."""
    found = _messages(lines)
    if not found:
        raise ParseError("no shell message in the output", file=file)
    lines.claim(*(n for n, _ in found))
    return ShellFacts(file, found[0][1], found[0][0])


def judge(facts: ShellFacts, context: Context) -> list[Finding]:
    """UNJUDGED with the message."""
    why = f"the tool did not run: {facts.message[:200]}"
    target = Target(node=context.node)
    return [Finding("FILE007", "UNJUDGED", target, why, evidence=(at(facts.file, facts.line),))]


TOOLS = (Tool("shell", matches, parse, judge),)
