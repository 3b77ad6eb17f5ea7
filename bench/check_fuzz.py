"""Mutates outputs of tools at random and judges them as `seatrial check --from` does: no crash, and no damaged output may PASS.

    python bench/check_fuzz.py [--mutations 20000] [--seed 0] [--folder DIR...] [--pairs]

Outputs are the test fixtures and the files of each DIR. In a faulty output everything is mutated except the lines that its
findings name, so the fault remains. A healthy output gets damage that must be detected: bytes that no tool writes, prose, a
line with a fault; documents are truncated. Other mutations of it may pass (32 degrees is as healthy as 31), but not
crash. --pairs: also every output appended to every other one. Prints what passed or crashed, with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Verdict
from seatrial.check.judging.report import Report

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "check"
_JUNK = ("\x00", "\x01\x02", "\x7f", "\ufffd")
_PROSE = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit",
    "the quick brown fox: 17 of 4, jumps",
    "42 17 99 0.5",
)
_FAULTS = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
    "Unable to determine the device handle for GPU 0000:4C:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "|ERR!   ERR!  ERR!    N/A / 700W |      0MiB / 81559MiB |    ERR!      Default |",
)  # fmt: skip
_LETTERS = "abcXYZ0189 :.-/|()[]{}\"'\t%#=,"


def report(text: str) -> Report:
    """The report of check --from on a file with this text."""
    return judge_pieces(pieces_of(text.encode("utf-8", "surrogatepass"), "f", None))


@dataclass(frozen=True)
class Output:
    """One output, its verdict, and the numbers of the lines that determine it; None: not all are known."""

    name: str
    text: str
    verdict: Verdict
    faults: frozenset[int] | None

    @classmethod
    def of(cls, name: str, text: str) -> Output:
        """Judge a text unchanged."""
        judged = report(text)
        ill = [f for f in judged.findings if f.verdict != "PASS"]
        places = [place for f in ill for place in f.evidence]
        numbered = all(place.rpartition(":")[2].isdecimal() for place in places)
        lines = frozenset(int(p.rpartition(":")[2]) for p in places) if ill and numbered and places else None
        return cls(name, text, judged.verdict, lines)


def outputs(*folders: Path) -> list[Output]:
    """All files in the folders."""
    paths = [
        p for folder in folders for p in sorted(folder.iterdir()) if p.is_file() and p.name != "README.md"
    ]
    return [Output.of(p.name, p.read_text(errors="replace")) for p in paths]


def mutation(output: Output, others: list[Output], dice: random.Random) -> tuple[str, str, bool]:
    """(kind of damage, damaged text, whether it may PASS)."""
    if output.verdict != "PASS":
        return _around_the_fault(output, others, dice)
    kind = dice.choice(("junk", "prose", "fault", "cut", "anything"))
    lines = output.text.split("\n")
    at = dice.randrange(len(lines))
    if kind == "junk":
        place = dice.randrange(len(output.text) + 1)
        return kind, output.text[:place] + dice.choice(_JUNK) + output.text[place:], False
    if kind in ("prose", "fault"):
        lines.insert(at, dice.choice(_PROSE if kind == "prose" else _FAULTS))
        return kind, "\n".join(lines), False
    document = output.text.lstrip()[:1] in ("{", "[", "<")
    if kind == "cut" and document:
        return kind, output.text[: dice.randrange(1, len(output.text.rstrip()))], False
    for _ in range(dice.randint(1, 4)):
        lines = _damaged(lines, [*range(len(lines))], others, dice)
    return "anything", "\n".join(lines), True


def _around_the_fault(output: Output, others: list[Output], dice: random.Random) -> tuple[str, str, bool]:
    lines: list[str] = output.text.split("\n")
    if output.faults is None:  # all that may be done is to add
        at = dice.randrange(len(lines) + 1)
        lines[at:at] = _some(others, dice)
        return "beside the fault", "\n".join(lines), False
    kept = {n - 1: lines[n - 1] for n in output.faults}
    marked: list[tuple[str, bool]] = [(line, n in kept) for n, line in enumerate(lines)]
    for _ in range(dice.randint(1, 4)):
        free = [n for n, (_, fault) in enumerate(marked) if not fault]
        if free:
            at = dice.choice(free)
            part = _damaged([marked[at][0]], [0], others, dice)
            marked[at : at + 1] = [(line, False) for line in part]
    return "beside the fault", "\n".join(line for line, _ in marked), False


def _damaged(lines: list[str], free: list[int], others: list[Output], dice: random.Random) -> list[str]:
    """One line removed, duplicated, cut, changed in one character, or with text appended."""
    if not lines:
        return lines
    at, found = dice.choice(free), list(lines)
    line = found[at]
    place = dice.randrange(len(line) + 1)
    match dice.choice(("lost", "twice", "cut", "changed", "more")):
        case "lost":
            del found[at]
        case "twice":
            found.insert(at, line)
        case "cut":
            found[at] = line[:place]
        case "changed":
            found[at] = line[:place] + dice.choice(_LETTERS) + line[place + 1 :]
        case _:
            found[at + 1 : at + 1] = _some(others, dice)
    return found


def _some(others: list[Output], dice: random.Random) -> list[str]:
    lines = dice.choice(others).text.split("\n")
    at = dice.randrange(len(lines))
    return lines[at : at + dice.randint(1, 12)]


def run(every: list[Output], mutations: int, seed: int, tell: Callable[[str], None]) -> Counter[str]:
    """Judge `mutations` damaged outputs; counts by kind, with "passed" and "crashed" for failures."""
    dice, count = random.Random(seed), Counter[str]()
    for n in range(mutations):
        output = dice.choice(every)
        kind, text, may_pass = mutation(output, every, dice)
        if text == output.text:
            continue
        count[kind] += 1
        try:
            verdict = report(text).verdict
        except Exception:  # noqa: BLE001  any is what is looked for
            count["crashed"] += 1
            tell(f"mutation {n} of {output.name} ({kind}): {traceback.format_exc()}")
            continue
        if verdict == "PASS" and not may_pass:
            count["passed"] += 1
            tell(f"mutation {n} of {output.name} ({kind}) passed:\n{text}")
    return count


def pairs(every: list[Output], tell: Callable[[str], None]) -> Counter[str]:
    """Append every output to every one, including itself."""
    count = Counter[str]()
    for one, other in product(every, every):
        count["pairs"] += 1
        both = report(one.text.rstrip("\n") + "\n" + other.text).verdict
        if both == "PASS" and (one.verdict, other.verdict) != ("PASS", "PASS"):
            count["passed"] += 1
            tell(f"{other.name} behind {one.name} passed")
    return count


def main() -> int:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, action="append", default=[])
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_args()
    every = outputs(FIXTURES, *args.folder)
    began = time.perf_counter()
    count = run(every, args.mutations, args.seed, print)
    if args.pairs:
        count += pairs(every, print)
    took = time.perf_counter() - began
    told = ", ".join(f"{many} {kind}" for kind, many in sorted(count.items()))
    print(f"{len(every)} outputs, {took:.0f} s: {told}; passed {count['passed']}, crashed {count['crashed']}")
    return 1 if count["passed"] or count["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
