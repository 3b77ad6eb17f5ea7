"""Time to show a month's run on 1,024 GPUs in the terminal and in browsers, and the cost of 50 browsers for a live run.

    python bench/web.py [--root FOLDER] [--turns 3] [--live 40] [--seconds 4] [--note TEXT]

The folder is that of bench/month.py, created in FOLDER (default: a temporary one) if it does not exist, and shown as running:
this process holds its lock and adds a step per second while browsers watch. Printed are wall-clock time and CPU
time of the measured process, which depends less on other load: limits apply to CPU time if the machine is
overloaded, which the table notes. A cold server has just started listening. `--live`: turns of a small run of one
rank beside ten servers with 50 streams each, these at nice 19, running and stopped; one server has a tenth of the effect. The table is also appended to bench/LOG.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote

from month import NAME, write_month
from recovery import Running
from recovery import seatrial as trained
from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.job import load_job, preset_text
from seatrial.record import lock
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.recent import recent_ledger
from seatrial.record.view import read_brief

BROWSERS = 50
SERVERS = 10  # of the live run, with BROWSERS each: what one costs is too little to be seen beside the machine's own noise
LIMITS = {"once": 0.5, "first page": 1.0, "page": 2.0, "memory": 500e6, "ratio": 1.005}
SMALL = [
    *("train.steps=100000", "train.sample_tokens=0", "checkpoint.every_steps=1000"),
    # One rank: a core is free for the server and the browsers, as on a host with GPUs.
    *(
        "cluster.nodes=1",
        "cluster.gpus_per_node=1",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "parallel.shard=1",
    ),
    *("train.global_batch=4", "optimizer.warmup_steps=5"),
]
_LOG = Path(__file__).with_name("LOG.md")
_ASSETS = re.compile(r'(?:src|href)="/(static/[^"]+)"')


@dataclass(frozen=True)
class Row:
    what: str
    wall: float  # seconds, bytes or a ratio
    cpu: float | None  # seconds; None: not a time
    limit: float | None
    unit: str = "s"

    @property
    def judged(self) -> float:
        busy = self.cpu is not None and os.getloadavg()[0] > (os.cpu_count() or 1)
        return self.cpu if busy and self.cpu is not None else self.wall

    @property
    def cells(self) -> tuple[str, str, str, str]:
        def shown(value: float | None) -> str:
            if value is None:
                return "-"
            return (
                f"{value / 1e6:.0f} MB"
                if self.unit == "B"
                else f"{value:.3f}{' s' if self.unit == 's' else ''}"
            )

        verdict = "" if self.limit is None else " MISSED" if self.judged > self.limit else ""
        return self.what, shown(self.wall), shown(self.cpu), shown(self.limit) + verdict


# -- commands


def command(turns: int, *words: str, limit: float | None) -> Row:
    """Minimum of several runs: disturbances only add."""
    found = []
    for _ in range(turns):
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "seatrial", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"seatrial {' '.join(words)} ended with {process.returncode}")
        found.append((time.monotonic() - began, used.ru_utime + used.ru_stime))
    return Row(f"seatrial {words[0]} {' '.join(w for w in words[1:] if w.startswith('--once') or w == '--json')}".strip(),
               min(w for w, _ in found), min(c for _, c in found), limit)  # fmt: skip


# -- the server


class Served:
    """`seatrial watch --web` of one run, with a client."""

    def __init__(self, folder: RunFolder) -> None:
        words = [sys.executable, "-m", "seatrial", "watch", str(folder.path), "--web", "--port", "0"]
        self.name = folder.path.name
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"serving on http://127\.0\.0\.1:(\d+)/", line)
            if found:
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("the server did not begin to serve")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def cpu(self) -> float:
        """CPU seconds of the process so far, by its own clock (clock_getcpuclockid)."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def peak_bytes(self) -> float:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return float(found[1]) * 1024

    def get(self, path: str) -> bytes:
        self.http.request("GET", path, headers={"accept-encoding": "gzip"})
        answer = self.http.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return gzip.decompress(body) if answer.headers["content-encoding"] == "gzip" else body

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def api(self, rest: str) -> str:
        return f"/api/run/{quote(self.name)}/{rest}"

    def timed(self, what: str, *paths: str, limit: float | None) -> Row:
        began, before = time.monotonic(), self.cpu()
        for path in paths:
            self.get(path)
        return Row(what, time.monotonic() - began, self.cpu() - before, limit)

    def first_page(self, what: str, *, whole: bool = False) -> Row:
        """The page, its files, and the first message of the stream, in which is the data; `whole`: with ranks and goodput."""
        began, before = time.monotonic(), self.cpu()
        for asset in dict.fromkeys(_ASSETS.findall(self.get("/").decode())):
            self.get(f"/{asset}")
        with Stream(self) as stream:
            document: dict[str, Any] = {}
            while "moving" not in document:  # the first message may come before anything has been read
                document |= stream.message()
            while whole and (document.get("lost") is None or not document["heat"]["values"]):
                document |= stream.message()
        return Row(
            what, time.monotonic() - began, self.cpu() - before, None if whole else LIMITS["first page"]
        )

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(timeout=60)


class Stream:
    """One browser's stream."""

    def __init__(self, served: Served) -> None:
        self._socket = socket.create_connection(("127.0.0.1", served.port), timeout=300)
        self._file = self._socket.makefile("rb")
        request = f"GET {served.api('stream')} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n"
        self._socket.sendall(request.encode())

    def message(self) -> dict[str, Any]:
        for line in self._file:
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
        raise RuntimeError("the stream ended")

    def drain(self, until: float) -> int:
        """Bytes received until `until` (time.monotonic)."""
        total = 0
        self._socket.settimeout(0.2)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                total += len(self._socket.recv(1 << 16))
        return total

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._socket.close()


def pages(served: Served, folder: RunFolder) -> list[Row]:
    """Every page and kind of data, the slowest of each kind, requested in sequence as by one browser."""
    names = (
        "ranks",
        "step",
        "curves",
        "events",
        "checkpoints",
        "data",
        "checks",
        "scaling",
        "drills",
        "plan",
    )
    rows = [served.timed(f"page {name}", served.api(f"page/{name}"), limit=LIMITS["page"]) for name in names]
    metrics = [metric["id"] for metric in served.json(served.api("page/ranks"))["metrics"]]
    heats = [
        served.timed(f"heat map, {metric}", served.api(f"heat?metric={quote(metric)}"), limit=LIMITS["page"])
        for metric in metrics
    ]
    worst = max(heats, key=lambda row: row.cpu or 0.0)
    rows.append(replace(worst, what=f"the slowest of {len(heats)} heat maps ({worst.what.split(', ')[1]})"))
    listed = served.json(served.api("logs"))
    rows.append(served.timed(f"list of {len(listed['logs'])} logs", served.api("logs"), limit=LIMITS["page"]))
    largest = max(listed["logs"], key=lambda log: log["size"] or 0)
    log = served.api(f"log?generation={listed['generation']}&id={quote(largest['id'])}")
    size = f"{largest['size'] / 1e9:.1f} GB"
    rows.append(served.timed(f"end of a log of {size}", log, limit=LIMITS["page"]))
    back = f"{log}&before={largest['size'] // 2}"
    rows.append(served.timed(f"middle of a log of {size}", back, limit=LIMITS["page"]))
    rows.append(served.timed("list of runs", "/api/runs", limit=LIMITS["page"]))
    rows.append(served.timed("comparison", f"/api/compare?run={quote(served.name)}", limit=LIMITS["page"]))
    rows.append(served.timed("/metrics", "/metrics", limit=LIMITS["page"]))
    return rows


@contextlib.contextmanager
def growing(folder: RunFolder) -> Iterator[None]:
    """Context in which the run records a step per second, as its rank 0 would."""
    last = read_brief(folder).last
    assert last is not None
    (newest,) = recent_ledger(folder, 1)
    batch, stop = newest.end_sample - newest.first_sample, threading.Event()
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)

    def write() -> None:
        for more in itertools.count(1):
            if stop.wait(1.0):
                return
            step = last.step + more
            record: MetricsRecord = replace(
                last, step=step, time=time.time(), tokens=last.tokens // last.step * step
            )
            metrics.write(record)
            ledger.write(LedgerRecord(step, (step - 1) * batch, step * batch, newest.generation))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        metrics.close()
        ledger.close()


@contextlib.contextmanager
def browsers(served: Served, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Context in which one process at nice 19 reads `count` streams."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import web; web.watch(*sys.argv[2:])"
    words = [
        sys.executable,
        "-c",
        code,
        str(Path(__file__).parent),
        str(served.port),
        served.name,
        str(count),
    ]
    process = subprocess.Popen(["nice", "-n", "19", *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != b"watching":
            raise RuntimeError("the browsers did not get their first data")
        yield process
    finally:
        process.kill()
        process.wait()


def watch(port: str, name: str, count: str) -> None:
    """Process entry: reads the streams until it is killed or they end."""
    import selectors

    chosen = selectors.DefaultSelector()
    path = f"/api/run/{quote(name)}/stream"
    for _ in range(int(count)):
        opened = socket.create_connection(("127.0.0.1", int(port)))
        opened.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        opened.setblocking(False)
        chosen.register(opened, selectors.EVENT_READ)
    silent = {key.fd for key in chosen.get_map().values()}
    while chosen.get_map():
        for key, _ in chosen.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not data:
                chosen.unregister(key.fileobj)
            if silent and b'"moving":' in data:
                silent.discard(key.fd)
                if not silent:
                    print("watching", flush=True)


def crowd(served: Served, seconds: float) -> list[Row]:
    rows = []
    for count in (1, BROWSERS):
        with browsers(served, count):
            began, before = time.monotonic(), served.cpu()
            time.sleep(seconds)
            share = (served.cpu() - before) / (time.monotonic() - began)
        what = "a stream" if count == 1 else f"{count} streams"
        rows.append(
            Row(f"CPU seconds a second of the server, {what}, a step a second", share, None, None, "ratio")
        )
    return rows


# -- a live run


def live(turns: int, seconds: float) -> list[Row]:
    """Steps of a run watched by SERVERS x BROWSERS, and with servers and browsers stopped (SIGSTOP), in turns; who is first changes."""
    logs, shares, times = [], [], []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        place = Path(name)
        (place / "job.toml").write_text(preset_text("first-voyage"))
        resolve_stores(load_job(place / "job.toml", SMALL).data, data_cache(place), place)
        run = stack.enter_context(trained(place, "live", overrides=SMALL))
        run.wait_step(5)
        servers = [
            stack.enter_context(contextlib.closing(Served(RunFolder(run.folder)))) for _ in range(SERVERS)
        ]
        crowds = [stack.enter_context(browsers(served, BROWSERS)) for served in servers]
        processes = [*(served.process for served in servers), *crowds]
        for turn in range(turns):
            found = {}
            for watched in (False, True) if turn % 2 else (True, False):
                for process in processes:
                    process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
                time.sleep(1.0)  # what was missed is caught up with
                before, began = sum(served.cpu() for served in servers), time.monotonic()
                found[watched] = mean_step(run, seconds)
                if watched:
                    used = sum(served.cpu() for served in servers) - before
                    shares.append(used / SERVERS / (time.monotonic() - began))
            logs.append(math.log(found[True] / found[False]))
            times.append(found[False])
        for process in processes:
            process.send_signal(signal.SIGCONT)
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(turns)
    spread = f"{turns} turns of {seconds:.0f} s, steps of {statistics.median(times):.3f} s"
    return [
        Row(f"step of a live run watched by {SERVERS} x {BROWSERS} to one unwatched, mean (standard error {error:.4f}, {spread})",
            math.exp(mean), None, None, "ratio"),
        Row(f"one server with {BROWSERS}, a tenth of that, at the upper end of its 95 % interval",
            math.exp((mean + 1.96 * error) / SERVERS), None, LIMITS["ratio"], "ratio"),
        Row("CPU seconds a second of a server", statistics.mean(shares), None, None, "ratio"),
    ]  # fmt: skip


def mean_step(run: Running, seconds: float) -> float:
    """Mean seconds of the steps within so many seconds from now, the slowest tenth left out: other programs' doing."""
    began = time.time()
    time.sleep(seconds)  # nothing is read meanwhile
    taken = sorted(r["step_time_s"] for r in run.steps() if r["time"] - r["step_time_s"] > began)
    return statistics.mean(taken[: len(taken) - len(taken) // 10])


def shown(rows: list[Row]) -> str:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    head = ("what", "measured", "CPU", "limit")
    table = [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * 4, *(row.cells for row in rows))]
    busy = f"Load {load:.0f} on {cores} cores at the end" + (
        ": limits are judged on the CPU." if load > cores else "."
    )
    return "\n".join([*table, "", busy])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--live", type=int, default=40, help="turns of the live run; 0: none")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of such a turn, watched and unwatched each"
    )
    parser.add_argument("--note", default="", help="a sentence for the log")
    options = parser.parse_args()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        root = options.root or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (root / NAME).exists():
            write_month(root, steps=260_000, nodes=128, seed=1)
        folder = RunFolder(root / NAME)
        stack.callback(os.close, lock.acquire(folder.lock))
        run = str(folder.path)
        rows.append(command(options.turns, "watch", run, "--once", limit=LIMITS["once"]))
        rows.append(command(options.turns, "watch", run, "--once", "--json", limit=None))
        rows.append(command(options.turns, "ls", "--runs", str(root), limit=None))
        if importlib.util.find_spec("seatrial.cli.report") is not None:
            place = stack.enter_context(tempfile.TemporaryDirectory())
            rows.append(command(1, "report", run, "--out", f"{place}/report.html", limit=None))
        served = Served(folder)
        stack.callback(served.close)
        rows.append(served.first_page("first page with data, cold server"))
        rows.append(served.first_page("first page with ranks, goodput and telemetry", whole=True))
        rows.append(served.first_page("first page with data, warm server"))
        rows += pages(served, folder)
        with growing(folder):
            rows += crowd(served, 20.0)
        rows.append(Row("peak memory of the server", served.peak_bytes(), None, LIMITS["memory"], "B"))
    if options.live:
        rows += live(options.live, options.seconds)
    table = shown(rows)
    print(table)
    with open(_LOG, "a") as log:
        log.write(
            f"\n### {date.today()}, a month of 1,024 GPUs, shown\n\n`web.py`. {options.note}\n\n{table}\n"
        )
    return int(any(row.limit is not None and row.judged > row.limit for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
