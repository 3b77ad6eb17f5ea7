"""Checkpoints in an object store, by way of a real service: moto's server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ONE_NODE, Run, records
from moto_server import MotoServer
from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Damaged, Manifest, Progress
from seatrial.checkpoint.place import open_place
from seatrial.checkpoint.staging import AsyncWriter, Outcome
from seatrial.checkpoint.write import Piece
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError, open_store

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

WAIT_S = 120.0
VALUES = 6_000_000  # 24 MB: several chunks, and an upload in several parts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.control.mkdir()
    run.generation_file.write_text("1\n")
    return run


@pytest.fixture
def writer() -> Iterator[AsyncWriter]:
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    yield writer
    writer.close()


def weight(step: int) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.float32) + step


def part(writer: AsyncWriter, url: str, step: int, *, read_back: bool = True) -> Outcome:
    writer.stage([Piece("model/w", weight(step), Box.whole((VALUES,)), (VALUES,))])
    writer.order_part(step, url, step, 1, read_back)
    while not (told := writer.poll()):
        writer.wait(WAIT_S)
    return told[0]


def save(writer: AsyncWriter, run: RunFolder, url: str, step: int, **options: Any) -> list[Outcome]:
    told = part(writer, url, step, **options)
    assert told.ok, told.problem
    manifest = Manifest(Progress(step, step, step, 1), 1.0, 1, {}, {}, "", "", False, [], {})
    writer.order_commit(step, url, manifest, run.path, 2, 0)
    return writer.wait_removed(WAIT_S)


def test_save_read_remove_and_quarantine(s3_url: str, writer: AsyncWriter, run: RunFolder) -> None:
    url = f"{s3_url}/runs/trial"
    place = open_place(url)
    place.prepare()
    assert place.steps() == []
    removed = [save(writer, run, url, step)[-1].names for step in (1, 2, 3, 4)]
    assert removed == [[], [], ["step-00000001"], ["step-00000002"]]
    assert place.steps() == [4, 3]
    assert open_store(url).read("latest") == b"step-00000004\n"
    for step in (4, 3):
        place.verify(step)
        opened = place.open(step)
        for box in (Box.whole((VALUES,)), Box((1_000_000,), (3_000_001,)), Box((VALUES - 1,), (1,))):
            found = opened.read("w", box, torch.float32)
            assert torch.equal(found, weight(step)[box.slices()])
        opened.close()
    name = place.set_aside(4, "a wrong course")
    assert (place.steps(), place.set_aside_names()) == ([3], [name])
    before = [e.name for e in open_store(url).names()]
    assert place.remove_leftovers() == []
    assert [e.name for e in open_store(url).names()] == before
    assert json.loads(open_store(url).read(name))["why"] == "a wrong course"


def test_damage_in_the_store_is_named(s3_url: str, writer: AsyncWriter, run: RunFolder) -> None:
    url = f"{s3_url}/trial"
    save(writer, run, url, 5)
    store = open_store(url)
    key = "step-00000005/g1/rank-00000.safetensors"
    data = bytearray(store.read(key))
    data[9_000_000] ^= 1
    store.write(key, data)
    place = open_place(url)
    with pytest.raises(
        Damaged, match=rf"{url}/{key} \(rank 0\) has XXH3-128 .* in bytes 8388608 to 12582911"
    ):
        place.verify(5)
    opened = place.open(5)
    with pytest.raises(Damaged, match="8388608 to 12582911"):
        opened.read("w", Box.whole((VALUES,)), torch.float32)
    # Bytes of other chunks are as good as ever.
    assert torch.equal(opened.read("w", Box((0,), (1000,)), torch.float32), weight(5)[:1000])
    opened.close()
    store.write(key, data[:-1])
    with pytest.raises(Damaged, match="bytes, the manifest has"):
        place.verify(5)
    store.remove([key])
    with pytest.raises(Damaged, match="is missing"):
        place.verify(5)


def test_no_such_bucket_and_no_credentials(
    s3_url: str, writer: AsyncWriter, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = part(writer, "s3://no-such-bucket-here/x", 1)
    assert (told.ok, told.kind) == (False, "missing")
    assert "s3://no-such-bucket-here/x" in (told.problem or "")
    with pytest.raises(StorageError) as caught:
        open_place("s3://no-such-bucket-here/x").steps()
    assert caught.value.kind == "missing", "it is not an empty place"
    assert save(writer, run, f"{s3_url}/x", 2)[0].ok, "the process is as good as before"


def test_an_unreachable_service_is_not_damage(
    writer: AsyncWriter, run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes away between two saves: the fallback takes the second, and the first is there when it comes back."""
    server = MotoServer()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("bucket")
        url = "s3://bucket/trial"
        save(writer, run, url, 1)
        server.close()
        told = part(writer, url, 2)
        assert (told.ok, told.kind) == (False, "unreachable")
        fallback = tmp_path / "fallback"
        fallback.mkdir()
        writer.order_part(3, str(fallback), 2, 1, True)
        while not (outcomes := writer.poll()):
            writer.wait(WAIT_S)
        assert outcomes[0].ok
        with pytest.raises(StorageError) as caught:
            open_place(url).steps()
        assert caught.value.kind == "unreachable"
    finally:
        server.close()


def test_a_run_saves_is_killed_resumes_and_removes(
    folder: Path, start: Callable[..., Run], s3_url: str
) -> None:
    """Everything of it dies with kill -9; the same command goes on from the store, and what it left is removed."""
    (folder / "job.toml").write_text(ONE_NODE)
    sets = [
        *("--set", f"checkpoint.folder={s3_url}/runs"),
        *("--set", "checkpoint.every_steps=2"),
        *("--set", "resilience.snapshot_every_steps=0"),
        *("--set", "train.steps=200"),
    ]
    first = start(*sets)
    for _ in range(2):
        first.wait_line("  checkpoint of step")
    first.kill_all()
    first.wait()
    first.wait_gone(10.0)
    place = open_place(f"{s3_url}/runs/small")
    before = place.steps()
    assert before[0] >= 4
    assert not list((folder / "runs/small/checkpoints").iterdir())
    # What the kill may have left, and certainly something.
    store = open_store(f"{s3_url}/runs/small")
    store.write(f"step-{before[0] + 1:08d}/g1/rank-00000.safetensors", b"half")
    second = start(*sets[:-1], f"train.steps={before[0] + 4}")
    code, out, err = second.wait()
    assert code == 0, err
    assert "every sample seen once" in out + err
    events = records(folder / "runs/small/events.jsonl")
    resumed = [e for e in events if e["kind"] == "resumed"]
    assert [e["data"]["step"] for e in resumed] == [before[0]]
    assert any("unfinished" in e["message"] for e in events if e["kind"] == "checkpoint_removed")
    steps = place.steps()
    assert len(steps) == 2, "the newest two are kept"
    # Between them two steps, or others where writing took so long that one came late: that of `before` may have.
    assert before[0] < steps[1] < steps[0] == before[0] + 4
    for step in steps:
        assert place.verify(step).read_back
    keys = [entry.name for entry in store.names()]
    assert {key.partition("/")[0] for key in keys} == {"latest", *(f"step-{step:08d}" for step in steps)}
