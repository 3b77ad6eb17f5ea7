"""Live memory and its peaks, from a log of storages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seatrial.train.dryrun.timeline import ACTIVATIONS, TEMPORARY, Timeline, microbatch_label, position


def test_a_peak_is_the_most_memory_alive_under_a_label() -> None:
    log = Timeline()
    log.resize(0, 100)
    log.mark("a")
    log.resize(1, 50)
    log.resize(1, 0)
    log.resize(2, 20)
    log.mark("b")
    log.resize(2, 0)
    peaks = log.peaks()
    assert {label: peak.total for label, peak in peaks.items()} == {
        "before#+0": 100,
        "a#+0": 150,
        "b#+0": 120,
    }
    assert sum(log._sizes.values()) == 100


def test_storage_freed_in_its_segment_is_temporary() -> None:
    log = Timeline()
    log.mark("a")
    log.resize(1, 50)
    log.resize(2, 7)
    log.resize(1, 0)
    log.mark("b")
    log.resize(2, 0)
    assert log.peaks()["a#+0"].kinds == {TEMPORARY: 50, ACTIVATIONS: 7}


def test_late_storage_kind_is_retroactive_and_first_kind_wins() -> None:
    log = Timeline()
    log.mark("a")
    log.resize(1, 50)
    log.mark("b")
    log.set_kind(1, "gradients")
    log.set_kind(1, "gathered weights")
    assert log.peaks()["a#+0"].kinds == {"gradients": 50}


def test_the_parts_of_a_segment_are_named_from_both_ends() -> None:
    log = Timeline()
    log.mark("a")
    for storage in range(40):
        log.resize(storage, 1)
        log.split()
    peaks = log.peaks()
    assert peaks["a#+0"].total == 1
    assert peaks["a#+15"].total == 16
    assert peaks["a#-1"].total == 40
    assert peaks["a#mid"].total == 25


def test_a_repeated_label_keeps_its_highest_peak() -> None:
    log = Timeline()
    for storage, size in enumerate((10, 30, 20)):
        log.mark("a")
        log.resize(storage, size)
        log.resize(storage, 0)
    assert log.peaks()["a#+0"].total == 30


def test_sizes_are_rounded_up_as_the_allocator_does() -> None:
    log = Timeline(round_to=512)
    log.mark("a")
    log.resize(0, 1)
    log.resize(1, 1024)
    assert log.peaks()["a#+0"].total == 1536
    log.resize(0, 0)
    assert sum(log._sizes.values()) == 1024


def test_restart_keeps_live_storages() -> None:
    log = Timeline()
    log.set_kind(0, "parameters")
    log.resize(0, 10)
    log.mark("a")
    log.resize(1, 100)
    log.resize(1, 0)
    log.resize(2, 5)
    log.restart()
    log.mark("a")
    log.resize(2, 0)
    assert {label: dict(peak.kinds) for label, peak in log.peaks().items()} == {
        "before#+0": {"parameters": 10, ACTIVATIONS: 5},
        "a#+0": {"parameters": 10, ACTIVATIONS: 5},
    }


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000), st.sampled_from("-sm")), max_size=60))
def test_the_highest_part_is_the_peak(steps: list[tuple[int, int, str]]) -> None:
    log = Timeline()
    sizes: dict[int, int] = {}
    highest = 0
    for storage, size, then in steps:
        log.resize(storage, size)
        sizes[storage] = size
        highest = max(highest, sum(sizes.values()))
        if then == "m":
            log.mark(f"label {storage}")
        elif then == "s":
            log.split()
    assert max(peak.total for peak in log.peaks().values()) == highest
    assert all(n >= 0 for peak in log.peaks().values() for n in peak.kinds.values())


def test_layers_are_named_from_both_ends() -> None:
    assert [position(i, 6) for i in range(6)] == ["+0", "+1", "mid", "mid", "-2", "-1"]
    assert [position(i, 4) for i in range(4)] == ["+0", "+1", "-2", "-1"]
    assert [position(i, 1) for i in range(1)] == ["-1"]


def test_microbatches_are_named_from_both_ends() -> None:
    assert [microbatch_label(i, 6, (3, 2)) for i in range(6)] == ["+0", "+1", "+2", "mid", "-2", "-1"]
    assert [microbatch_label(i, 5, (3, 2)) for i in range(5)] == ["+0", "+1", "+2", "-2", "-1"]
