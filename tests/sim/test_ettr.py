"""ETTR: one run with its failures placed by hand, the formulas' values, and the cases made of rates and measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ettr_simulation
import pytest
from ettr_cases import CAUSES, SCENARIOS, Costs, Measured, Scenario, make_case, spares_for
from ettr_simulation import Case, Outcome, first_order, mean_and_error, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.hardware.failures import RATES
from seatrial.plan.cost.ettr import DAY_S, Branch, renewal
from seatrial.record.interval import young

HOUR = 3600.0
PROCESS = (Branch(1.0, "process", 100.0),)
NODE = (Branch(1.0, "node", 100.0),)
MEASURED = Measured(0.5, 4.0, 5.0, 6.0, 20.0, 0.02, 10.0, machine="here", date="today")


class Script:
    """A source of randomness that gives the failures of a list, then none; every choice falls on the first option."""

    def __init__(self, gaps: list[float], repair_s: float = 0.0) -> None:
        self.gaps, self.repair_s = gaps, repair_s

    def expovariate(self, rate: float) -> float:
        if self.repair_s and math.isclose(rate, 1 / self.repair_s):
            return self.repair_s
        return self.gaps.pop(0) if self.gaps else math.inf

    def random(self) -> float:
        return 0.0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(case: Case, gaps: list[float], hours: float, repair_s: float = 0.0) -> Outcome:
        monkeypatch.setattr(ettr_simulation.random, "Random", lambda seed: Script(list(gaps), repair_s))
        return simulate(case, hours / 24, 0)

    return run


def parts(out: Outcome) -> float:
    running = out.productive_s + out.redone_s + out.save_stalls_s + out.snapshots_s
    return running + out.recovering_s + out.waiting_s + out.reduced_s


# -- without failures


@pytest.mark.parametrize(("interval", "stall"), [(1000.0, 10.0), (500.0, 125.0), (90.0, 0.0), (7.0, 3.0)])
@pytest.mark.parametrize("overhead", [0.0, 0.03])
def test_without_failures_only_saving_costs(interval: float, stall: float, overhead: float) -> None:
    memory = {"memory_interval_s": 50.0, "memory_stall_s": 50 * overhead} if overhead else {}
    case = Case(16, 0.0, PROCESS, interval, stall, 60.0, **memory)
    cycle = interval * (1 + overhead) + stall
    out = simulate(case, 40 * cycle / DAY_S, seed=1)
    expected = 1 / ((1 + stall / interval) if not overhead else cycle / interval)
    assert out.ettr == pytest.approx(expected, rel=1e-12)
    if not overhead:
        assert first_order(case) == renewal(case) == pytest.approx(expected, rel=1e-12)


def test_the_last_interval_counts_before_it_is_saved() -> None:
    out = simulate(Case(16, 0.0, PROCESS, 3000.0, 100.0), HOUR / DAY_S, seed=1)
    assert out.productive_s == pytest.approx(3500)
    assert out.save_stalls_s == pytest.approx(100)


# -- one run, failures placed by hand: interval 1000 s, stall 100 s, so cycles begin at 0, 1100, 2200, ...


@pytest.mark.parametrize(
    ("at", "kept", "why"),
    [
        (500.0, 0.0, "before the first save"),
        (1050.0, 0.0, "during the stall: that save is lost"),
        (1130.0, 0.0, "written, but not yet usable"),
        (1170.0, 1000.0, "usable from 1160 on"),
        (3400.0, 3000.0, "in the fourth cycle"),
        (3300.0 + 40.0, 2000.0, "the third save ends at 3300 and is usable at 3360"),
    ],
)
def test_a_failure_goes_back_to_the_newest_save_that_is_usable(
    scripted: Any, at: float, kept: float, why: str
) -> None:
    out = scripted(Case(8, 1e-6, PROCESS, 1000.0, 100.0, 60.0), [at], hours=10)
    cycles, rest = divmod(at, 1100)
    work = cycles * 1000 + min(rest, 1000)
    assert out.redone_s == pytest.approx(work - kept), why
    assert out.recovering_s == pytest.approx(100)
    assert (out.failures, out.during_recovery, out.from_disk) == (1, 0, 1)
    after, rest = divmod(out.wall_s - at - 100, 1100)
    assert out.productive_s == pytest.approx(kept + after * 1000 + min(rest, 1000))
    assert parts(out) == pytest.approx(out.wall_s)


@pytest.mark.parametrize(("at", "kept"), [(95.0, 0.0), (1234.0, 1200.0), (1255.0, 1200.0), (1262.0, 1250.0)])
def test_memory_tier_resumes_from_the_newest_copied_snapshot(scripted: Any, at: float, kept: float) -> None:
    case = Case(8, 1e-6, PROCESS, 5000.0, 0.0, memory_interval_s=50.0, memory_lag_s=10.0, disk_extra_s=70.0)
    if at == 95.0:
        case = replace(case, memory_interval_s=100.0)
    out = scripted(case, [at], hours=10)
    assert out.redone_s == pytest.approx(at - kept)
    assert out.recovering_s == pytest.approx(100)  # nothing from disk
    assert out.from_disk == 0


def test_resumed_snapshot_is_kept_while_the_next_is_copied(scripted: Any) -> None:
    case = Case(8, 1e-6, PROCESS, 1e6, 0.0, memory_interval_s=50.0, memory_lag_s=40.0)
    # Resumes at 200; 30 s later the snapshot at 200 is still the newest, though it is younger than the lag.
    out = scripted(case, [245.0, math.inf, 30.0], hours=1)
    assert out.failures == 2
    assert out.redone_s == pytest.approx(45 + 30)


def test_save_points_are_unchanged_after_a_resume_from_memory(scripted: Any) -> None:
    case = Case(8, 1e-6, PROCESS, 1000.0, 100.0, memory_interval_s=50.0)
    out = scripted(case, [1600.0], hours=2)
    # 1000 work, 100 stall, 500 work; 100 s down; resumes at 1500 of work with the second save 500 later.
    assert out.redone_s == pytest.approx(0)
    assert out.save_stalls_s == pytest.approx(600)
    assert out.productive_s == pytest.approx(7200 - 600 - 100)


def test_a_failure_during_recovery_starts_another(scripted: Any) -> None:
    out = scripted(Case(8, 1e-6, PROCESS, 1000.0, 100.0), [500.0, 60.0, 99.0], hours=1)
    assert (out.failures, out.during_recovery) == (3, 2)
    assert out.recovering_s == pytest.approx(60 + 99 + 100)
    assert out.redone_s == pytest.approx(500)  # once


def test_a_run_may_end_while_it_recovers(scripted: Any) -> None:
    out = scripted(Case(8, 1e-6, PROCESS, 1000.0, 100.0), [HOUR - 30], hours=1)
    assert out.recovering_s == pytest.approx(30)
    assert parts(out) == pytest.approx(HOUR)


def test_without_a_spare_it_waits_for_whichever_node_comes_first(scripted: Any) -> None:
    case = Case(8, 1e-6, NODE, 1000.0, 100.0, replacement_s=1800.0, repair_s=7200.0)
    out = scripted(case, [500.0], hours=3, repair_s=7200.0)
    assert (out.waiting_s, out.recovering_s, out.out_of_spares) == (
        pytest.approx(1800),
        pytest.approx(100),
        1,
    )
    assert scripted(replace(case, repair_s=600.0), [500.0], 3, 600.0).waiting_s == pytest.approx(600)


def test_a_spare_takes_over_at_once_until_the_pool_is_dry(scripted: Any) -> None:
    case = Case(8, 1e-6, NODE, 1000.0, 100.0, spares=1, replacement_s=1800.0, repair_s=7200.0)
    # The script's every failure strikes a training node. The first gets the spare; the second waits 1,800 s.
    out = scripted(case, [500.0, math.inf, 500.0], hours=5, repair_s=7200.0)
    assert (out.failures, out.out_of_spares) == (2, 1)
    assert out.waiting_s == pytest.approx(1800)
    # Where the repaired node is back before the second failure, nobody waits.
    later = scripted(case, [500.0, math.inf, math.inf, 500.0], hours=5, repair_s=7200.0)
    assert (later.failures, later.out_of_spares, later.waiting_s) == (2, 0, 0)


def test_it_shrinks_by_a_replica_and_grows_again(scripted: Any) -> None:
    case = Case(
        *(8, 1e-6, NODE, 1e6, 0.0),
        replacement_s=1800.0,
        repair_s=7200.0,
        shrink=True,
        replica_nodes=2,
        shrink_extra_s=50.0,
        grow_s=40.0,
        memory_interval_s=10.0,
    )
    out = scripted(case, [1000.0], hours=2, repair_s=7200.0)
    assert out.waiting_s == 0
    assert out.recovering_s == pytest.approx(100 + 50 + 40)
    # 6 of 8 nodes train from 1150 until the node comes at 2800.
    assert out.reduced_s == pytest.approx((2800 - 1150) / 4)
    assert parts(out) == pytest.approx(out.wall_s)


def test_two_lost_nodes_share_the_replica_that_was_dropped(scripted: Any) -> None:
    case = Case(
        8, 1e-6, NODE, 1e6, 0.0, replacement_s=1800.0, shrink=True, replica_nodes=2, memory_interval_s=10.0
    )
    case = replace(case, repair_s=7200.0)
    out = scripted(case, [1000.0, math.inf, 100.0], hours=0.7, repair_s=7200.0)
    assert out.failures == 2
    # The healthy node of the dropped replica takes the second one's place: six nodes still train.
    assert out.reduced_s == pytest.approx((0.7 * HOUR - 1100 - 100) / 4)


def test_when_both_copies_are_lost_the_disk_remains(scripted: Any) -> None:
    case = Case(8, 1e-6, NODE, 1000.0, 0.0, spares=5, repair_s=1e9, memory_interval_s=50.0, disk_extra_s=70.0)
    out = scripted(case, [1730.0, 60.0], hours=5, repair_s=1e9)  # the script's second node is the partner
    assert out.from_disk == 1
    assert out.redone_s == pytest.approx(730)
    assert out.recovering_s == pytest.approx(60 + 100 + 70)
    third = scripted(case, [1730.0, 60.0, math.inf, 520.0], hours=5, repair_s=1e9)
    assert (third.failures, third.from_disk) == (3, 1)
    assert third.redone_s == pytest.approx(730 + 20)
    apart = scripted(case, [1730.0, math.inf, 60.0], hours=5, repair_s=1e9)
    assert (apart.failures, apart.from_disk) == (2, 0)


# -- any run


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seconds = st.floats(0, 3000)
    nodes = 2 * draw(st.integers(1, 600))
    cut = draw(st.lists(st.floats(0.05, 1), min_size=3, max_size=3))
    names = ("process", "reset", "node")
    branches = tuple(Branch(c / sum(cut), name, draw(seconds)) for c, name in zip(cut, names, strict=True))
    return Case(
        nodes,
        draw(st.sampled_from([0.0, 1e-8, 1e-7, 5e-7])),
        branches,
        disk_interval_s=draw(st.floats(10, 20000)),
        disk_stall_s=draw(st.floats(0, 100)),
        disk_lag_s=draw(seconds),
        memory_interval_s=draw(st.sampled_from([0.0, 10.0, 100.0])),
        memory_stall_s=draw(st.floats(0, 5)),
        memory_lag_s=draw(st.floats(0, 100)),
        disk_extra_s=draw(seconds),
        spares=draw(st.integers(0, 10)),
        replacement_s=draw(seconds),
        repair_s=draw(st.floats(1, 1e5)),
        reset_s=draw(seconds),
        shrink=draw(st.booleans()),
        replica_nodes=2,
        shrink_extra_s=draw(seconds),
        grow_s=draw(seconds),
    )


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 10**6), days=st.floats(0.01, 10))
def test_every_second_of_a_run_is_accounted_for(case: Case, seed: int, days: float) -> None:
    out = simulate(case, days, seed)
    assert parts(out) == pytest.approx(out.wall_s, rel=1e-9, abs=1e-3)
    assert out.wall_s == days * DAY_S
    for name in ("productive", "redone", "save_stalls", "snapshots", "recovering", "waiting", "reduced"):
        assert getattr(out, f"{name}_s") >= -1e-3, name
    assert 0 <= out.ettr <= 1 / (1 + case.memory_overhead) + 1e-9
    assert out.during_recovery <= out.failures >= out.from_disk
    assert case.shrink or out.reduced_s == pytest.approx(0, abs=1e-3)


def test_a_seed_decides_the_run() -> None:
    case = make_case(SCENARIOS[-1], 128, 6.5e-3, MEASURED, Costs())
    assert simulate(case, 30, 5) == simulate(case, 30, 5)
    assert simulate(case, 30, 5) != simulate(case, 30, 6)


# -- formulas


def test_intervals() -> None:
    assert young(10.0, 20000.0) == pytest.approx(632.456, abs=1e-3)


def test_first_order_is_the_published_formula() -> None:
    rate, recovery, interval, stall = 100 * 3.79e-3 / DAY_S, 100.0, 1000.0, 10.0
    expected = (1 - rate * (recovery + interval / 2)) / (1 + stall / interval)
    assert first_order(Case(100, rate / 100, PROCESS, interval, stall)) == pytest.approx(expected, rel=1e-12)


def test_renewal_matches_daly_and_the_first_order_limit() -> None:
    mttf, interval, stall, recovery = 5000.0, 1000.0, 10.0, 100.0
    wall = (
        mttf * math.exp(recovery / mttf) * math.expm1((interval + stall) / mttf)
    )  # Daly's complete model, of one interval
    case = Case(1, 1 / mttf, PROCESS, interval, stall)
    assert renewal(case) == pytest.approx(interval / wall, rel=1e-12)
    rare = replace(case, failures_per_node_s=1e-9, disk_lag_s=60.0, disk_stall_s=0.0)
    assert 1 - renewal(rare) == pytest.approx(1 - first_order(rare), rel=1e-3)


@pytest.mark.parametrize(
    ("mean", "spares"), [(0.0, 0), (0.005, 0), (0.05, 1), (1.0, 4), (6.0, 12), (100.0, 124)]
)
def test_spares_cover_the_nodes_away(mean: float, spares: int) -> None:
    def covered(n: int) -> float:
        return (
            sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(n + 1))
            if mean
            else 1.0
        )

    assert spares_for(mean) == spares
    assert covered(spares) >= 0.99
    assert spares == 0 or covered(spares - 1) < 0.99


@pytest.mark.parametrize(("n", "t"), [(5, 2.776), (20, 2.093), (200, 1.972)])
def test_confidence_is_student_s(n: int, t: float) -> None:
    values = [float(i % 2) for i in range(n)]
    mean, error = mean_and_error(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    assert error == pytest.approx(t * deviation / math.sqrt(n), rel=5e-3)
    assert math.isnan(mean_and_error([1.0])[1])


# -- cases of rates and measurements


def test_published_figures_agree_with_each_other() -> None:
    assert sum(c.count for c in CAUSES) == 419
    llama = next(r for r in RATES if r.name == "llama-3")
    assert llama.per_node_day == pytest.approx(419 / (54 * 2048), rel=1e-3)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("nodes", [2, 16, 2048])
def test_every_scenario_makes_a_case(scenario: Scenario, nodes: int) -> None:
    for rate in (*(r.per_node_day for r in RATES), 0.0):
        case = make_case(scenario, nodes, rate, MEASURED, Costs())
        assert case.mttf_s == pytest.approx(DAY_S / (nodes * rate)) if rate else math.isinf(case.mttf_s)
        assert (case.spares > 0) == scenario.spares
        assert case.disk_interval_s % Costs().step_s == case.memory_interval_s % Costs().step_s == 0
        assert 0 < renewal(case) <= 1


def scenario_named(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)


def down(name: str, nodes: int = 100, **changes: float) -> dict[tuple[str, float], float]:
    """(remedy, seconds) -> share, of a cluster where nothing but what was measured takes time."""
    free = Costs(new_process_s=0, communicators_s_per_gpu=0, memory_load_s=0, disk_load_s=0, hang_steps=0)
    case = make_case(scenario_named(name), nodes, 1e-3, MEASURED, replace(free, **changes))
    return {(b.remedy, round(b.down_s, 6)): b.share for b in case.branches}


def test_each_rung_takes_its_measured_time() -> None:
    ours = down("replica-spares")
    assert set(ours) == {
        *(("process", 0.5), ("process", 20.5), ("reset", 5.0)),
        *(("node", 5.0), ("node", 25.0), ("node", 6.0), ("node", 26.0)),
    }
    assert ours["process", 20.5] == pytest.approx(7 / 419)  # NCCL watchdog
    assert ours["node", 26.0] == pytest.approx(42 / 419 / 100)  # a dead link, to the coordinator's node
    assert ("process", 4.0) in down("disk")  # without state in memory: restart
    assert ("node", 5.0 + 120.0) in down("disk", disk_load_s=120.0)
    assert ("node", 5.0 + 8.0) in down("memory", communicators_s_per_gpu=0.01)
    assert ("process", 0.5 + 50.0) in down("memory", hang_steps=5.0)  # the longer of deadline and measurement


def test_torchrun_needs_a_person_as_often_as_it_was_seen_to() -> None:
    theirs = down("torchrun")
    crash, watchdog = 56 / 419, 7 / 419
    assert theirs["process", 3.75] == pytest.approx(crash / 6)
    assert theirs["process", 1800.0] == pytest.approx(crash * 5 / 6)
    assert theirs["process", 2400.0] == pytest.approx(watchdog * 5 / 6)
    assert not any(remedy == "node" and seconds < 1800 for remedy, seconds in theirs)
    fixed = down("torchrun-fixed")
    assert fixed["process", 3.75] == pytest.approx(crash)
    assert fixed["node", 14.7] == pytest.approx((248 - 42) / 419 * 0.99)
    assert fixed["node", 1800.0] == pytest.approx((248 - 42) / 419 * 0.01)


def test_intervals_of_cases() -> None:
    costs = Costs()
    by_name = {s.name: make_case(s, 2048, 3.79e-3, MEASURED, costs) for s in SCENARIOS}
    mttf = DAY_S / (2048 * 3.79e-3)
    assert by_name["disk-500"].disk_interval_s == 5000
    assert by_name["disk"].disk_interval_s == round(young(5.0, mttf) / 10) * 10
    assert by_name["memory"].memory_interval_s == 100
    assert by_name["memory"].memory_overhead == pytest.approx(0.02)
    # 2 % at 10 steps of 10 s are 2 s a snapshot.
    assert by_name["memory-young-spares"].memory_interval_s == round(young(2.0, mttf) / 10) * 10
    assert by_name["replica-spares"].memory_interval_s == 10
    assert by_name["replica-spares"].memory_overhead == 0


# -- what was measured


def measured_file(folder: Path, **changes: Any) -> Path:
    values = {
        "rank_killed_in_place_s": 0.5,
        "rank_killed_restart_s": 4,
        "node_lost_spare_s": 5.0,
        "coordinator_lost_s": 6.0,
        "hang_detect_s": 20.0,
        "snapshot_overhead": 0.02,
        "snapshot_every_steps": 10,
        "torchrun_s": 3.0,
    }
    path = folder / "recovery.json"
    path.write_text(json.dumps({"measured": {**values, **changes}, "machine": "here", "date": "today"}))
    return path


def test_measurements_are_read_and_what_is_not_needed_is_left(tmp_path: Path) -> None:
    assert Measured.read(measured_file(tmp_path)) == MEASURED


def test_every_missing_or_impossible_value_is_named_at_once(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"node_lost_spare_s": None, "hang_detect_s": -1, "coordinator_lost_s": "5"}
    changes |= {"rank_killed_restart_s": math.inf, "snapshot_overhead": True, "snapshot_every_steps": 0}
    with pytest.raises(InputError) as caught:
        Measured.read(measured_file(tmp_path, **changes))
    messages = [d.message for d in caught.value.diagnostics]
    assert messages == [
        "measured.rank_killed_restart_s cannot be inf",
        "measured.node_lost_spare_s is missing",
        "measured.coordinator_lost_s is not a number: '5'",
        "measured.hang_detect_s cannot be -1",
        "measured.snapshot_overhead is not a number: True",
        "measured.snapshot_every_steps cannot be 0",
    ]
    assert all(d.hint for d in caught.value.diagnostics)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", 'has no object "measured"'),
        ('{"measured": 3}', 'has no object "measured"'),
        ('{"measured": {}, "machine": "", "date": 5}', "machine is missing"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        Measured.read(path)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        Measured.read(path)
