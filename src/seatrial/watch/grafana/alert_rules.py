"""Prometheus alert rules: what can be said over the series of `/metrics`, with the limits of Seatrial's own alerts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from seatrial.hardware.counters import LIMITS, NVLINK_LIMITS, WAIT_SHARE
from seatrial.job.alert_rules import Rule, rules
from seatrial.record.series import PREFIX
from seatrial.watch.grafana.queries import not_scraped, of_node, of_run, with_run

# Speed is compared over two windows. Once a drop has lasted for half of the second, the lower speed is the usual one.
_NOW, _BEFORE = "5m", "6h"
_DRIFT = "[10m]", "[2h] offset 10m"
_SPEED = f"{PREFIX[:-1]}:run_tokens_per_second_per_rank"  # recorded by the rules themselves
_HELD_BACK = (
    "hw_slowdown|hw_thermal|hw_power_brake|sw_thermal"  # the software's power cap is usual under load
)

# Seatrial's own alerts do not have these.
_CLOCK = Rule(
    name="clock",
    severity="warning",
    for_s=600,
    clear_s=0,
    summary="clock not synchronised",
    command="chronyc tracking",
    source="notes: times of several hosts cannot be compared; ten minutes, as it takes a while after a boot",
    limits={},
)
_DOWN = Rule(
    name="down",
    severity="warning",
    for_s=120,
    clear_s=0,
    summary="metrics of the node cannot be read",
    command="seatrial status {run}",
    source="notes: a lost node leaves the file of targets; what stays is a firewall, or an agent without telemetry",
    limits={},
)


@dataclass(frozen=True)
class AlertRule:
    """One alert, about a run or a node of it. Its texts are templates of Prometheus."""

    name: str
    rule: Rule
    of_node: bool
    expression: str
    description: str

    @property
    def place(self) -> str:
        return "{{ $labels.run }}" + (", node {{ $labels.node }}" if self.of_node else "")

    @property
    def command(self) -> str:
        """What to run next. The run is named, as series do not know its folder."""
        command = self.rule.command if self.of_node else self.rule.command.removesuffix(" --node {node}")
        return command.format(run="{{ $labels.run }}", node="{{ $labels.node }}")


def alert_rules() -> list[AlertRule]:
    """All of them. A node's alert has the labels run and node, and one for its device."""
    known = rules()
    return [*_of_run(known), *_of_node(known)]


def rules_yaml() -> str:
    """They, as a rule file of Prometheus 2.42 or later (`keep_firing_for`)."""
    speed = f"{of_run('tokens_per_second')} / {of_run('ranks')}"
    alerts = "".join(_yaml(each) for each in alert_rules())
    return f"""# Written by `seatrial watch --grafana`, which writes it again as a whole: keep changes in a file of your own.
groups:
  - name: seatrial
    rules:
      - record: {_SPEED}
        expr: |
          {speed}
{alerts}"""


def _yaml(each: AlertRule) -> str:
    expression = each.expression.replace("\n", "\n          ")
    keep = f"\n        keep_firing_for: {each.rule.clear_s:g}s" if each.rule.clear_s else ""
    # A string of JSON is one of YAML.
    return f"""      - alert: {each.name}
        expr: |
          {expression}
        for: {each.rule.for_s:g}s{keep}
        labels:
          severity: {each.rule.severity}
        annotations:
          summary: {json.dumps(f"{each.place}: {each.rule.summary}")}
          description: {json.dumps(each.description, ensure_ascii=False)}
          command: {json.dumps(each.command)}
"""


def _of_run(known: dict[str, Rule]) -> Iterator[AlertRule]:
    running = f"{of_run('running')} == 1"

    def alert(name: str, key: str, expression: str, description: str) -> AlertRule:
        return AlertRule(name, known[key], False, expression, description)

    limits = known["no_progress"].limits
    last, began = of_run("last_step_timestamp_seconds"), of_run("start_timestamp_seconds")
    usual = of_run("step_seconds", over="quantile_over_time(0.5, {}[15m])")
    yield alert(
        "SeatrialNoProgress",
        "no_progress",
        f"""(
  time() - ({last} >= {began})
    > clamp_min({limits["factor"]:g} * {usual}, {limits["least_s"]:g})
  or
  time() - ({began} unless {last} >= {began})
    > {limits["first_step_s"]:g}
)
unless {of_run("step")} >= {of_run("target_step")}
and {running}""",
        "No step has ended for {{ $value | humanizeDuration }}",
    )
    losses = [f"{PREFIX}run_{name}" for name in ("loss", "gradient_norm", "validation_loss")]
    yield alert(
        "SeatrialLossNotFinite",
        "nonfinite",
        "\nor\n".join(f"max by (run) ({name} != {name} or abs({name}) == Inf)" for name in losses),
        "The value is {{ $value }}",
    )
    yield alert(
        "SeatrialThroughputDrop",
        "throughput_drop",
        f"""quantile_over_time(0.5, {_SPEED}[{_NOW}])
  / quantile_over_time(0.5, {_SPEED}[{_BEFORE}] offset {_NOW})
  <= {known["throughput_drop"].limits["limit"]:g}
and {running}""",
        f"{{{{ $value | humanizePercentage }}}} of the usual tokens/s of a rank: median of {_NOW} against that of {_BEFORE} before",
    )
    limits = known["gradient_drift"].limits
    norm, before = (of_run("gradient_norm", over=f"quantile_over_time(0.5, {{}}{w})") for w in _DRIFT)
    yield alert(
        "SeatrialGradientDrift",
        "gradient_drift",
        f"""{norm}
  >= {limits["limit"]:g} * {before}
and {of_run("step")} > {limits["after_step"]:g}
and {running}""",
        "The gradient norm is {{ $value }}",
    )
    saved = f"({of_run('checkpoint_step')} or 0 * {of_run('step')})"
    yield alert(
        "SeatrialCheckpointOverdue",
        "checkpoint_overdue",
        f"""{of_run("step")} - {saved}
  >= {known["checkpoint_overdue"].limits["factor"]:g} * {of_run("checkpoint_interval_steps")}
and {running}""",
        "{{ $value }} steps are in no complete checkpoint",
    )
    free = f"{of_node('storage_free_bytes')} / {of_node('storage_total_bytes')}"
    yield alert(
        "SeatrialStorageNearlyFull",
        "storage_full",
        f"min by (run, storage) ({with_run(free)}) <= {known['storage_full'].limits['limit']:g}",
        "Storage of {{ $labels.storage }}: {{ $value | humanizePercentage }} free",
    )
    yield alert(
        "SeatrialNoSpareNode",
        "spares_exhausted",
        f"{of_run('spare_nodes')} == 0\nand {of_run('spare_nodes', over='max_over_time({}[1d])')} > 0\nand {running}",
        "The last spare node has joined the run or was lost",
    )


def _of_node(known: dict[str, Rule]) -> Iterator[AlertRule]:
    def alert(name: str, rule: Rule, expression: str, description: str) -> AlertRule:
        return AlertRule(name, rule, True, expression, description)

    rule = known["gpu_hot"]
    yield alert(
        "SeatrialGpuHot",
        rule,
        with_run(f"{of_node('gpu_temperature_celsius')} >= {rule.limits['limit']:g}"),
        "GPU {{ $labels.gpu }} has {{ $value }} °C",
    )
    rule = known["gpu_throttled"]
    ratio = of_node("gpu_throttle_ratio", f'{{reason=~"{_HELD_BACK}"}}')
    yield alert(
        "SeatrialGpuThrottled",
        rule,
        with_run(f"{ratio} >= {rule.limits['limit']:g}"),
        "GPU {{ $labels.gpu }}, {{ $labels.reason }}: {{ $value | humanizePercentage }} of the time",
    )
    rule = known["link_errors"]
    # These series are sums: their limit is that of the most common kind. Seatrial itself judges each kind of its own.
    yield alert(
        "SeatrialNvlinkErrors",
        rule,
        *_grown("gpu_nvlink_errors_total", _least("replay errors"), "GPU", "gpu"),
    )
    yield alert(
        "SeatrialPcieReplays", rule, *_grown("gpu_pcie_replays_total", rule.limits["limit"], "GPU", "gpu")
    )
    yield alert(
        "SeatrialPortErrors", rule, *_grown("port_errors_total", _least("symbol_error"), "Port", "port")
    )
    yield alert(
        "SeatrialPortDown",
        rule,
        with_run(
            f"{of_node('port_active')} == 0\n  or increase({of_node('port_link_downed_total')}[10m]) > 0"
        ),
        "Port {{ $labels.port }} is not active, or its link was lost in the last 10 minutes",
    )
    beyond = [f"avg_over_time({of_node('port_transmit_wait_ratio')}[10m]) / {WAIT_SHARE}"]
    for name, counter in (
        ("port_retransmissions_total", "out_of_sequence"),
        ("port_cnp_total", "np_cnp_sent"),
        ("port_ecn_marked_packets_total", "np_ecn_marked_roce_packets"),
        ("port_discards_total", "port_xmit_discards"),
    ):
        beyond.append(f"increase({of_node(name)}[10m]) / {_least(counter)}")
    worst = "\n  or\n  ".join(f"{each} >= 1" for each in beyond)
    yield alert(
        "SeatrialCongestion",
        known["congestion"],
        f"max by (run, node, port) (\n  {with_run(worst)}\n)",
        "Port {{ $labels.port }}: {{ $value }} times the limit of waiting, retransmissions, CNP, ECN marks or discards",
    )
    yield alert(
        "SeatrialClockNotSynchronised",
        _CLOCK,
        with_run(f"1 - ({of_node('node_clock_synchronised')} == 0)"),
        "Neither NTP nor PTP keeps the clock of {{ $labels.instance }}",
    )
    yield alert("SeatrialNodeNotScraped", _DOWN, not_scraped(), "{{ $labels.instance }} does not answer")


def _grown(name: str, least: float, device: str, label: str) -> tuple[str, str]:
    """(expression, description) of a counter that grows by `least` in 10 minutes."""
    text = f"{device} {{{{ $labels.{label} }}}}: {{{{ $value }}}} in 10 minutes"
    return with_run(f"increase({of_node(name)}[10m]) >= {least:g}"), text


def _least(counter: str) -> float:
    """How much of it in 10 minutes is too much, by the limits of `hardware.counters`."""
    limit = next(each for each in (*LIMITS, *NVLINK_LIMITS) if each.counter == counter)
    return max(limit.least, limit.per_s * 600)
