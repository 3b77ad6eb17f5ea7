"""Text between and around tool outputs that states nothing about a node: prompts, titles, separators, dates."""

from __future__ import annotations

import re

# Commands as they appear in a prompt, in a trace (set -x) or in a title printed by a script.
_COMMAND = (
    r"(?:sudo )?(?:\S*/)?(?:nvidia-smi|dcgmi|dmesg|journalctl|ib\w+|ibv_\w+|mlxlink|\w+_perf|ncclscout|nvbandwidth|rocm-smi|amd-smi|lspci"
    r"|ipmitool|perfquery|rdma|scontrol|cat|tail|head|grep|kubectl|srun|mpirun|docker|bash|sh|ssh|date|hostname|uname|uptime|echo|cd|ls|\./\S+)\b"
)
_SEPARATORS = (
    # A shell prompt, with or without a command; a trace; a Markdown fence; the file titles of head and tail.
    re.compile(r"(?:\([\w.-]+\) )?\[?[\w.-]{1,60}@[\w.-]{1,120}(?:[: ][^\n#$%>]{0,200})?\]?[#$%>](?: .*)?"),
    re.compile(rf"(?:[$>#]|\++) ?{_COMMAND}.*"),
    re.compile(r"(?:```|~~~)\s*\w*"),
    re.compile(r"==> .{1,300} <=="),
    re.compile(rf"[-=#*_+~<>\[\]: ]{{2,}}{_COMMAND}[\w ./:=,-]{{0,60}}[-=#*_+~<>\[\]: ]*"),
)
_NOISE = (
    re.compile(r"[\W_]+"),  # separators, frames, blank quotes
    re.compile(r"[A-Z][a-z]{2}[ ,]+(?:[A-Z][a-z]{2} +[0-9]{1,2}|[0-9]{1,2} [A-Z][a-z]{2,8})[ ,]+[0-9: ]{4,14}(?:[AP]M )?(?:[A-Z+0-9:-]{1,6} )?(?:[0-9]{4})?"),  # date
    re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{5,8}(?:[.,][0-9]+)?(?:Z| ?[+-][0-9:]{4,6})?"),
    re.compile(r"Warning: Permanently added .{1,200} to the list of known hosts\."),
    re.compile(r"(?:real|user|sys)\s+[0-9]+m[0-9.]+s"),
)  # fmt: skip
_LONGEST_NOISE = 400


def separates(line: str) -> bool:
    """Whether a line separates outputs: a prompt, a title."""
    line = line.strip()
    return 0 < len(line) <= _LONGEST_NOISE and any(p.fullmatch(line) for p in _SEPARATORS)


def is_noise(line: str) -> bool:
    """Whether a line states nothing about a node."""
    line = line.strip()
    return len(line) <= _LONGEST_NOISE and (
        not line or any(p.fullmatch(line) for p in (*_NOISE, *_SEPARATORS))
    )
