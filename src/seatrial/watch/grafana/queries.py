"""PromQL over the series of `record.series`, for panels and alert rules."""

from __future__ import annotations

from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES

JOB = "seatrial"  # job_name of the scrape configuration
INFO = f"{PREFIX}run_info"


def of_run(name: str, where: str = "", over: str = "{}", by: str = "run") -> str:
    """A series of the run, deduplicated: the coordinator may have moved, and `seatrial watch --web` also serves it.

    `over`: applied to the selector {} first, such as "max_over_time({}[1h])".
    """
    assert f"run_{name}" in RUN_SERIES, name
    return f"max by ({by}) ({over.format(f'{PREFIX}run_{name}{where}')})"


def of_node(name: str, where: str = "") -> str:
    """A series of a node; it has no label `run`."""
    assert name in NODE_SERIES, name
    return f"{PREFIX}{name}{where}"


def with_run(expression: str, where: str = "") -> str:
    """An expression over series of nodes, joined with the label `run`."""
    return f"({expression}) * on (job, instance) group_left (run) {INFO}{where}"


def not_scraped(where: str = "") -> str:
    """Agents of live runs that are not scraped: `up` alone is also 0 for nodes of finished runs."""
    known = f"last_over_time({INFO}{where}[1h]) and on (run) {of_run('running', where)} == 1"
    return f'(1 - (up{{job="{JOB}"}} == 0)) * on (job, instance) group_left (run, node) topk by (job, instance) (1, {known})'
