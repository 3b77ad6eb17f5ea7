"""The panels of the Grafana dashboards: one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seatrial.hardware.counters import WAIT_SHARE
from seatrial.job.alert_rules import rules
from seatrial.watch.grafana.queries import not_scraped, of_node, of_run, with_run

Kind = Literal["timeseries", "stat", "bargauge", "table"]
_RUN, _RATE = '{run=~"$run"}', "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """`queries`: (PromQL, legend). `unit`: a Grafana unit. `limit`: red from this value on."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Kind = "timeseries"
    width: int = 8  # of 24
    stacked: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels under headings."""

    uid: str
    title: str
    several: bool  # the variable `run` is multi-valued
    of_nodes: bool  # has the variable `node`
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _run(name: str) -> str:
    return of_run(name, _RUN)


def _runs(title: str, unit: str, expression: str, limit: float | None = None) -> Panel:
    """A panel with the current value of each run."""
    return Panel(title, unit, ((expression, "{{run}}"),), "stat", 4, limit=limit)


def _curve(title: str, unit: str, *names: str) -> Panel:
    """A panel with series of a run over time."""
    return Panel(title, unit, tuple((_run(name), name.replace("_", " ")) for name in names))


def _node(name: str) -> str:
    return of_node(name, '{node=~"$node"}')


def _rate(name: str) -> str:
    return f"rate({_node(name)}{_RATE})"


def _devices(title: str, unit: str, *queries: tuple[str, str], limit: float | None = None) -> Panel:
    """A panel with series of nodes; legends start with the node."""
    legends = ((with_run(text, _RUN), f"node {{{{node}}}} {legend}".strip()) for text, legend in queries)
    return Panel(title, unit, tuple(legends), width=8, limit=limit)


def _limit(rule: str, name: str = "limit") -> float:
    return rules()[rule].limits[name]


_SPENT = of_run("goodput_seconds", _RUN, by="run, cause")
_BEFORE = of_run("goodput_seconds", _RUN, over="{} offset $__range", by="run, cause")
_GPU, _PORT = "GPU {{gpu}}", "port {{port}}"


def boards() -> tuple[Board, ...]:
    """All dashboards."""
    free = f"{of_node('storage_free_bytes')} / {of_node('storage_total_bytes')}"
    age = f"time() - {_run('last_step_timestamp_seconds')} and on (run) {_run('running')} == 1"
    progress = _runs("Steps done", "percentunit", f"{_run('step')} / {_run('target_step')}")
    left = _runs("Time left", "s", _run("eta_seconds"))
    ettr = _runs("Effective training time (ETTR)", "percentunit", _run("ettr_ratio"))
    saved = _runs("Age of the newest checkpoint", "s", f"time() - {_run('checkpoint_timestamp_seconds')}")
    late = _runs("Age of the last step", "s", age, limit=_limit("no_progress", "least_s"))
    cluster = (
        (
            "Progress",
            (late, progress, left, _runs("Tokens/s", "short", _run("tokens_per_second")), ettr, saved),
        ),
        (
            "Needs attention",
            (
                Panel(
                    "Alerts",
                    "none",
                    (('ALERTS{alertname=~"Seatrial.+", run=~"$run"}', ""),),
                    "table",
                    16,
                ),
                Panel(
                    "Nodes",
                    "none",
                    (
                        (_run("nodes"), "{{run}}: training"),
                        (_run("spare_nodes"), "{{run}}: spares"),
                        (f"count({not_scraped(_RUN)}) or vector(0)", "not scraped"),
                        (
                            f"count({with_run(of_node('node_clock_synchronised') + ' == 0', _RUN)}) or vector(0)",
                            "clock not synchronised",
                        ),
                    ),
                    "stat",
                ),
            ),
        ),
        (
            "Time and throughput",
            (
                Panel(
                    "Time by cause in this period",
                    "s",
                    ((f"{_SPENT} - ({_BEFORE} or 0 * {_SPENT}) > 0", "{{run}}: {{cause}}"),),
                    "bargauge",
                ),
                Panel("Throughput, tokens/s", "short", ((_run("tokens_per_second"), "{{run}}"),)),
                Panel(
                    "Free storage",
                    "percentunit",
                    ((f"min by (run, storage) ({with_run(free, _RUN)})", "{{run}}: {{storage}}"),),
                ),
            ),
        ),
        (
            "Worst devices",
            (
                Panel(
                    "Hottest GPUs",
                    "celsius",
                    (
                        (
                            f"topk(10, {with_run(of_node('gpu_temperature_celsius'), _RUN)})",
                            "{{run}} node {{node}} " + _GPU,
                        ),
                    ),
                    limit=_limit("gpu_hot"),
                ),
                Panel(
                    "Most throttled GPUs",
                    "percentunit",
                    (
                        (
                            f"topk(10, {with_run(of_node('gpu_throttle_ratio'), _RUN)})",
                            "{{run}} node {{node}} " + _GPU + " {{reason}}",
                        ),
                    ),
                    limit=_limit("gpu_throttled"),
                ),
                Panel(
                    "Most congested ports",
                    "percentunit",
                    (
                        (
                            f"topk(10, {with_run(of_node('port_transmit_wait_ratio'), _RUN)})",
                            "{{run}} node {{node}} " + _PORT,
                        ),
                    ),
                ),
            ),
        ),
    )
    run = (
        (
            "Progress",
            (late, progress, left, ettr, saved, _runs("Time between failures", "s", _run("mtbf_seconds"))),
        ),
        (
            "Training",
            (
                _curve("Loss", "none", "loss", "validation_loss"),
                _curve("Gradient norm", "none", "gradient_norm"),
                _curve("Balance loss of experts", "none", "router_aux_loss"),
                _curve("Load of experts", "none", "expert_load_max_ratio", "expert_load_min_ratio"),
                _curve("Idle experts", "none", "idle_experts"),
                _curve("Learning rate", "sci", "learning_rate"),
                _curve("Step", "none", "step", "checkpoint_step", "target_step"),
                _curve("Tokens", "short", "tokens"),
                _curve("Generation", "none", "generation"),
            ),
        ),
        (
            "Speed",
            (
                _curve("Tokens/s", "short", "tokens_per_second"),
                Panel(
                    "Tokens/s per rank",
                    "short",
                    ((f"{_run('tokens_per_second')} / {_run('ranks')}", "tokens/s"),),
                ),
                _curve("Model FLOPs utilisation (MFU)", "percentunit", "mfu_ratio"),
                _curve("Step time", "s", "step_seconds"),
                Panel(
                    "Step time by stage",
                    "s",
                    ((of_run("step_stage_seconds", _RUN, by="run, stage"), "{{stage}}"),),
                    stacked=True,
                ),
                Panel("Run time by cause", "s", ((f"{_SPENT} > 0", "{{cause}}"),), stacked=True),
            ),
        ),
        (
            "Resources",
            (
                _curve("Ranks", "none", "ranks"),
                _curve("Nodes", "none", "nodes", "spare_nodes"),
                _curve("Peak memory per rank", "bytes", "memory_bytes"),
            ),
        ),
    )
    return (
        Board("seatrial-cluster", "Seatrial: cluster", True, False, cluster),
        Board("seatrial-run", "Seatrial: run", False, False, run),
        Board("seatrial-node", "Seatrial: node", False, True, _of_nodes()),
    )


def _of_nodes() -> tuple[tuple[str, tuple[Panel, ...]], ...]:
    return (
        (
            "GPUs",
            (
                _devices("Tensor cores active", "percentunit", (_node("gpu_tensor_active_ratio"), _GPU)),
                _devices("GPU busy (a kernel runs)", "percentunit", (_node("gpu_busy_ratio"), _GPU)),
                _devices("SM clock", "hertz", (_node("gpu_sm_clock_hertz"), _GPU)),
                _devices("Power", "watt", (_node("gpu_power_watts"), _GPU)),
                _devices(
                    "Temperature",
                    "celsius",
                    (_node("gpu_temperature_celsius"), _GPU),
                    limit=_limit("gpu_hot"),
                ),
                _devices(
                    "Throttled",
                    "percentunit",
                    (_node("gpu_throttle_ratio"), _GPU + " {{reason}}"),
                    limit=_limit("gpu_throttled"),
                ),
                _devices(
                    "Memory in use",
                    "percentunit",
                    (f"{_node('gpu_memory_used_bytes')} / {_node('gpu_memory_total_bytes')}", _GPU),
                ),
                _devices(
                    "NVLink traffic",
                    "Bps",
                    (_rate("gpu_nvlink_sent_bytes_total"), _GPU + " sent"),
                    (_rate("gpu_nvlink_received_bytes_total"), _GPU + " received"),
                ),
                _devices(
                    "Errors",
                    "cps",
                    (_rate("gpu_nvlink_errors_total"), _GPU + " NVLink"),
                    (_rate("gpu_pcie_replays_total"), _GPU + " PCIe replays"),
                    (_rate("gpu_ecc_errors_total"), _GPU + " ECC {{severity}}"),
                ),
            ),
        ),
        (
            "RDMA ports",
            (
                _devices(
                    "Port traffic, share of line rate",
                    "percentunit",
                    (
                        f"{_rate('port_sent_bytes_total')} / {_node('port_speed_bytes_per_second')}",
                        _PORT + " sent",
                    ),
                    (
                        f"{_rate('port_received_bytes_total')} / {_node('port_speed_bytes_per_second')}",
                        _PORT + " received",
                    ),
                ),
                _devices(
                    "Transmit wait",
                    "percentunit",
                    (_node("port_transmit_wait_ratio"), _PORT),
                    limit=WAIT_SHARE,
                ),
                _devices("Links up", "none", (_node("port_active"), _PORT)),
                _devices(
                    "Congestion",
                    "cps",
                    (_rate("port_cnp_total"), _PORT + " CNP {{direction}}"),
                    (_rate("port_ecn_marked_packets_total"), _PORT + " ECN"),
                ),
                _devices(
                    "Packets lost or retransmitted",
                    "cps",
                    (_rate("port_retransmissions_total"), _PORT + " retransmissions"),
                    (_rate("port_discards_total"), _PORT + " discards"),
                ),
                _devices(
                    "Link errors",
                    "cps",
                    (_rate("port_errors_total"), _PORT + " errors"),
                    (_rate("port_link_downed_total"), _PORT + " link down"),
                ),
            ),
        ),
        (
            "Host",
            (
                _devices(
                    "Processors",
                    "percentunit",
                    (_node("node_cpu_busy_ratio"), "busy"),
                    (_node("node_cpu_iowait_ratio"), "iowait"),
                ),
                _devices(
                    "Memory",
                    "bytes",
                    (_node("node_memory_used_bytes"), "used"),
                    (_node("node_memory_total_bytes"), "total"),
                    (_node("node_memory_available_bytes"), "available"),
                ),
                _devices(
                    "Pressure stall (PSI): share of time that tasks wait",
                    "percentunit",
                    (_rate("node_pressure_seconds_total"), "{{resource}} {{tasks}}"),
                ),
                _devices(
                    "Network",
                    "Bps",
                    (_rate("node_network_sent_bytes_total"), "sent"),
                    (_rate("node_network_received_bytes_total"), "received"),
                ),
                _devices(
                    "TCP segments retransmitted",
                    "percentunit",
                    (
                        f"{_rate('node_tcp_retransmitted_segments_total')} / {_rate('node_tcp_sent_segments_total')}",
                        "",
                    ),
                ),
                _devices(
                    "Free storage",
                    "percentunit",
                    (f"{_node('storage_free_bytes')} / {_node('storage_total_bytes')}", "{{storage}}"),
                ),
                _devices("Clock synchronised", "bool_yes_no", (_node("node_clock_synchronised"), "")),
                _devices(
                    "Clock offset",
                    "s",
                    (_node("node_clock_offset_seconds"), ""),
                    (_node("node_clock_max_error_seconds"), "at most"),
                ),
                _devices("CPUs", "none", (_node("node_cpus"), "")),
            ),
        ),
    )
