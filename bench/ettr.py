"""ETTR of a long run at several sizes, simulated from measured recovery times and published failure rates.

    python bench/ettr.py --recovery bench/recovery.json [--rate llama-3|all] [--nodes 16 128 1024 2048] [--days 30]
                         [--seeds 20] [--json] [--write docs]

The recovery file is the output of bench/recovery.py. A missing value ends the script with exit 2; there are no defaults.
`--write FOLDER` puts the tables into FOLDER/ettr.md, between its markers, and draws FOLDER/ettr.svg (matplotlib).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.base.errors import InputError
from seatrial.base.units import duration
from seatrial.hardware.failures import RATES, Rate
from seatrial.plan.cost.ettr import renewal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))
from ettr_cases import CAUSES, SCENARIOS, Costs, Measured, Scenario, make_case
from ettr_simulation import first_order, mean_and_error, simulate

GOAL = 0.97  # ByteRobust, 9,600 GPUs for three months (arXiv:2509.16293)
GOAL_NODES = 9600 // 8
LOSSES = ("redone", "save_stalls", "snapshots", "recovering", "waiting", "reduced")
BEGIN, END = "<!-- begin: written by bench/ettr.py -->", "<!-- end -->"
# Shown in the plot, with colour (Okabe and Ito's, safe for colour-blind readers), line and marker.
DRAWN = {
    "replica-spares": ("#009E73", "-", "D"),
    "memory-young-spares": ("#0072B2", "-", "o"),
    "memory-spares": ("#56B4E9", "-", "s"),
    "memory": ("#56B4E9", "--", "s"),
    "disk-spares": ("#E69F00", "-", "^"),
    "disk": ("#E69F00", "--", "^"),
    "torchrun-fixed": ("#CC79A7", ":", "v"),
    "torchrun": ("#D55E00", ":", "x"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One scenario at one size and rate: simulation and formulas."""

    rate: str
    scenario: str
    nodes: int
    spares: int
    interval_s: float  # of the tier that is resumed from
    mttf_h: float
    ettr: float
    error: float  # half the 95 % interval of the mean
    first_order: float
    renewal: float
    failures: float
    out_of_spares: float
    from_disk: float
    lost: dict[str, float]  # share of the wall-clock time


def row(
    scenario: Scenario, nodes: int, rate: Rate, measured: Measured, costs: Costs, days: float, seeds: int
) -> Row:
    case = make_case(scenario, nodes, rate.per_node_day, measured, costs)
    runs = [simulate(case, days, seed) for seed in range(seeds)]
    mean, error = mean_and_error([run.ettr for run in runs])

    def average(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    return Row(
        rate=rate.name,
        scenario=scenario.name,
        nodes=nodes,
        spares=case.spares,
        interval_s=case.memory_interval_s or case.disk_interval_s,
        mttf_h=case.mttf_s / 3600,
        ettr=mean,
        error=error,
        first_order=first_order(case),
        renewal=renewal(case),
        failures=average("failures"),
        out_of_spares=average("out_of_spares"),
        from_disk=average("from_disk"),
        lost={name: average(f"{name}_s") / average("wall_s") for name in LOSSES},
    )


# -- tables


def percent(value: float) -> str:
    return f"{value * 100 + 0.0:.2f}".replace("-0.00", "0.00")


def per_1000(rate: Rate) -> str:
    return f"{rate.per_node_day * 1000:.3g} failures per 1,000 node-days"


def beside(row: Row, name: str) -> str:
    """A formula's value with its difference from the simulation, in points; or "below 0"."""
    value = getattr(row, name)
    return f"{percent(value)} ({(value - row.ettr) * 100:+.2f})" if value > 0 else "below 0"


HEADER = [
    "scenario",
    "nodes",
    "spares",
    "interval",
    "ETTR %",
    "first order",
    "renewal",
    "failures",
    "on disk",
]
HEADER += [name.replace("_", " ") for name in LOSSES]


def cells(r: Row) -> list[str]:
    out = [r.scenario, f"{r.nodes:,}", str(r.spares), duration(r.interval_s)]
    out += [f"{percent(r.ettr)} ±{percent(r.error)}", beside(r, "first_order"), beside(r, "renewal")]
    out += [f"{r.failures:.1f}", f"{r.from_disk:.1f}"]
    return out + [percent(r.lost[name]) for name in LOSSES]


def text_table(header: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    rows = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *lines]
    ]
    return "\n".join(r.rstrip() for r in rows)


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    parts = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in parts)


def overview(rows: list[Row], rate: str, sizes: list[int]) -> str:
    """One line per scenario, one column per size; values that reach the goal are bold."""
    found = {(r.scenario, r.nodes): r for r in rows if r.rate == rate}
    lines = []
    for s in SCENARIOS:
        line = [f"`{s.name}`", s.label]
        for n in sizes:
            r = found[s.name, n]
            shown = f"{percent(r.ettr)} ±{percent(r.error)}"
            line.append(f"**{shown}**" if r.ettr >= GOAL else shown)
        lines.append(line)
    return markdown_table(["scenario", "what it has", *(f"{n:,}" for n in sizes)], lines)


def document(
    rows: list[Row], sizes: list[int], days: float, seeds: int, measured: Measured, costs: Costs
) -> str:
    """The generated part of docs/ettr.md."""
    out = [
        f"Measured times: {measured.machine}; {measured.date}. {days:g} days, {seeds} seeds, mean and 95 % "
        f"interval. ETTR in percent; bold: at least {GOAL:.0%}.",
    ]
    for rate in sorted(RATES, key=lambda r: r.name != "llama-3"):
        out += [f"### {rate.label}: {per_1000(rate)}"]
        out += [f"Source: {rate.source}.", overview(rows, rate.name, sizes)]
    shown = [cells(r) for r in rows if r.rate == "llama-3"]
    out += ["### Simulation and formulas, and where the time went (Llama 3's rate)"]
    out += ["Percent of the wall-clock time; in brackets formula minus simulation, in points."]
    out += [markdown_table([*HEADER], [[f"`{c[0]}`", *c[1:]] for c in shown])]
    values = [(f.name, getattr(measured, f.name)) for f in dataclasses.fields(measured)]
    numbers = [[f"`{name}`", f"{value:g}"] for name, value in values if isinstance(value, float)]
    out += ["### Measured", markdown_table(["what", "seconds, share or steps"], numbers)]
    listed = [
        [f"`{name}`", f"{value:,.6g} {unit}".strip(), source] for name, value, unit, source in costs.table()
    ]
    out += ["### Assumed for a cluster", markdown_table(["what", "value", "where from"], listed)]
    out += [
        f"### Sensitivity, each value doubled: {max(sizes):,} nodes, Llama 3's rate",
        sensitivity(max(sizes), measured, costs),
    ]
    causes = [[c.name, str(c.count), c.remedy, "yes" if c.hangs else ""] for c in CAUSES]
    out += ["### Causes", markdown_table(["cause", "of 419", "what it needs", "hangs"], causes)]
    return "\n\n".join(out)


def sensitivity(nodes: int, measured: Measured, costs: Costs) -> str:
    """Sensitivity: points of ETTR if an assumption doubles, by the renewal formula."""
    names = ("torchrun", "disk", "memory", "memory-young-spares", "replica-spares")
    scenarios = [s for s in SCENARIOS if s.name in names]
    rate = next(r for r in RATES if r.name == "llama-3").per_node_day

    def values(given: Costs) -> list[float]:
        return [renewal(make_case(s, nodes, rate, measured, given)) for s in scenarios]

    base, lines = values(costs), []
    for name, value, _, _ in costs.table():
        if isinstance(value, int) or name == "spare_quantile":
            continue
        changed = values(dataclasses.replace(costs, **{name: 2 * value}))
        moved = [f"{(new - old) * 100:+.2f}" for new, old in zip(changed, base, strict=True)]
        if any(float(m) for m in moved):
            lines.append([f"`{name}`", *(m if float(m) else "" for m in moved)])
    return markdown_table(["twice", *(f"`{s.name}`" for s in scenarios)], lines)


# -- plot


def draw(rows: list[Row], sizes: list[int], path: Path) -> None:
    """One panel per rate: ETTR against nodes. The axis is logarithmic in 1 - ETTR, so that 99 and 99.9 % are distinguishable."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(
            "--write draws with matplotlib, which is not installed", hint="pip install matplotlib"
        ) from error
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seatrial", "font.size": 9})
    from matplotlib import pyplot

    labels = {s.name: s.label for s in SCENARIOS}
    rates = [rate for rate in RATES if any(r.rate == rate.name for r in rows)]
    figure, axes = pyplot.subplots(
        2, 2, figsize=(9, 7.6), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for axis, rate in zip(axes.flat, rates, strict=False):
        for name, (colour, line, marker) in DRAWN.items():
            mine = {r.nodes: r for r in rows if (r.rate, r.scenario) == (rate.name, name)}
            lost = [1 - mine[n].ettr for n in sizes]
            axis.errorbar(
                sizes,
                lost,
                yerr=[mine[n].error for n in sizes],
                color=colour,
                linestyle=line,
                marker=marker,
                markersize=4.5,
                linewidth=1.4,
                elinewidth=0.8,
                label=labels[name],
            )
        axis.axhline(1 - GOAL, color="black", linewidth=0.9)
        axis.plot(GOAL_NODES, 1 - GOAL, "*k", markersize=9, label="97 % on 1,200 nodes (ByteRobust)")
        axis.set_title(f"{rate.label}: {per_1000(rate)}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.minorticks_off()
        axis.set_yscale("log")
        ticks = [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1]
        axis.set_yticks(ticks, [f"{100 - 100 * t:.3g} %" for t in ticks])
        axis.minorticks_off()
        axis.set_ylim(1, 0.0008)
        axis.grid(axis="y", linewidth=0.4, color="#cccccc")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("nodes (8 GPUs each)")
    for axis in axes[:, 0]:
        axis.set_ylabel("ETTR over 30 days")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def write(folder: Path, text: str) -> None:
    """Put the generated part between the markers of FOLDER/ettr.md; the rest of the file is written by hand."""
    path = folder / "ettr.md"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise InputError(
            f"{path} lacks the lines {BEGIN} and {END}", hint="restore the file from version control"
        )
    head, rest = before.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recovery", type=Path, required=True, help="JSON that bench/recovery.py wrote")
    parser.add_argument("--rate", default="llama-3", choices=[*(r.name for r in RATES), "all"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 128, 1024, 2048])
    parser.add_argument("--days", type=float, default=30)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="update ettr.md and ettr.svg there (all rates)"
    )
    arguments = parser.parse_args()
    costs = Costs()
    for n in arguments.nodes:
        if n < 2 or n % costs.replica_nodes:
            parser.error(f"--nodes {n}: a multiple of {costs.replica_nodes}, as a replica takes that many")
    if arguments.seeds < 2 or not arguments.days > 0:
        parser.error("--seeds must be at least 2 and --days above 0")
    try:
        measured = Measured.read(arguments.recovery)
        began = time.perf_counter()
        every = arguments.rate == "all" or arguments.write is not None
        rates = [r for r in RATES if every or r.name == arguments.rate]
        rows = [
            row(scenario, nodes, rate, measured, costs, arguments.days, arguments.seeds)
            for rate in rates
            for scenario in SCENARIOS
            for nodes in arguments.nodes
        ]
        took = time.perf_counter() - began
        if arguments.write is not None:
            draw(rows, arguments.nodes, arguments.write / "ettr.svg")
            write(
                arguments.write,
                document(rows, arguments.nodes, arguments.days, arguments.seeds, measured, costs),
            )
    except InputError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if arguments.json:
        result: dict[str, Any] = {
            "schema_version": 1,
            "days": arguments.days,
            "seeds": arguments.seeds,
            "measured": dataclasses.asdict(measured),
            "costs": dataclasses.asdict(costs),
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        print(json.dumps(result, indent=1))
        return 0
    print(f"measured: {measured.machine}; {measured.date}")
    for rate in rates:
        print(f"\n{rate.label}, {rate.per_node_day:g} failures per node-day: {rate.source}\n")
        print(text_table(HEADER, [cells(r) for r in rows if r.rate == rate.name]))
    print(f"\n{len(rows)} x {arguments.seeds} runs of {arguments.days:g} days in {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
