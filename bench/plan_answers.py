"""Ten reference plans: what `seatrial plan` answers, and how fast.

    python bench/plan_answers.py [--write]

Prints the CPU seconds of each plan, its search included, and ends with 1 if one takes longer than its limit. `--write` writes
the answers anew to tests/fixtures/plans/answers.txt: review them as a cluster engineer would, with their job files beside.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.resources import files
from pathlib import Path

from seatrial.job import load_job
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.report.answer import PlanOptions, answer
from seatrial.plan.search.auto import choose
from seatrial.ui.plan_table import lines

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "plans"
ANSWERS = FOLDER / "answers.txt"
PRESETS = ("llama3-8b-h100", "qwen2.5-72b-b300")
SHOWN = ("plan of", "the job's own layout", "the layout chosen", "layouts")
LIMIT_S, LIMITS = 5.0, {"405b-100000-h100": 30.0}


def jobs() -> dict[str, Path]:
    """The job files by name."""
    presets = (Path(str(files("seatrial.job") / "presets" / f"{name}.toml")) for name in PRESETS)
    return {path.stem: path for path in sorted((*FOLDER.glob("*.toml"), *presets))}


def told(path: Path) -> str:
    """The answer at 100 columns without what would change it, crossovers and the waterfall."""
    job = load_job(path, [])
    place = hardware_of(job)
    if job.is_open:
        job = choose(job, place).settle(job)
    text = "\n".join(line for line, _ in lines(answer(job, place, PlanOptions(price=2.5)), width=100))
    sections = text.split("\n\n")
    return "\n".join(s for s in sections if s.startswith(SHOWN) or s is sections[-1])


def kept() -> dict[str, str]:
    """The answers of answers.txt by name."""
    answers = ANSWERS.read_text(encoding="utf-8").split("\n\n")
    return {a.splitlines()[0].removeprefix("plan of "): a.rstrip("\n") for a in answers}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    answers, late = [], False
    for name, path in jobs().items():
        began = time.process_time()
        answers.append(told(path))
        took, limit = time.process_time() - began, LIMITS.get(name, LIMIT_S)
        print(f"{name:20} {took:5.2f} s of {limit:g}")
        late |= took > limit
    if options.write:
        ANSWERS.write_text("\n\n".join(answers) + "\n", encoding="utf-8")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
