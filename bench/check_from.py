"""Speed and memory of `seatrial check --from` on large logs.

    python bench/check_from.py [--mib 200] [--folder DIR] [--case NAME...] [--tree OTHER_CHECKOUT]

Cases: `syslog` (a day of a node: systemd, sshd, slurmd, kubelet, kernel; 30 relevant lines per million), `dmesg`,
`kmsg`, `hosts` (a log of 64 hosts by pdsh), `central` (syslog of 64 hosts), `words` (a unique name in every line),
`storm` (every fourth line an error), compressed ones `syslog.gz`, `syslog.xz`, `syslog.zst`, `syslog.bz2`, `small` (files of
4 KiB) and `line` (a single unterminated line). Each runs in its own process. --tree also runs the code of another checkout,
with a hundredth of the size and at most 300 s, and prints the ratio.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

MIB = 1 << 20
_TELLING = (
    "kernel: NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name=python3, Graphics Exception: ESR 0x505730=0x10009",
    "systemd-networkd[811]: ib4: Lost carrier",
    "systemd-networkd[811]: ib4: Gained carrier",
)
_QUIET = (
    "systemd[1]: Started Session {n} of User root.",
    "sshd[{n}]: Accepted publickey for slurm from 10.0.{m}.7 port {n} ssh2: RSA SHA256:3a9f",
    "kernel: IPv6: ADDRCONF(NETDEV_CHANGE): cali{m}: becomes ready",
    "slurmd[{m}]: launch task StepId={n}.0 request from UID:1000 GID:1000 HOST:10.0.0.5 PORT:53124",
    "kubelet[{m}]: I1115 12:00:00.{n} 1234 prober.go:107] Probe succeeded pod=kube-system/coredns containerName=coredns",
    "CRON[{n}]: (root) CMD (   cd / && run-parts --report /etc/cron.hourly)",
    "kernel: audit: type=1400 audit(1731672000.{m}:{n}): apparmor=STATUS operation=profile_load pid={n}",
)
_DRIVER = (
    "usb 1-1: new high-speed USB device number {m} using xhci_hcd",
    "nvidia 0000:3b:00.0: enabling device (0140 -> 0142)",
    "docker0: port {m}(veth{n}) entered forwarding state",
)


def lines(case: str) -> Iterator[str]:
    """Lines of one case, without end."""
    dice = random.Random(0)
    n = 0
    while True:
        n += 1
        second = n // 50
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        told = dice.random() < 3e-5 or (case == "storm" and n % 4 == 0)
        text = dice.choice(_TELLING if told else _QUIET).format(
            n=dice.randrange(10**6), m=dice.randrange(1000)
        )
        drivers = dice.choice(_DRIVER).format(n=dice.randrange(10**6), m=dice.randrange(100))
        drivers = _TELLING[0].removeprefix("kernel: ") if told else drivers
        host = f"gpu{n % 64:03}"
        match case:
            case "dmesg":
                yield f"[{second:7}.{n % 10**6:06}] {drivers}"
            case "kmsg":
                yield f"6,{n},{n * 20000},-;{drivers}"
            case "hosts":
                yield f"{host}: [{second:7}.{n % 10**6:06}] {drivers}"
            case "central":
                yield f"Nov 15 {clock} {host} {text}"
            case "words":
                name = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=12))
                yield f"Nov 15 {clock} gpu07 systemd[1]: Started {name}.service, unit of user {name[::-1]}, slice {name[3:]}"
            case _:
                yield f"Nov 15 {clock} gpu07 {text}"


def written(folder: Path, case: str, size: int) -> Path:
    """The input of a case, of about `size` bytes unpacked."""
    kind, _, packing = case.partition(".")
    path = folder / f"{kind}-{size}"
    if kind == "small":
        path.mkdir()
        source = lines("syslog")
        for n in range(max(1, size // 4096)):
            node = path / f"n{n % 64:02}"
            node.mkdir(exist_ok=True)
            (node / f"log{n}").write_text("".join(next(source) + "\n" for _ in range(38)))
        return path
    if not path.exists():
        with path.open("w") as f:
            if kind == "line":
                for _ in range(max(1, size // MIB)):
                    f.write("x" * MIB)
            else:
                left = size
                for line in lines(kind):
                    left -= f.write(line + "\n")
                    if left <= 0:
                        break
    if not packing:
        return path
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gz": lambda b: gzip.compress(b, 6),
        "xz": lambda b: lzma.compress(b, preset=1),
        "bz2": bz2.compress,
        "zst": zstandard.ZstdCompressor().compress,
    }
    packed = path.with_suffix(f".{packing}")
    packed.write_bytes(pack[packing](path.read_bytes()))
    return packed


def size_of(path: Path) -> int:
    return (
        sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        if path.is_dir()
        else path.stat().st_size
    )


def measured(path: Path, tree: Path, limit_s: float) -> tuple[float, float, float] | None:
    """(seconds, CPU seconds, peak MiB) of a check of `path` by the code in `tree`; None after a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    call = [sys.executable, "-P", "-m", "seatrial", "check", "--from", str(path), "--json"]
    begun = time.perf_counter()
    process = subprocess.Popen(call, env=environment, stdout=subprocess.DEVNULL)
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - begun
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode in (0, 1), process.returncode
            return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        if seconds > limit_s:
            process.kill()
            process.wait()
            return None
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = (
        "syslog",
        "dmesg",
        "kmsg",
        "hosts",
        "central",
        "words",
        "storm",
        "syslog.gz",
        "syslog.xz",
        "syslog.zst",
    )
    cases = (*cases, "syslog.bz2", "small", "line")
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--tree", type=Path)
    args = parser.parse_args()
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        print(f"{'case':12} {'MiB':>6} {'s':>7} {'CPU s':>7} {'MB/s':>6} {'MB/CPU s':>8} {'MiB peak':>8}")
        for case in args.case:
            path = written(folder, case, args.mib * MIB)
            size = args.mib * MIB if "." in case else size_of(path)
            found = measured(path, here, 3600)
            assert found is not None
            rates = f"{size / 1e6 / found[0]:6.1f} {size / 1e6 / found[1]:8.1f}"
            line = f"{case:12} {size / MIB:6.0f} {found[0]:7.2f} {found[1]:7.2f} {rates} {found[2]:8.0f}"
            if args.tree is not None and "." not in case:
                part = written(folder, case, args.mib * MIB // 100)
                before = measured(part, args.tree, 300)
                if before is None:
                    line += f"   the other: more than 300 s for {size_of(part) / MIB:.0f} MiB"
                else:
                    rate = size_of(part) / 1e6 / before[1]
                    line += f"   the other: {rate:.2f} MB/CPU s of {size_of(part) / MIB:.0f} MiB, ratio {size / 1e6 / found[1] / rate:.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
