"""The series of a run: the names under which telemetry is recorded, shown, and served to Prometheus.

A series is named as Prometheus writes it, without the prefix `seatrial_`: `gpu_temperature_celsius{gpu="0"}`. The node is
not part of the name: it is the file's (`record.telemetry`), and a label in `/metrics`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
PREFIX = "seatrial_"

# Per GPU or port that a node may have in telemetry, so that its number of series has a limit; further ones are left out.
MOST_GPUS, MOST_PORTS = 16, 32
THROTTLE_REASONS = ("power_cap", "hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")


@dataclass(frozen=True)
class Series:
    """One metric: a series for each combination of its labels' values. A counter only ever grows, until it is reset."""

    name: str
    unit: str  # the end of the name, before "_total"; "" for what has none
    kind: Kind
    help: str
    labels: tuple[str, ...]
    source: str  # where the value comes from


def _gauge(name: str, unit: str, help: str, source: str, *labels: str) -> Series:
    return Series(name, unit, "gauge", help, labels, source)


def _counter(name: str, unit: str, help: str, source: str, *labels: str) -> Series:
    return Series(name, unit, "counter", help, labels, source)


_CLOCKS = "NVML clocks event reasons, one reading a second"
_HW = "hw_counters of the port in sysfs"

# Of one node, by its agent. What cannot be read is absent.
_NODE = (
    _gauge("gpu_info", "", "The GPU with this number; always 1", "NVML", "gpu", "pci", "name"),
    _gauge("gpu_tensor_active_ratio", "ratio", "Share of the time in which tensor cores were busy, 0 to 1", "NVML GPM, Hopper and later", "gpu"),
    _gauge("gpu_busy_ratio", "ratio", "Share of the time in which a kernel ran, 0 to 1", "NVML", "gpu"),
    _gauge("gpu_sm_clock_hertz", "hertz", "Clock of the SMs", "NVML", "gpu"),
    _gauge("gpu_power_watts", "watts", "Power drawn", "NVML", "gpu"),
    _gauge("gpu_temperature_celsius", "celsius", "Temperature of the chip", "NVML", "gpu"),
    _gauge("gpu_throttle_ratio", "ratio", "Share of the time in which its clock was throttled for this reason, 0 to 1", _CLOCKS, "gpu", "reason"),
    _gauge("gpu_memory_used_bytes", "bytes", "Memory in use, by all processes", "NVML", "gpu"),
    _gauge("gpu_memory_total_bytes", "bytes", "Memory", "NVML", "gpu"),
    _counter("gpu_ecc_errors_total", "", "ECC errors since the driver was loaded", "NVML", "gpu", "severity"),
    _counter("gpu_nvlink_sent_bytes_total", "bytes", "Data sent over all NVLinks", "NVML", "gpu"),
    _counter("gpu_nvlink_received_bytes_total", "bytes", "Data received over all NVLinks", "NVML", "gpu"),
    _counter("gpu_nvlink_errors_total", "", "Errors of all NVLinks, read every minute", "nvidia-smi nvlink -e", "gpu"),
    _counter("gpu_pcie_replays_total", "", "PCIe replays", "NVML", "gpu"),
    _gauge("port_active", "", "1 while the link of the port is ACTIVE, else 0", "state in sysfs", "port"),
    _gauge("port_speed_bytes_per_second", "bytes_per_second", "Rate of the link", "rate in sysfs", "port"),
    _counter("port_sent_bytes_total", "bytes", "Data sent by the port", "port_xmit_data", "port"),
    _counter("port_received_bytes_total", "bytes", "Data received by the port", "port_rcv_data", "port"),
    _gauge("port_transmit_wait_ratio", "ratio", "Share of the time in which the port had data and no credit to send it, 0 to 1", "port_xmit_wait", "port"),
    _counter("port_retransmissions_total", "", "Packets retransmitted, requested again, or lost", _HW, "port"),
    _counter("port_cnp_total", "", "Congestion notification packets", _HW, "port", "direction"),
    _counter("port_ecn_marked_packets_total", "", "Packets that arrived with a congestion mark", _HW, "port"),
    _counter("port_errors_total", "", "Symbol, packet and link errors, and retrainings", "sysfs", "port"),
    _counter("port_link_downed_total", "", "Number of times the link went down", "link_downed", "port"),
    _counter("port_discards_total", "", "Packets discarded instead of sent", "port_xmit_discards", "port"),
    _gauge("node_cpus", "", "CPUs of the node", "/proc/stat"),
    _gauge("node_cpu_busy_ratio", "ratio", "Share of CPU time in use, 0 to 1", "/proc/stat"),
    _gauge("node_cpu_iowait_ratio", "ratio", "Share of CPU time idle while a task waited for a disk, 0 to 1", "/proc/stat"),
    _gauge("node_memory_total_bytes", "bytes", "Memory of the node", "/proc/meminfo"),
    _gauge("node_memory_used_bytes", "bytes", "Memory not available to new processes", "/proc/meminfo"),
    _gauge("node_memory_available_bytes", "bytes", "Memory still available to the agent's processes, limited by the node or a control group", "/proc/meminfo, cgroup"),
    _counter("node_pressure_seconds_total", "seconds", "Time in which some, or all, tasks waited for the resource", "/proc/pressure", "resource", "tasks"),
    _gauge("storage_free_bytes", "bytes", "Free space of the file system of the run folder or of the checkpoints", "statvfs", "storage"),
    _gauge("storage_total_bytes", "bytes", "Size of that file system", "statvfs", "storage"),
    _counter("node_network_received_bytes_total", "bytes", "Data received by the node's network interfaces", "/proc/net/dev"),
    _counter("node_network_sent_bytes_total", "bytes", "Data sent by them", "/proc/net/dev"),
    _counter("node_tcp_sent_segments_total", "", "TCP segments sent", "/proc/net/snmp"),
    _counter("node_tcp_retransmitted_segments_total", "", "TCP segments retransmitted", "/proc/net/snmp"),
    _gauge("node_clock_synchronised", "", "1 if the kernel's clock is synchronised, else 0", "adjtimex(2)"),
    _gauge("node_clock_offset_seconds", "seconds", "Offset of the clock from its time source, as NTP or PTP reports it to the kernel", "adjtimex(2)"),
    _gauge("node_clock_max_error_seconds", "seconds", "Maximum error of the clock", "adjtimex(2)"),
)  # fmt: skip

# Of a run, from its folder. `run` is its name.
_METRICS = "metrics.jsonl, the last step"
_RUN = (
    _gauge("run_running", "", "1 while the run is running, else 0", "the state of the run", "run"),
    _gauge(
        "run_start_timestamp_seconds",
        "seconds",
        "When the run was last started or resumed, unix time",
        "events.jsonl",
        "run",
    ),
    _gauge("run_step", "", "The last finished step", _METRICS, "run"),
    _gauge("run_target_step", "", "The job's last step", "train.steps", "run"),
    _gauge("run_last_step_timestamp_seconds", "seconds", "When the last step ended, unix time", _METRICS, "run"),
    _gauge("run_eta_seconds", "seconds", "Time left to the job's last step", "the pace of recent steps", "run"),
    _gauge("run_loss", "", "Training loss, nats/token", _METRICS, "run"),
    _gauge("run_validation_loss", "", "Validation loss, nats/token", "metrics.jsonl", "run"),
    _gauge("run_gradient_norm", "", "Gradient norm before clipping", _METRICS, "run"),
    _gauge("run_router_aux_loss", "", "Load-balancing loss of experts, without its coefficient", _METRICS, "run"),
    _gauge("run_expert_load_max_ratio", "ratio", "Tokens sent to the expert with most, in any layer, over the mean of its layer's experts", _METRICS, "run"),
    _gauge("run_expert_load_min_ratio", "ratio", "The same for the expert with least", _METRICS, "run"),
    _gauge("run_idle_experts", "", "Experts of all layers to which no token was sent", _METRICS, "run"),
    _gauge("run_learning_rate", "", "Learning rate", _METRICS, "run"),
    _gauge("run_tokens", "", "Tokens trained on; falls when steps are redone", _METRICS, "run"),
    _gauge("run_tokens_per_second", "", "Tokens of the step over its time", _METRICS, "run"),
    _gauge("run_mfu_ratio", "ratio", "Model FLOPs utilisation, 0 to 1", _METRICS, "run"),
    _gauge("run_memory_bytes", "bytes", "Peak memory of the rank with the most", _METRICS, "run"),
    _gauge("run_step_seconds", "seconds", "Time of the step", _METRICS, "run"),
    _gauge("run_step_stage_seconds", "seconds", "Mean time of recent steps attributed to the stage; the stages add up to the step time of the slowest rank", "ranks/GENERATION/rankN.stages", "run", "stage"),
    # Not a counter: what was productive becomes redone after a failure.
    _gauge("run_goodput_seconds", "seconds", "Wall-clock time of the run so far by cause; the causes add up to it", "events.jsonl, metrics.jsonl", "run", "cause"),
    _gauge("run_ettr_ratio", "ratio", "Share of the time with nodes that was spent in steps that count, 0 to 1", "events.jsonl, metrics.jsonl", "run"),
    _gauge("run_mtbf_seconds", "seconds", "Mean time between failures that restarted ranks, as observed in this run", "events.jsonl, metrics.jsonl", "run"),
    _gauge("run_checkpoints", "", "Complete checkpoints", "checkpoints/", "run"),
    _gauge("run_checkpoint_step", "", "Step of the latest complete checkpoint", "checkpoints/", "run"),
    _gauge("run_checkpoint_timestamp_seconds", "seconds", "When the latest complete checkpoint was saved, unix time", "events.jsonl", "run"),
    _gauge("run_checkpoint_interval_steps", "", "Steps between two checkpoints", "checkpoint.every_steps, or events.jsonl", "run"),
    _gauge("run_ranks", "", "Ranks that train", "events.jsonl", "run"),
    _gauge("run_nodes", "", "Nodes that train", "events.jsonl", "run"),
    _gauge("run_spare_nodes", "", "Nodes that have joined and have no ranks", "events.jsonl", "run"),
    _gauge("run_generation", "", "Generation: incremented at each start and recovery", "events.jsonl", "run"),
)  # fmt: skip

# Only in `/metrics`.
_SERVED = (
    _gauge("run_info", "", "The run and node that an instance belongs to, to join with its series; always 1", "the agent", "run", "node", "host", "version"),
)  # fmt: skip

NODE_SERIES: Mapping[str, Series] = {each.name: each for each in _NODE}
RUN_SERIES: Mapping[str, Series] = {each.name: each for each in _RUN}
SERVED_SERIES: Mapping[str, Series] = {each.name: each for each in _SERVED}

_SPLIT = re.compile(r"([a-z0-9_]+)(?:\{([^{}]*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"(?:,|$)')


def series(name: str, /, **labels: object) -> str:
    """The key of one series: `gpu_power_watts{gpu="0"}`."""
    inside = ",".join(f'{label}="{_escaped(str(value))}"' for label, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def parse_series(key: str) -> tuple[str, dict[str, str]]:
    """(name, labels) of a key. Raises ValueError."""
    match = _SPLIT.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r:.80} is not the name of a series")
    labels, rest = {}, match[2] or ""
    while rest:
        label = _LABEL.match(rest)
        if label is None:
            raise ValueError(f"{key!r:.80} is not the name of a series")
        labels[label[1]] = label[2]
        rest = rest[label.end() :]
    return match[1], labels


def is_counter(key: str) -> bool:
    """Whether it is a total that grows. By its name: a record of another version may have series unknown here."""
    return key.partition("{")[0].endswith("_total")


def _escaped(value: str) -> str:
    """Without characters that have a meaning in the key or in a line."""
    return re.sub(r'["\\{}\x00-\x1f\x7f]', "_", value)
