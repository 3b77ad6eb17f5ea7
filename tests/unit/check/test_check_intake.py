"""Long and packed logs, pipes, and what has no end: read for real, in bounded memory, and no line is lost that says something."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from seatrial.check.intake import numbered_lines
from seatrial.check.intake.collect import Piece, pieces_of
from seatrial.check.intake.offline import judge_paths, judge_pieces
from seatrial.check.judging.report import Report
from seatrial.check.outputs import kernel_text
from seatrial.check.outputs.kernel_rules import WORDS

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
IBSTAT = (FIXTURES / "ibstat_one_down.txt").read_bytes()
XID = "kernel: NVRM: Xid (PCI:0000:{:02x}:00): {}, pid={}, name=python3, Ch 00000008"
QUIET = "Nov 15 12:00:{:02} gpu07 systemd[1]: Started Session {} of User root.\n"
HEAD = QUIET.partition("systemd")[0]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def report(data: bytes, node: str | None = None) -> Report:
    return judge_pieces(pieces_of(data, "f.txt", node))


def log_of(mib: float, told: dict[int, str]) -> bytes:
    """A syslog of about `mib` MiB, with the lines `told` in it at their numbers."""
    lines = []
    for n in range(1, int(mib * (1 << 20) / len(QUIET)) + 1):
        lines.append(f"{HEAD.format(n % 60)}{told[n]}\n" if n in told else QUIET.format(n % 60, n))
    return "".join(lines).encode()


class Endless(io.RawIOBase):
    """A stream of `size` bytes that are made as they are read."""

    def __init__(self, size: int, line: Callable[[int], bytes]) -> None:
        self._left, self._line, self._n, self._rest = size, line, 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        parts, have = [self._rest], len(self._rest)
        while have < min(len(view), self._left):
            self._n += 1
            parts.append(self._line(self._n))
            have += len(parts[-1])
        data = b"".join(parts)
        count = min(len(view), self._left, len(data))
        view[:count] = data[:count]
        self._rest = data[count:]
        self._left -= count
        return count


@pytest.mark.parametrize("packing", sorted(PACK))
def test_packed_files_are_read(packing: str, tmp_path: Path) -> None:
    for data in (IBSTAT, log_of(2.5, {30_000: XID.format(0x3B, 79, 1)})):
        plain, packed = report(data), report(PACK[packing](data))
        assert packed.verdict == plain.verdict == "FAIL"
        assert packed.findings == plain.findings
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1" / "ibstat.txt.any").write_bytes(PACK[packing](IBSTAT))
    assert judge_paths([str(tmp_path)]).nodes == {"n1": "FAIL"}


@pytest.mark.parametrize("packing", sorted(PACK))
def test_packed_files_in_parts_are_read_to_the_end(packing: str) -> None:
    half = IBSTAT.index(b"CA 'mlx5_2'")
    assert (
        report(PACK[packing](IBSTAT[:half]) + PACK[packing](IBSTAT[half:])).findings
        == report(IBSTAT).findings
    )


@pytest.mark.parametrize("packing", sorted(PACK))
def test_truncated_or_damaged_packed_files_do_not_pass(packing: str) -> None:
    healthy = (FIXTURES / "ibstat_four_ndr.txt").read_bytes()
    packed = PACK[packing](healthy)
    assert report(packed).verdict == "PASS"
    for data in (
        packed[:-3],
        packed[: len(packed) // 2],
        packed[:12],
        packed + b"junk",
        packed[:40] + bytes([packed[40] ^ 1]) + packed[41:],
    ):
        found = report(data)
        assert found.verdict in ("UNJUDGED", "FAIL"), data
        assert any(
            "unpacked" in f.message or "end early" in f.message or "FILE" in f.code for f in found.findings
        )
    assert {f.code for f in report(PACK[packing](b"")).findings} == {"FILE002"}


def test_archives_are_named() -> None:
    for data, what in ((b"PK\x03\x04" + bytes(60), "zip"), (b"x" * 257 + b"ustar" + bytes(300), "tar")):
        (found,) = report(data).findings
        assert (found.code, found.verdict) == ("FILE004", "UNJUDGED")
        assert what in found.message
        assert what in report(gzip.compress(data)).findings[0].message


def test_no_line_of_a_long_log_is_lost() -> None:
    told = {n: XID.format(n % 251, 79, n) for n in (3, 17_000, 29_999, 30_001, 45_678, 60_002)}
    data = log_of(5, told)
    found = report(data)
    assert {f.evidence[0] for f in found.findings if f.code == "XID001"} == {f"f.txt:{n}" for n in told}
    assert {f.target.node for f in found.findings} == {"gpu07"}
    quiet = report(log_of(5, {}))
    assert quiet.verdict == "PASS"
    assert f"in {log_of(5, {}).count(bytes([10]))} lines" in quiet.findings[0].message


def test_lines_that_are_not_a_log_prevent_a_pass_anywhere() -> None:
    lines = log_of(4, {}).splitlines(keepends=True)
    for at in (0, 20_000, 40_000, len(lines)):
        found = report(b"".join([*lines[:at], b"somebody was here\n", *lines[at:]]))
        assert [f.code for f in found.findings if f.verdict != "PASS"] == ["OUT002"]
        assert next(f for f in found.findings if f.code == "OUT002").evidence == (f"f.txt:{at + 1}",)
    both = report(b"".join([*lines[:30_000], IBSTAT, *lines[30_000:]]))
    assert {(j.tool, j.verdict) for j in both.judged} == {("kernel log", "PASS"), ("ibstat", "FAIL")}


def test_log_storm_is_counted_and_other_lines_are_still_found() -> None:
    noise = "kernel: pcieport 0000:00:01.0: AER: Corrected error message received from 0000:01:00.0"
    told: dict[int, str] = dict.fromkeys(range(1, 60_001), noise)
    told[50_000] = XID.format(0x1B, 79, 1)
    told[55_000] = "systemd-networkd[811]: ib4: Lost carrier"
    data = log_of(8, told)
    found = {f.code: f for f in report(data).findings if f.verdict != "PASS"}
    assert found.keys() == {"SYS003", "XID001", "NET014"}
    assert "59998 times" in found["SYS003"].message
    assert found["SYS003"].evidence[0] == "f.txt:1"
    assert len(numbered_lines.read_stream(io.BytesIO(data)).lines) < 20_000 + 300


def test_links_that_flap_in_a_long_log() -> None:
    told = {30_000 + 2 * n + k: f"systemd-networkd[811]: ib4: {w} carrier" for n in range(1000) for k, w in enumerate(("Lost", "Gained"))}  # fmt: skip
    told[35_000] = "systemd-networkd[811]: ib5: Lost carrier"
    found = {f.target.port: f for f in report(log_of(5, told)).findings}
    assert found["ib4"].verdict == "FAIL"
    assert "1000 times" in found["ib4"].message
    assert "down at the end" not in found["ib4"].message
    assert (found["ib5"].verdict, "down at the end" in found["ib5"].message) == ("WARN", True)


def test_every_significant_log_line_has_a_filter_keyword() -> None:
    samples = [line for p in FIXTURES.iterdir() for line in p.read_text().splitlines()]
    relevant = [line for line in samples if kernel_text.is_relevant(line)]
    assert len(relevant) > 20
    assert all(any(word in line.lower() for word in WORDS) for line in relevant)
    assert not any(c.isdigit() for word in WORDS for c in word), (
        "digits are all alike where lines are looked at"
    )
    many = [*relevant, *samples] * 10
    assert len(many) > 1000
    assert kernel_text.quiet_of(many)[: len(relevant)] == [False] * len(relevant)
    assert kernel_text.quiet_of(many) == [q for x in many for q in kernel_text.quiet_of([x])]


def test_a_long_log_of_many_hosts_names_each(tmp_path: Path) -> None:
    dice = random.Random(1)
    lines = [f"gpu{n % 50:02}: [{n:7}.000001] usb 1-1: new device {dice.random()}" for n in range(60_000)]
    lines[40_001] = f"gpu01: [40001.000001] {XID.format(0x3B, 79, 1).removeprefix('kernel: ')}"
    lines[55_555] = "late9: [55555.000001] usb 1-1: new device"
    found = report("\n".join(lines).encode() + b"\n")
    assert found.nodes == {f"gpu{n:02}": "FAIL" if n == 1 else "PASS" for n in range(50)} | {"late9": "PASS"}
    count = sum(int(f.message.split(" in ")[-1].split()[0]) for f in found.findings if f.verdict == "PASS")
    assert count == 60_000 - 1200


@pytest.mark.parametrize("cut", [100, 1000, 4095, 4096, 65_537])
def test_where_a_block_ends_makes_no_difference(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(QUIET.format(n % 60, n) for n in range(900)) + "ü\n"
    told = {n: XID.format(n % 200, 79, n) for n in range(1, 900, 37)}
    data = log_of(0.06, told) + text.encode() + IBSTAT.replace(b"\n", b"\r\n")
    whole = report(data)
    monkeypatch.setattr(numbered_lines, "BLOCK_BYTES", cut)
    assert report(data).findings == whole.findings
    assert report(data.decode().encode("utf-16")).findings == whole.findings


def test_an_endless_line_is_dropped_and_does_not_pass() -> None:
    taken = numbered_lines.read_stream(io.BufferedReader(Endless(40 << 20, lambda n: b"x" * 4096)))
    assert sum(len(line) for _, line in taken.lines) <= numbered_lines.LONGEST_LINE
    assert [why for why, _ in taken.damage] == ["a line longer than 4 MiB"]
    long = b"[    1.000001] a message " + b"x" * 20_000 + b"\n"
    assert report(long).verdict == "UNJUDGED"
    assert report(log_of(2, {}) + long).verdict == "PASS", "all of it was looked at for words"


def test_of_gigabytes_little_is_kept() -> None:
    """Of 24 MiB; what is kept does not grow with the size."""

    def line(n: int) -> bytes:
        text = (
            XID.format(n % 8, 13, n) if n % 20_000 == 0 else f"sshd[{n}]: user{n * 7919 % 10**9:x} logged in"
        )
        return f"Nov 15 12:00:{n % 60:02} gpu07 {text}\n".encode()

    taken = numbered_lines.read_stream(io.BufferedReader(Endless(24 << 20, line)))
    assert sum(len(x) for _, x in taken.lines) < 2 * numbered_lines.BLOCK_BYTES
    assert taken.damage == []


def test_large_input_that_is_not_a_log_is_read_partially(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered_lines, "LARGEST_CHARS", 4 << 20)
    source = Endless(1 << 40, lambda n: b"%d words that no log has, and no tool either, in a line\n" % n)
    taken = numbered_lines.read_stream(io.BufferedReader(source))
    assert "the rest was not read" in taken.damage[0][0]
    assert sum(len(x) + 1 for _, x in taken.lines) < (4 << 20) + 2 * numbered_lines.BLOCK_BYTES


def test_of_many_small_files_one_is_in_memory() -> None:
    pieces: list[weakref.ref[Piece]] = []

    def one_by_one() -> Iterator[Piece]:
        for n in range(50):
            assert sum(ref() is not None for ref in pieces) <= 2, "what was judged is let go"
            log = log_of(0.01, {5: XID.format(0x3B, 79, 1)} if n == 7 else {})
            (piece,) = pieces_of(log, f"n{n}/dmesg", f"n{n}")
            pieces.append(weakref.ref(piece))
            yield piece

    found = judge_pieces(one_by_one())
    assert [n for n, v in found.nodes.items() if v != "PASS"] == ["n7"]
    assert len(pieces) == 50


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    sizes = []
    for name in ("a", "b.gz"):
        data = log_of(2.2, {})
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        sizes.append((tmp_path / name).stat().st_size)
    said: list[tuple[int, int, str]] = []
    judge_paths([str(tmp_path)], progress=lambda *told: said.append(told))
    assert {total for _, total, _ in said} == {sum(sizes)}
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)
    assert said[-1][0] == sum(sizes)
    assert [what.rpartition("/")[2] for _, _, what in said][:: len(said) - 1] == ["a", "b.gz"]


def lines_of_all() -> Iterator[str]:
    for p in sorted(FIXTURES.iterdir()):
        yield from p.read_text().splitlines()


def test_quiet_lines_are_log_lines_without_findings() -> None:
    every = list(lines_of_all())
    for line, quiet in zip(every, kernel_text.quiet_of(every), strict=True):
        if quiet:
            assert kernel_text.LINE.match(line)
            assert not kernel_text.is_relevant(line)
