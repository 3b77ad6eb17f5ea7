"""Where the time of a run's last steps went, for the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.record.view import RunView
from seatrial.ui.out import Pair

if TYPE_CHECKING:
    from seatrial.record.frontier import Account

_STEPS = 512  # of the end of a run: as many as matter, and few enough to be read for each of many ranks
_LEAST = 0.005  # share of a step that is worth its words
_AHEAD = 0.05  # share of a step by which a rank must exceed the median to be named


def account_of(view: RunView) -> Account | None:
    """The account of the run's last generation; None if there is none. A file that cannot be used is a problem of `view`."""
    # numpy takes longer to import than everything else of a summary, and not every view needs it.
    from seatrial.record.frontier import account
    from seatrial.record.stages import read_generation

    found, problems = read_generation(view.folder, view.generation, most=_STEPS)
    view.problems += [problem for problem in problems if problem not in view.problems]
    return account(found)


def split_pairs(account: Account | None) -> list[Pair]:
    """The split of a step in percent, and the rank that sets the pace if one stands out."""
    if account is None:
        return []
    split = account.split
    shares = {name: seconds / split.step_s for name, seconds in account.seconds.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    told = ", ".join(
        f"{_words(name)} {100 * shares[name]:.0f} %" for name in largest if shares[name] >= _LEAST
    )
    lines = [
        f"{units.duration(split.step_s)} (mean of steps {account.first_step}-{account.last_step}): {told}"
    ]
    if split.pace_ahead_s > _AHEAD * split.step_s:
        ahead = f"{100 * split.pace_ahead_s / split.step_s:.0f} % of a step above the median of the ranks"
        lines.append(f"rank {split.pace_rank} sets the pace: its own work takes {ahead}")
    lines += [f"{_words(name)} is not separated: {why}" for name, why in account.not_separated.items()]
    return [Pair("step time", "\n".join(lines))]


def _words(stage: str) -> str:
    return stage.replace("_", " ")
