"""Peer access between GPUs: the matrices of `nvidia-smi topo -p2p r|w|n|a|p` (driver 535 and 550)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.judging.floors import find_sku
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed

_WORDS = {
    "X": "Self", "OK": "Status Ok", "U": "Unknown", "DR": "Disabled by Regkey", "NS": "Not supported",
    "CNS": "Chipset not supported", "GNS": "GPU not supported", "TNS": "Topology not supported",
}  # fmt: skip
_HEAD = re.compile(r"\s+(?:GPU\d{1,3}\s*)+")
_ROW = re.compile(rf"\s*GPU(?P<index>\d{{1,3}})\s+(?P<words>(?:(?:{'|'.join(_WORDS)})\s*)+)")
_LEGEND = re.compile(rf"\s*(?:Legend:|(?:{'|'.join(_WORDS)})\s+= [A-Z][\w .]+)\s*")


@dataclass(frozen=True)
class Matrix:
    """`words[i][j]` is the entry from the i-th GPU to the j-th."""

    file: str
    gpus: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]


def parse(lines: Lines, file: str) -> Matrix:
    """Parse the matrix. Raises ParseError if it is incomplete, or has X elsewhere than on its diagonal."""
    gpus: tuple[int, ...] = ()
    rows: dict[int, tuple[tuple[str, ...], int]] = {}
    for number, line in lines:
        if not gpus and _HEAD.fullmatch(line):
            gpus = tuple(int(n) for n in re.findall(r"\d+", line))
        elif (row := _ROW.fullmatch(line)) and gpus and int(row["index"]) not in rows:
            rows[int(row["index"])] = (tuple(row["words"].split()), number)
        elif not _LEGEND.fullmatch(line) or not rows:
            continue
        lines.claim(number)
    words = tuple(rows[g][0] for g in gpus if g in rows)
    if not gpus or not len(words) == len(rows) == len(gpus) or any(len(w) != len(gpus) for w in words):
        place = min((n for _, n in rows.values()), default=None)
        raise ParseError("the matrix is incomplete", file=file, line=place)
    if any((words[i][j] == "X") != (i == j) for i in range(len(gpus)) for j in range(len(gpus))):
        raise ParseError("X occurs outside the diagonal", file=file)
    return Matrix(file, gpus, words, tuple(rows[g][1] for g in gpus))


def judge(matrix: Matrix, context: Context) -> list[Finding]:
    """FAIL if GPUs joined by NVLink lack peer access; UNJUDGED if it is unknown whether the GPU model must have it."""
    add, sku = FindingCollector(matrix.file, context, "NOD023"), find_sku(context.gpu)
    add.found += count_findings(matrix.gpus, sku, context, (matrix.file,))
    some = any(w == "OK" for row in matrix.words for w in row)
    for gpu, row, line in zip(matrix.gpus, matrix.words, matrix.lines, strict=True):
        apart = [matrix.gpus[j] for j, w in enumerate(row) if w not in ("OK", "X")]
        if not apart:
            continue
        detail = ", ".join(sorted({_WORDS[w].lower() for w in row if w not in ("OK", "X")}))
        text = f"no peer access to GPU{'s' * (len(apart) > 1)} {listed(apart)}: {detail}"
        if sku is not None and sku.board in ("switch", "mesh"):
            add("FAIL", text, line, target=Target(gpu=gpu), expected=Expected("OK", source=sku.source))
        elif some and len(apart) == len(row) - 1:
            add("WARN", f"{text}, but others do", line, target=Target(gpu=gpu))
        else:
            text += "; whether they must have it is unknown"
            add("UNJUDGED", text, line, target=Target(gpu=gpu))
    return add.with_pass(f"{len(matrix.gpus)} GPUs, each with peer access to all others", code="NVL008")


_MATCHES = having(r"^\s+GPU0\b[^\n]*\n(?:.*\n)*?\s*GPU\d+\s+(?:X\s+)?(?:OK|CNS|GNS|TNS|NS|DR)\b")
TOOLS: tuple[Tool[Matrix], ...] = (Tool("nvidia-smi topo -p2p", _MATCHES, parse, judge),)
