"""`seatrial watch --web` on the folder of a month of 1,024 GPUs (bench/month.py), and 50 browsers on a live run.

    python bench/web.py [--month FOLDER] [--clients 50] [--windows 6] [--window 10] [--only month|live]

Prints the wall and CPU time from the start of the server to the first page, of each page, of `watch --once`, and the memory;
then the step time of a small live run without and with browsers, in turns, and the server's CPU time a second. A browser is
stood in for by an open stream: drawing happens on its own machine. Limits: first page 1 s, any page 2 s, 500 MB, step 0.5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from month import write_month
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import read_metrics
from seatrial.watch.web.pages import PAGES

_HZ = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ


def start_server(root: Path, *runs: str) -> tuple[subprocess.Popen[str], str, float]:
    """(the process, its address, when it was started)."""
    began = time.monotonic()
    command = [sys.executable, "-m", "seatrial", "watch", *runs, "--web", "--port", "0"]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"http://\S+/", process.stderr.readline())
    assert found is not None
    return process, found[0], began


def end(process: subprocess.Popen[str]) -> float:
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    return time.monotonic() - began


def month(folder: Path) -> None:
    root, name = folder.parent.parent, folder.name
    began, children = time.monotonic(), os.times()
    subprocess.run(
        [sys.executable, "-m", "seatrial", "watch", name, "--once"], cwd=root, capture_output=True, check=True
    )
    after = os.times()
    used = after.children_user + after.children_system - children.children_user - children.children_system
    print(f"watch --once: {time.monotonic() - began:.2f} s, {used:.2f} s of CPU")
    process, address, began = start_server(root, name)
    with httpx.Client(base_url=address, timeout=60) as client:
        for what, key in (("first screen", "moving"), ("with its heat map", "steps")):
            with client.stream("GET", f"/api/run/{name}/stream") as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: ") and (
                        key != "steps" or "steps" in json.loads(line[6:]).get("heat", {})
                    ):
                        break
            print(
                f"server start to {what}: {time.monotonic() - began:.2f} s, {cpu_s(process.pid):.2f} s of CPU"
            )
        paths = {"/": "/", "first screen": "", **{page: f"/page/{page}" for page in PAGES}}
        paths |= {
            "heat, own work": "/heat",
            "heat, temperature": "/heat?metric=telemetry:gpu_temperature_celsius",
        }
        logs = client.get(f"/api/run/{name}/logs").json()
        large = max(logs["logs"], key=lambda log: log["size"])["id"]
        paths |= {"logs": "/logs", "log of 5 GB": f"/log?generation={logs['generation']}&id={large}"}
        for page, path in paths.items():
            began = time.monotonic()
            if page == "first screen":
                with client.stream("GET", f"/api/run/{name}/stream") as stream:
                    size = len(next(line for line in stream.iter_lines() if line.startswith("data: ")))
            else:
                answer = client.get("/" if path == "/" else f"/api/run/{name}{path}")
                answer.raise_for_status()
                size = len(answer.content)
            print(f"  {page:<20} {1000 * (time.monotonic() - began):6.0f} ms  {size / 1000:7.1f} kB")
        before, at = cpu_s(process.pid), time.monotonic()
        time.sleep(30)
        print(f"CPU while watched: {(cpu_s(process.pid) - before) / (time.monotonic() - at):.3f} s a second")
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    assert peak is not None
    print(f"peak memory: {int(peak[1]) / 1000:.0f} MB; ended in {end(process):.2f} s")


async def browsers(address: str, name: str, count: int, seconds: float) -> int:
    """Keep `count` streams open; how many changes they got."""
    got = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal got
        async with client.stream("GET", f"/api/run/{name}/stream") as stream:
            async for line in stream.aiter_lines():
                got += line.startswith("data: ")

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        tasks = [asyncio.create_task(one(client)) for _ in range(count)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return got


def live(clients: int, windows: int, window_s: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        subprocess.run(
            [sys.executable, "-m", "seatrial", "init", "--preset", "first-voyage"], cwd=root, check=True
        )
        train = subprocess.Popen(
            [sys.executable, "-m", "seatrial", "train", "first-voyage.toml", "--plain", "--set", "train.steps=1000000"],
            cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        folder = RunFolder(root / "runs" / "first-voyage")
        while not folder.metrics.exists() or len(folder.metrics.read_bytes().splitlines()) < 20:
            assert train.poll() is None
            time.sleep(0.2)
        process, address, _ = start_server(root, "first-voyage")
        alone, watched, cpu, got = [], [], [], 0
        spans: list[tuple[list[float], float, float]] = []
        for _ in range(windows):
            os.kill(process.pid, signal.SIGSTOP)
            spans.append((alone, time.time(), time.time() + window_s))
            time.sleep(window_s)
            os.kill(process.pid, signal.SIGCONT)
            before, at = cpu_s(process.pid), time.time()
            got += asyncio.run(browsers(address, "first-voyage", clients, window_s))
            spans.append((watched, at, at + window_s))
            cpu.append((cpu_s(process.pid) - before) / window_s)
        records, _ = read_metrics(folder)
        for into, first, last in spans:
            into += [r.step_time_s for r in records if first < r.time - r.step_time_s and r.time < last]
        print(f"ended with {clients} streams in {end(process):.2f} s")
        a, w = statistics.median(alone), statistics.median(watched)
        print(
            f"step alone {1000 * a:.1f} ms ({len(alone)}), with {clients} browsers {1000 * w:.1f} ms ({len(watched)}): {w / a:.4f}"
        )
        print(f"the server's CPU: {statistics.mean(cpu):.4f} s a second, niced; changes sent: {got}")
        train.send_signal(signal.SIGINT)
        train.wait(300)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--month", type=Path, help="RUNS/NAME that bench/month.py wrote; default: write one")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--only", choices=("month", "live"))
    options = parser.parse_args()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.only != "live":
        with tempfile.TemporaryDirectory() as place:
            folder = options.month
            if folder is None:
                folder = Path(place) / "runs" / "month"
                write_month(RunFolder(folder), steps=260_000, nodes=128, seed=1)
            month(folder.absolute())
    if options.only != "month":
        live(options.clients, options.windows, options.window)
