"""Cost of a run's records at 1,024 ranks: bytes per day on disk, and share of the step time, by simulation.

    python bench/telemetry.py [--steps-s 33.8 5.5 1.0] [--days 1] [--json]

One rank, one node and one rank 0 write the records of that many days, with the production writers and
realistically varying values; the resulting sizes are multiplied by the number of ranks and nodes. The
step times: the reference job (Qwen2.5-72B on B300, `seatrial plan`) with a batch that grows with its GPUs; with the
same batch on eight times the GPUs; and a small model. Times are CPU seconds of this machine.

Then the sampling process of a node runs for `--live` seconds, one sample per second, with the same series of 8 GPUs and 8
ports, and is scraped each second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from seatrial.control.node.external import Child
from seatrial.control.telemetry.host import HostLoad
from seatrial.control.telemetry.node_sampler import NodeSampler, SamplerSettings
from seatrial.hardware.tcp import Connection
from seatrial.record.collectives import CollectivesWriter
from seatrial.record.connections import write_connections
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.series import THROTTLE_REASONS, series
from seatrial.record.stages import STAGES, StageWriter
from seatrial.record.telemetry_writer import CHUNK_S, THIN_AFTER_S, TelemetryWriter

RANKS, PER_NODE, PORTS = 1024, 8, 8
LIMIT_BYTES, LIMIT_SHARE = 1e9, 0.005
DAY_S, EVERY_S, START = 86400.0, 10.0, 1.76e9
EVENTS_A_DAY, EVENT_BYTES = 500, 400  # a bad day: a failure of a node every hour, 20 events each
Row = dict[str, float]


def size(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def cpu(do: Callable[[], object]) -> float:
    """Context that measures CPU seconds of this process."""
    began = time.process_time()
    do()
    return time.process_time() - began


def stages(folder: RunFolder, steps: int, step_s: float) -> None:
    """Stages of tensor, pipeline and sharded data parallel: ten of twelve are non-zero, with 2 % noise."""
    random = np.random.default_rng(1)
    shares = np.array([0.002, 0.01, 0.25, 0.45, 0.02, 0.001, 0.1, 0.08, 0.0, 0.07, 0.017, 0.0])
    noise = random.normal(1.0, 0.02, (steps, len(STAGES)))
    writer = StageWriter(folder, 1, 0, ranks=RANKS, clock="cuda", first_step=1, not_separated={})
    for step, row in enumerate((shares * step_s * noise).tolist(), 1):
        writer.add(step, row)
    writer.close()


def collectives(folder: RunFolder, steps: int, save_every: int) -> None:
    """Equal steps, except for the comparison of weights every 10 steps and a save every `save_every`."""
    usual = {
        "tensor": (1280, 171_798_691_840),
        "shard": (320, 36_350_000_000),
        "pipeline": (64, 8_589_934_592),
    }
    usual |= {"step_sum": (2, 464)}
    verified = usual | {"tensor": (1281, 171_798_692_032)}
    saved = usual | {"save": (3, 4096)}
    writer = CollectivesWriter(folder, 1, 0, {"tensor": 8, "shard": 64, "pipeline": 2})
    for step in range(1, steps + 1):
        writer.add(step, saved if step % save_every == 1 else verified if step % 10 == 1 else usual)
    writer.close()


def rank_0(folder: RunFolder, steps: int, step_s: float) -> None:
    """Write metrics.jsonl and ledger.jsonl."""
    random = np.random.default_rng(2)
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for step in range(1, steps + 1):
        a, b, c = random.random(3).tolist()
        took = step_s * (0.99 + b / 50)
        record = MetricsRecord(
            step, step * 8388608, 2 + a, b, c / 1e4, took, took / 500, 8388608 / took, 8192 / took, 0.38 + a / 100,
            221_000_000_000, START + step * step_s, 1,
        )  # fmt: skip
        metrics.write(record)
        ledger.write(LedgerRecord(step, (step - 1) * 2048, step * 2048, 1))
    metrics.close()
    ledger.close()


def samples(days: float) -> Iterator[tuple[float, Row]]:
    """Telemetry samples of a node whose GPUs train."""
    random = np.random.default_rng(3)
    totals: Row = {}

    def grow(name: str, by: float) -> None:
        totals[name] = totals.get(name, 1e6) + by

    for i in range(int(days * DAY_S / EVERY_S)):
        row: Row = {"node_cpus": 192, "node_memory_total_bytes": 2.1e12, "node_clock_synchronised": 1}
        for gpu in range(PER_NODE):
            normal = random.normal(0, 1, 4).tolist()
            values = {
                "gpu_tensor_active_ratio": 0.45 + normal[0] / 50,
                "gpu_busy_ratio": 1.0,
                "gpu_sm_clock_hertz": round(1665 + 15 * round(normal[1])) * 1e6,
                "gpu_power_watts": round(950 + 30 * normal[2], 3),
                "gpu_temperature_celsius": round(62 + normal[3]),
                "gpu_memory_used_bytes": 221e9,
                "gpu_memory_total_bytes": 288e9,
            }
            row |= {series(name, gpu=gpu): value for name, value in values.items()}
            row[series("gpu_info", gpu=gpu, pci=f"0000:{gpu:02x}:00", name="NVIDIA B300 SXM6 AC")] = 1.0
            for reason in THROTTLE_REASONS:
                share = random.integers(0, 11) / 10 if reason == "power_cap" else 0.0
                row[series("gpu_throttle_ratio", gpu=gpu, reason=reason)] = share
            for severity in ("corrected", "uncorrected"):
                grow(series("gpu_ecc_errors_total", gpu=gpu, severity=severity), 0)
            grow(series("gpu_pcie_replays_total", gpu=gpu), 0)
            grow(series("gpu_nvlink_errors_total", gpu=gpu), 0)
            for way in ("sent", "received"):
                kib = random.integers(2e9, 2.2e9)
                grow(series(f"gpu_nvlink_{way}_bytes_total", gpu=gpu), float(kib * 1024))
        for port in range(PORTS):
            name = f"mlx5_{port}/1"
            row[series("port_active", port=name)] = 1
            row[series("port_speed_bytes_per_second", port=name)] = 5e10
            row[series("port_transmit_wait_ratio", port=name)] = float(random.random() / 100)
            for way in ("sent", "received"):
                grow(series(f"port_{way}_bytes_total", port=name), float(random.integers(9e9, 1e10) * 4))
                grow(series("port_cnp_total", port=name, direction=way), float(random.poisson(3)))
            for what in ("retransmissions", "ecn_marked_packets", "errors", "link_downed", "discards"):
                grow(series(f"port_{what}_total", port=name), 0)
        row["node_cpu_busy_ratio"] = 0.1 + float(random.random()) / 50
        row["node_cpu_iowait_ratio"] = float(random.random()) / 1000
        row["node_memory_used_bytes"] = 3e11 + float(random.integers(0, 1e9))
        row["node_memory_available_bytes"] = 1.8e12 - float(random.integers(0, 1e9))
        for resource in ("cpu", "memory", "io"):
            for tasks in ("some", "full"):
                grow(
                    series("node_pressure_seconds_total", resource=resource, tasks=tasks),
                    float(random.random()) / 100,
                )
        for storage in ("run", "checkpoint"):
            row[series("storage_total_bytes", storage=storage)] = 5e15
            row[series("storage_free_bytes", storage=storage)] = 2e15 - i * 1e6
        for name in ("node_network_received_bytes", "node_network_sent_bytes", "node_tcp_sent_segments"):
            grow(f"{name}_total", float(random.integers(1e5, 1e6)))
        grow("node_tcp_retransmitted_segments_total", 0)
        row["node_clock_offset_seconds"] = float(random.normal(0, 1e-5))
        row["node_clock_max_error_seconds"] = 0.01 + float(random.random()) / 1000
        yield START + i * EVERY_S, row | totals


def telemetry(folder: RunFolder, days: float) -> tuple[int, int, int, float, float]:
    """(series, bytes of all samples, bytes when thinned, CPU seconds per sample, CPU seconds to tidy a chunk)."""
    writer, took, tidied, chunks = TelemetryWriter(folder, 0, EVERY_S), 0.0, 0.0, 0
    end = START + days * DAY_S
    for at, row in samples(days):
        took += cpu(lambda at=at, row=row: writer.add(at, row))
        if (at - START) % CHUNK_S == 0:
            chunks += 1
            tidied += cpu(lambda at=at: writer.tidy(at))
    writer.close()
    writer.tidy(end)
    full = size(folder.telemetry)
    writer.tidy(end + CHUNK_S + THIN_AFTER_S)
    return len(row), full, size(folder.telemetry), took / (days * DAY_S / EVERY_S), tidied / chunks


def of_day(step_s: float, days: float) -> dict[str, object]:
    """Bytes per day of each record over all ranks and nodes, and the share of a rank's step time for writing."""
    steps = int(days * DAY_S / step_s)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.stages(1, 0).parent.mkdir(parents=True)
        took = cpu(lambda: stages(folder, steps, step_s)) / steps
        stage_bytes = size(folder.ranks)
        took += cpu(lambda: collectives(folder, steps, max(1, int(1800 / step_s)))) / steps
        collective_bytes = size(folder.ranks) - stage_bytes
        peers = [Connection("10.0.0.1", f"10.0.1.{i}", 10**12, 1e4, 1e-4, 10) for i in range(16)]
        write_connections(folder, 1, 0, peers)
        tcp_bytes = folder.connections(1, 0).stat().st_size
        took_0 = took + cpu(lambda: rank_0(folder, steps, step_s)) / steps
        log_bytes = folder.metrics.stat().st_size + folder.ledger.stat().st_size
        found, telemetry_bytes, thinned_bytes, sample_s, tidy_s = telemetry(folder, days)
    nodes = RANKS // PER_NODE
    generations = 24  # one an hour, as with the failures above
    volumes = {
        "stages": stage_bytes * RANKS / days,
        "collectives": collective_bytes * RANKS / days,
        "tcp": tcp_bytes * RANKS * generations,
        "telemetry": telemetry_bytes * nodes / days,
        "metrics and ledger": log_bytes / days,
        "events": float(EVENTS_A_DAY * EVENT_BYTES),
    }
    host = HostLoad()
    read_s = cpu(lambda: [host.read() for _ in range(20)]) / 20
    return {
        "step_s": step_s,
        "bytes_a_day": volumes,
        "sum": sum(volumes.values()),
        "rank_s_a_step": took,
        "rank_0_s_a_step": took_0,
        "share_of_step": took_0 / step_s,
        "series_a_node": found,
        "node_cpu_share": (read_s + sample_s) / EVERY_S + tidy_s / CHUNK_S,
        "telemetry_thinned": thinned_bytes * nodes / days,
    }


def live(seconds: int) -> tuple[float, float, int, float]:
    """(CPU seconds per sample without and with a scrape, lines of the response, MiB of memory) of the sampling process."""
    rows = [row for _, row in samples(0.01)]
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        settings = SamplerSettings(Path(name), 0, 1.0, {"run": Path(name)}, "127.0.0.1", port)
        child = Child(lambda channel: NodeSampler(settings, channel).run())
        lines, took = 0, []
        for scraped in (False, True):
            time.sleep(2.0)  # until it has started
            began = _cpu_of(child.pid)
            for row in rows[:seconds]:
                child.post({"source": "gpus", "values": row})
                if scraped:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                        lines = len(answer.read().splitlines())
                time.sleep(1.0)
            took.append((_cpu_of(child.pid) - began) / seconds)
        memory = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        child.close()
    return took[0], took[1], lines, memory / 2**20


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps-s", nargs="+", type=float, default=[33.8, 5.5, 1.0])
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--live", type=int, default=20, help="seconds; 0: not at all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.nice(10)
    good = True
    for step_s in args.steps_s:
        found = of_day(step_s, args.days)
        good &= found["sum"] <= LIMIT_BYTES and found["share_of_step"] <= LIMIT_SHARE
        if args.json:
            print(json.dumps(found))
            continue
        print(f"{RANKS:,} ranks, {step_s:g} s per step, {args.days:g} days:")
        for name, volume in found["bytes_a_day"].items():
            print(f"  {name:20} {volume / 1e6:8.1f} MB per day")
        print(f"  {'sum':20} {found['sum'] / 1e6:8.1f} MB per day (limit {LIMIT_BYTES / 1e6:,.0f})")
        print(
            f"  {'telemetry, thinned':20} {found['telemetry_thinned'] / 1e6:8.1f} MB of that stay after a day"
        )
        print(
            f"  writing: {found['rank_s_a_step'] * 1e6:.0f} us a step and rank, {found['rank_0_s_a_step'] * 1e6:.0f} us in "
            f"rank 0: {found['share_of_step']:.4%} of a step (limit {LIMIT_SHARE:.1%})"
        )
        print(
            f"  {found['series_a_node']} series a node; sampling: {found['node_cpu_share']:.3%} of one core"
        )
    if args.live:
        plain, scraped, lines, memory = live(args.live)
        share = plain / EVERY_S
        print(
            f"sampling process: {plain * 1e3:.1f} ms of CPU a sample, {scraped * 1e3:.1f} with a scrape of {lines} lines; "
            f"every {EVERY_S:g} s {share:.3%} of one core; {memory:.0f} MiB, shared with its agent where unchanged"
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
