"""[[train.batch_ramp]]: the batch of each step, and what is refused, at its place."""

from __future__ import annotations

import pytest
from jobs import GOOD, load, problems

from seatrial.job.changed import changed_job

DOUBLED = ("parallel.pipeline=1", "cluster.nodes=1", "train.global_batch=64", "train.steps=100")


def with_ramp(*phases: str) -> str:
    tables = "".join(f"[[train.batch_ramp]]\n{phase}\n" for phase in phases)
    return GOOD.replace("[optimizer]", f"{tables}\n[optimizer]")


FIRST, SECOND = "steps = 10\nglobal_batch = 16", "steps = 20\nglobal_batch = 32"


def test_each_step_has_its_batch() -> None:
    job = load(with_ramp(FIRST, SECOND), *DOUBLED)
    batches = job.train.batches
    assert [batches.size(step) for step in (1, 10, 11, 30, 31, 100)] == [16, 16, 32, 32, 64, 64]
    assert job.train.tokens == (10 * 16 + 20 * 32 + 70 * 64) * job.train.sequence_length
    again = load(job.to_toml())
    assert again.train.batches == batches
    assert job.without_ramp().train.batches.phases == ((0, 64),)


def test_it_belongs_to_what_makes_two_starts_the_same_run() -> None:
    plain, ramped = load(GOOD, *DOUBLED), load(with_ramp(FIRST), *DOUBLED)
    assert "train.batch_ramp" not in plain.identity()  # runs that are older than the key resume
    assert ramped.identity() == {**plain.identity(), "train.batch_ramp": "10 x 16"}


def test_a_copy_without_it_says_so() -> None:
    copy = changed_job(load(with_ramp(FIRST), *DOUBLED), {"train.batch_ramp": ([], "why")})
    (change,) = copy.changes
    assert change.job == [{"steps": 10, "global_batch": 16}]
    assert copy.job.train.batches.phases == ((0, 64),)


@pytest.mark.parametrize(
    ("phases", "at", "message", "hint"),
    [
        (("steps = 10\nglobal_batch = 64",), "64", "a batch of 64 in a ramp to global_batch 64: it must be less than global_batch", "follows the last one"),
        ((SECOND, FIRST), "16", "a batch of 16 in a ramp to global_batch 64: it must be more than the 32 before it, and less", "grows from phase to phase"),
        (("steps = 10\nglobal_batch = 17",), "17", "phase 1 of batch_ramp: global_batch 17 is not divisible by", "use global_batch = 16 or 24"),
        (("steps = 100\nglobal_batch = 16",), "100", "batch_ramp has 100 steps, the job 100: global_batch would never be reached", "use fewer steps"),
        (("steps = 10",), "batch_ramp]]\nsteps = 10", "[[train.batch_ramp]] is missing the key `global_batch`", "global_batch = 64"),
        (("steps = 10\nglobal_batch = 0",), "0", "train.batch_ramp[0].global_batch must be at least 1, not 0", ""),
        (("steps = 10\nglobal_batch = 16\nuntil = 5",), "until", "unknown key `until` in [[train.batch_ramp]]", "known keys: steps, global_batch"),
    ],
)  # fmt: skip
def test_a_phase_is_refused_at_its_place(phases: tuple[str, ...], at: str, message: str, hint: str) -> None:
    text = with_ramp(*phases)
    (found,) = problems(text, *DOUBLED)
    begin = text.index("[[train.batch_ramp]]") + 2
    place = text.index(at, begin) if at.startswith(("batch", "until")) else text.index(f"= {at}", begin) + 2
    assert (found.line, found.column) == (text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place))
    assert message in found.message
    assert hint in (found.hint or "")


def test_each_phase_fills_the_pipeline() -> None:
    (found,) = problems(
        with_ramp(FIRST), "parallel.pipeline=2", "train.global_batch=64", "train.microbatch=8"
    )
    assert "fewer than the 2 pipeline ranks" in found.message
    assert found.hint == "use global_batch = 32, or microbatch = 4"


def test_a_single_table_is_refused() -> None:
    (found,) = problems(with_ramp(FIRST).replace("[[train.batch_ramp]]", "[train.batch_ramp]"), *DOUBLED)
    assert found.hint == "write [[train.batch_ramp]] above each"
