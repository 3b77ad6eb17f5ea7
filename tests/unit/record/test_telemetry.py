"""Telemetry: what is written is read, compressed and thinned; torn ends and damage cost only themselves."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem
from seatrial.record.series import NODE_SERIES, RUN_SERIES, SERVED_SERIES, parse_series, series
from seatrial.record.telemetry import read_chunk, read_latest, read_names, read_series
from seatrial.record.telemetry_format import chunks, recorded_nodes
from seatrial.record.telemetry_writer import CHUNK_S, MOST_SERIES, THIN, THIN_AFTER_S, TelemetryWriter

START = 1_764_000_000.0
POWER = series("gpu_power_watts", gpu=0)
SENT = series("port_sent_bytes_total", port="mlx5_0/1")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def recorded(folder: RunFolder, count: int, every_s: float = 10.0, start: float = START) -> TelemetryWriter:
    """Power 500, 501, ...; 1 GB sent a second."""
    writer = TelemetryWriter(folder, 3, every_s)
    for i in range(count):
        writer.add(start + i * every_s, {POWER: 500.0 + i, SENT: 1e15 + i * every_s * 1e9})
    return writer


def test_newest_sample(folder: RunFolder) -> None:
    recorded(folder, 5)
    sample = read_latest(folder)[3]
    assert sample.time == START + 40
    assert sample.every_s == 10
    assert sample.values == {POWER: 504.0, SENT: 1e15 + 40e9}
    assert sample.rates == {SENT: 1e9}
    assert recorded_nodes(folder) == [3]
    assert read_names(folder, 3) == [POWER, SENT]


def test_nothing_recorded(folder: RunFolder) -> None:
    assert read_latest(folder) == {}
    assert read_names(folder, 0) == []
    assert len(read_series(folder, 0, [POWER])[POWER].times) == 0


def test_series_of_samples(folder: RunFolder) -> None:
    recorded(folder, 100)
    found = read_series(folder, 3, [POWER, SENT, "node_cpus"], since=START + 100)
    assert found[POWER].times.tolist() == [START + 100 + 10 * i for i in range(90)]
    assert found[POWER].mean.tolist() == [510.0 + i for i in range(90)]
    assert np.allclose(found[SENT].mean, 1e9)
    assert len(found[SENT].times) == 90, "the sample before the first gives it a rate"
    assert len(found["node_cpus"].times) == 0


def test_at_most_so_many_points(folder: RunFolder) -> None:
    recorded(folder, 1000)
    power = read_series(folder, 3, [POWER], points=50)[POWER]
    assert len(power.times) == 50
    assert (power.low[0], power.high[-1]) == (500, 1499)
    assert np.all((power.low < power.mean) & (power.mean < power.high))
    assert power.mean.mean() == pytest.approx(999.5)


@pytest.mark.parametrize("thin", [False, True])
def test_packed_and_thinned_chunks(folder: RunFolder, thin: bool) -> None:
    count = int(2.5 * CHUNK_S / 10)
    writer = recorded(folder, count)
    end = START + count * 10
    before = read_series(folder, 3, [POWER, SENT], points=10**6)
    assert [path.suffix for path in chunks(folder, 3)] == [".samples"] * 3
    writer.tidy(end + (CHUNK_S + THIN_AFTER_S if thin else 0))
    assert [path.suffix for path in chunks(folder, 3)] == [".zst", ".zst", ".samples"]
    assert len(list(folder.telemetry_of(3).iterdir())) == 3
    after = read_series(folder, 3, [POWER, SENT], points=10**6)
    if not thin:
        for name in (POWER, SENT):
            assert np.array_equal(before[name].mean, after[name].mean)
        return
    header, table = read_chunk(chunks(folder, 3)[0])
    assert (header.thin, len(table)) == (THIN, CHUNK_S / 10 / THIN)
    first = after[POWER]
    assert (first.mean[0], first.low[0], first.high[0]) == (504.5, 500, 509)
    assert np.allclose(after[SENT].mean, 1e9)
    assert after[POWER].high.max() == before[POWER].high.max()
    writer.tidy(end + CHUNK_S + THIN_AFTER_S)
    assert read_chunk(chunks(folder, 3)[0])[0].thin == THIN, "not thinned again"


def test_a_series_that_appears_and_vanishes(folder: RunFolder) -> None:
    writer = recorded(folder, 3)
    writer.add(START + 30, {"node_cpus": 8.0})
    writer.add(START + 40, {POWER: 1.0, SENT: 1e15})
    assert len(chunks(folder, 3)) == 2
    found = read_series(folder, 3, [POWER, SENT, "node_cpus"])
    assert found[POWER].mean.tolist() == [500, 501, 502, 1]
    assert found["node_cpus"].mean.tolist() == [8]
    assert len(found[SENT].mean) == 2, "a counter that was reset has no rate"
    assert "node_cpus" not in read_latest(folder)[3].values, "absent, not zero"


def test_torn_end(folder: RunFolder) -> None:
    recorded(folder, 5).close()
    (path,) = chunks(folder, 3)
    with path.open("ab") as file:
        file.write(b"half a record"[:11])
    assert read_latest(folder)[3].values[POWER] == 504
    assert len(read_series(folder, 3, [POWER])[POWER].times) == 5
    TelemetryWriter(folder, 3, 10).tidy(START + 60)
    assert len(read_series(folder, 3, [POWER])[POWER].times) == 5


@pytest.mark.parametrize("content", [b"", b"{}\n", b"x" * 100, b'{"seatrial_telemetry":9}\n'])
def test_damage_is_reported_and_costs_one_chunk(folder: RunFolder, content: bytes) -> None:
    recorded(folder, 5).close()
    (path,) = chunks(folder, 3)
    recorded(folder, 5, start=START + 100)
    for bad in (path, path.with_name("1764000050000.samples.zst")):
        bad.write_bytes(content)
    problems: list[Problem] = []
    found = read_series(folder, 3, [POWER], problems=problems)
    assert len(found[POWER].times) == 5
    assert [p.file for p in problems] == [
        "telemetry/node3/1764000000000.samples",
        "telemetry/node3/1764000050000.samples.zst",
    ]
    TelemetryWriter(folder, 3, 10).tidy(START + 1e6)
    assert path.read_bytes() == content, "what cannot be used stays"


@pytest.mark.cluster  # slow
@settings(max_examples=50)
@given(st.data())
def test_damage_never_raises(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        damage(RunFolder(Path(name)), data)


def damage(folder: RunFolder, data: st.DataObject) -> None:
    """Write, damage, read, tidy and read again."""
    writer = recorded(folder, 40)
    if data.draw(st.booleans()):
        writer.close()
        writer.tidy(START + (1e6 if data.draw(st.booleans()) else 0))
    (path,) = chunks(folder, 3)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    read_latest(folder)
    read_names(folder, 3)
    read_series(folder, 3, [POWER, SENT], points=7)
    writer.close()
    writer.tidy(START + 1e6)
    read_series(folder, 3, [POWER, SENT], points=7)


def test_packed_chunk_cut_short(folder: RunFolder) -> None:
    writer = recorded(folder, 50)
    writer.close()
    writer.tidy(START + 500)
    (path,) = chunks(folder, 3)
    path.write_bytes(path.read_bytes()[:-9])
    problems: list[Problem] = []
    assert len(read_series(folder, 3, [POWER], problems=problems)[POWER].times) == 0
    assert len(problems) == 1


def test_bounded_number_of_series(folder: RunFolder) -> None:
    writer = TelemetryWriter(folder, 3, 10)
    for second in range(3):
        writer.add(START + second, {f"x{second}_{i}": 1.0 for i in range(900)})
    assert len(read_names(folder, 3)) == MOST_SERIES


def test_clock_set_back(folder: RunFolder) -> None:
    writer = recorded(folder, 5)
    writer.add(START - 100, {POWER: 1.0})
    assert read_latest(folder)[3].values[POWER] == 504


def test_names_are_standard() -> None:
    for each in (*NODE_SERIES.values(), *RUN_SERIES.values(), *SERVED_SERIES.values()):
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert each.name.removesuffix("_total").endswith(each.unit), each.name
        assert each.help
        assert each.source
        assert ("run" in each.labels) == (each.name in RUN_SERIES or each.name == "run_info"), each.name


@pytest.mark.parametrize("value", ["0", "mlx5_0/1", "H100 SXM"])
def test_key_round_trip(value: str) -> None:
    key = series("gpu_info", gpu=0, name=value)
    assert parse_series(key) == ("gpu_info", {"gpu": "0", "name": value})


def test_hostile_label_value() -> None:
    name, labels = parse_series(series("gpu_info", name='a"b\\c\n{}d'))
    assert name == "gpu_info"
    assert labels == {"name": "a_b_c___d"}
    with pytest.raises(ValueError, match="not the name"):
        parse_series('gpu_info{name="a"b="c"}')


def test_a_folder_that_was_moved_does_not_appear_again(tmp_path: Path) -> None:
    writer = TelemetryWriter(RunFolder(tmp_path / "moved"), 3, 10)
    with pytest.raises(FileNotFoundError):
        writer.add(START, {POWER: 1.0})
    assert not list(tmp_path.iterdir())


def test_nan_is_absent(folder: RunFolder) -> None:
    TelemetryWriter(folder, 3, 10).add(START, {POWER: math.nan, "node_cpus": 2.0})
    assert read_latest(folder)[3].values == {"node_cpus": 2.0}
