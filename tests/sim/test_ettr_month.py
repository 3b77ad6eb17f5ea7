"""ETTR over many simulated months: the means against the formulas, the pool of spares, the order of the scenarios, the script."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ettr_cases import SCENARIOS, Costs, Measured, make_case
from ettr_simulation import Case, first_order, mean_and_error, simulate

from seatrial.hardware.failures import RATES
from seatrial.plan.cost.ettr import DAY_S, Branch, renewal
from seatrial.record.interval import young

pytestmark = pytest.mark.cluster  # nothing is started, but it takes its time

SIZES = (16, 128, 1024, 2048)
LLAMA_3 = 3.79e-3 / DAY_S
SCRIPT = Path(__file__).parents[2] / "bench" / "ettr.py"
MEASURED = Measured(1.0, 5.0, 5.0, 5.0, 30.0, 0.02, 10.0, machine="limits, not measured", date="2026-11-21")


def mean_ettr(case: Case, seeds: int, days: float = 30) -> tuple[float, float]:
    return mean_and_error([simulate(case, days, seed).ettr for seed in range(seeds)])


def disk(nodes: int, rate: float, stall: float, lag: float = 0.0) -> Case:
    interval = young(stall, 1 / (nodes * rate))
    return Case(nodes, rate, (Branch(1.0, "process", 90.0),), interval, stall, lag)


def memory(nodes: int, rate: float, stall: float, lag: float = 10.0) -> Case:
    return Case(
        *(nodes, rate, (Branch(0.5, "process", 30.0), Branch(0.5, "process", 150.0)), 5000.0, stall, 60.0),
        memory_interval_s=100.0,
        memory_stall_s=2.0,
        memory_lag_s=lag,
    )


@pytest.mark.parametrize("tier", [disk, memory])
@pytest.mark.parametrize("nodes", SIZES)
def test_mean_matches_first_order_formula_within_its_assumptions(
    tier: Callable[[int, float, float], Case], nodes: int
) -> None:
    """Few failures within an interval and a recovery, nothing waits for a node: N r (R + tau/2) stays below 0.05."""
    case = tier(nodes, LLAMA_3, 5.0)
    lost = 90.0 + (case.memory_interval_s or case.disk_interval_s) / 2
    assert lost / case.mttf_s < 0.05
    mean, error = mean_ettr(case, 200)
    assert error < 0.002
    assert mean == pytest.approx(first_order(case), rel=0.01)


@pytest.mark.ci
@pytest.mark.parametrize("tier", [disk, memory])
@pytest.mark.parametrize("lag", [0.0, 200.0])
@pytest.mark.parametrize("mttf_s", [20000.0, 2000.0, 500.0])
def test_mean_matches_renewal_formula_at_any_failure_rate(
    tier: Callable[[int, float, float, float], Case], lag: float, mttf_s: float
) -> None:
    case = tier(1000, 1 / (1000 * mttf_s), 5.0, lag)
    if (
        case.memory_interval_s
    ):  # the formula knows one tier: a save would now and then be newer than a snapshot
        case = replace(case, disk_interval_s=1e9)
    mean, error = mean_ettr(case, 100)
    # The end of a month counts work that is not saved yet: at most an interval and a lag.
    assert abs(mean - renewal(case)) < 2 * error + 0.0005


def test_first_order_formula_breaks_down_at_frequent_failures() -> None:
    case = Case(2048, 2.2e-2 / DAY_S, (Branch(1.0, "process", 100.0),), 5000.0, 10.0)
    mean, error = mean_ettr(case, 50)
    assert first_order(case) < 0 < mean
    assert abs(mean - renewal(case)) < 2 * error


@pytest.mark.parametrize("spares", [0, 2048])
def test_failures_have_the_given_rate(spares: int) -> None:
    """Those of nodes that stand by do not count: they stop nothing."""
    case = replace(disk(2048, LLAMA_3, 5.0), spares=spares)
    runs = [simulate(case, 30, seed).failures for seed in range(200)]
    expected = 2048 * 3.79e-3 * 30
    assert statistics.fmean(runs) == pytest.approx(expected, abs=4 * math.sqrt(expected / 200))
    assert statistics.variance(runs) == pytest.approx(expected, rel=0.4)  # Poisson


def test_the_pool_runs_dry_as_seldom_as_it_was_sized_for() -> None:
    scenario = next(s for s in SCENARIOS if s.name == "replica-spares")
    case = make_case(scenario, 1024, 3.79e-3, MEASURED, Costs())
    runs = [simulate(case, 30, seed) for seed in range(100)]
    share = {r: sum(b.share for b in case.branches if b.remedy == r) for r in ("node", "reset")}
    away = (share["node"] * case.repair_s + share["reset"] * case.reset_s) / case.mttf_s
    # A lost node finds none standing by where as many as there are spares are away already.
    term, at_most = math.exp(-away), 1.0
    for k in range(case.spares):
        at_most -= term
        term *= away / (k + 1)
    lost = (share["node"] + share["reset"]) * sum(r.failures for r in runs)
    assert at_most < 0.05
    assert at_most / 3 < sum(r.out_of_spares for r in runs) / lost < at_most
    one = make_case(scenario, 1024, 3.79e-3, MEASURED, Costs(spare_quantile=0.2))
    assert one.spares < case.spares
    dry = sum(simulate(one, 30, seed).out_of_spares for seed in range(20)) / 20
    assert dry > 20 * sum(r.out_of_spares for r in runs) / 100


def test_what_each_measure_is_worth_at_2048_nodes() -> None:
    found = {s.name: mean_ettr(make_case(s, 2048, 3.79e-3, MEASURED, Costs()), 20)[0] for s in SCENARIOS}
    for worse, better in [
        *(("torchrun", "disk-500"), ("disk-500", "disk"), ("disk", "disk-spares"), ("disk", "memory")),
        *(("memory", "memory-shrink"), ("memory-shrink", "memory-spares"), ("disk-spares", "memory-spares")),
        *(("memory-spares", "memory-young-spares"), ("memory-young-spares", "replica-spares")),
        ("torchrun-fixed", "disk-spares"),
    ]:
        assert found[worse] < found[better], f"{worse} {found[worse]:.4f}, {better} {found[better]:.4f}"


# -- the script


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def recovery(tmp_path: Path) -> Path:
    given = {f: getattr(MEASURED, f) for f in MEASURED.__dataclass_fields__}
    machine, date = given.pop("machine"), given.pop("date")
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"measured": given, "machine": machine, "date": date}))
    return path


def test_the_script_refuses_to_invent_a_missing_value(recovery: Path) -> None:
    document = json.loads(recovery.read_text())
    del document["measured"]["node_lost_spare_s"], document["measured"]["snapshot_overhead"]
    recovery.write_text(json.dumps(document))
    done = script("--recovery", str(recovery))
    assert (done.returncode, done.stdout) == (2, "")
    assert "measured.node_lost_spare_s is missing" in done.stderr
    assert "measured.snapshot_overhead is missing" in done.stderr
    assert script().returncode == 2
    assert script("--recovery", str(recovery.with_name("none.json"))).returncode == 2


def test_script_prints_table_or_json_deterministically(recovery: Path) -> None:
    arguments = ("--recovery", str(recovery), "--nodes", "16", "64", "--seeds", "3", "--days", "10")
    first, again = script(*arguments, "--json"), script(*arguments, "--json")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == again.stdout
    document = json.loads(first.stdout)
    assert len(document["rows"]) == 2 * len(SCENARIOS)
    assert all(0 < row["ettr"] <= 1 for row in document["rows"])
    table = script(*arguments, "--rate", "all").stdout
    assert all(rate.label in table for rate in RATES)
    assert all(table.count(f"\n{s.name} ") == 2 * len(RATES) for s in SCENARIOS)


@pytest.mark.ci
def test_the_script_writes_between_the_markers_and_draws(recovery: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    page = tmp_path / "ettr.md"
    page.write_text("above\n<!-- begin: written by bench/ettr.py -->\nwhat was there\n<!-- end -->\nbelow\n")
    arguments = ("--recovery", str(recovery), "--seeds", "2", "--days", "2", "--write", str(tmp_path))
    assert script(*arguments).returncode == 0
    text, plot = page.read_text(), (tmp_path / "ettr.svg").read_text()
    assert text.startswith("above\n")
    assert text.endswith("<!-- end -->\nbelow\n")
    assert "what was there" not in text
    assert MEASURED.machine in text
    assert len(plot) < 200_000
    assert "ByteRobust" in plot
    assert script(*arguments).returncode == 0
    assert (page.read_text(), (tmp_path / "ettr.svg").read_text()) == (text, plot)
    page.write_text("no markers\n")
    refused = script(*arguments)
    assert refused.returncode == 2
    assert "lacks the lines" in refused.stderr
