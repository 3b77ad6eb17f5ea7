"""Snapshots between two processes over loopback, and to disk, by children that leave nothing."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_files import KEY, LAYOUT, put

from seatrial.base import process
from seatrial.checkpoint import memory
from seatrial.checkpoint.manifest import folder_name
from seatrial.checkpoint.memory import Snapshot, layout_key
from seatrial.checkpoint.verified import verify
from seatrial.control.net import wire
from seatrial.control.snapshots import transfer
from seatrial.control.snapshots.snapshot_buffers import Held, SnapshotBuffers
from seatrial.control.snapshots.transfer import Moving
from seatrial.job import load_job
from seatrial.job.layout import Layout
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

SECRET = b"s" * 32
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no open file stays behind."""
    gc.collect()  # what earlier tests left to the collector is none of ours
    files, children = set(os.listdir("/proc/self/fd")), process.descendants(os.getpid())
    yield
    assert process.descendants(os.getpid()) == children
    assert set(os.listdir("/proc/self/fd")) <= files


@pytest.fixture
def snapshot_buffers() -> Iterator[SnapshotBuffers]:
    snapshot_buffers = SnapshotBuffers(1)
    yield snapshot_buffers
    snapshot_buffers.close()


@pytest.fixture
def listener() -> Iterator[wire.Listener]:
    listener = wire.Listener("127.0.0.1", SECRET)
    yield listener
    listener.close()


@pytest.fixture
def held() -> Iterator[Held]:
    """A snapshot of rank 3 on another node."""
    fd = os.memfd_create("elsewhere")
    yield Held(put(fd, rank=3, size=3_000_000), fd, own=True)
    os.close(fd)


def incoming(listener: wire.Listener, wanted: str = "ready") -> wire.Incoming:
    """The next connection, proven or refused."""
    assert select.select([listener], [], [], WAIT_S)[0]
    (connection,) = listener.accept()
    while (progress := connection.advance()) == "wait":
        assert select.select([connection], [], [], WAIT_S)[0]
    assert progress == wanted
    return connection


def end(moving: Moving) -> dict[str, Any]:
    """Reap the child as the agent does; its answer."""
    status = os.waitstatus_to_exitcode(os.waitpid(moving.pid, 0)[1])
    answer = moving.result()
    assert (status == 0) == answer["ok"]
    return answer


def receive(snapshot_buffers: SnapshotBuffers, connection: wire.Incoming) -> Moving:
    """Take what is announced, as the snapshot service does."""
    announced = Snapshot.from_message(connection.hello["snapshot"])
    fd = snapshot_buffers.buffer_for(announced)
    assert fd is not None
    return transfer.receive(connection, fd, announced)


def gives(snapshot: Snapshot, **more: Any) -> dict[str, Any]:
    """What a giver says first."""
    return msg.encode(msg.GivesSnapshot(**snapshot.summary() | more))


def header(snapshot: Snapshot) -> dict[str, Any]:
    return msg.encode(msg.SnapshotHeader(snapshot.to_message()))


def register(snapshot_buffers: SnapshotBuffers, moving: Moving, answer: dict[str, Any]) -> None:
    assert moving.fd is not None
    snapshot_buffers.filled(moving.fd, Snapshot.from_message(answer["snapshot"]) if answer["ok"] else None)


def test_a_copy_goes_to_another_node(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    giving = transfer.push(held, "127.0.0.1", listener.port, SECRET)
    connection = incoming(listener)
    taking = receive(snapshot_buffers, connection)
    assert snapshot_buffers.held() == []
    answer = end(taking)
    assert end(giving)["ok"]
    register(snapshot_buffers, taking, answer)
    copy = snapshot_buffers.find(3, 10, 1, KEY)
    assert copy is not None
    assert not copy.own
    assert copy.snapshot.index == held.snapshot.index
    assert os.pread(copy.fd, held.snapshot.bytes + 1, 0) == os.pread(held.fd, held.snapshot.bytes + 1, 0)


def test_a_new_node_fetches_what_another_holds(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    wanted = Snapshot.from_message(json.loads(json.dumps(held.snapshot.summary())))
    fd = snapshot_buffers.buffer_for(wanted, local=0)
    assert fd is not None
    taking = transfer.fetch(wanted, fd, "127.0.0.1", listener.port, SECRET)
    connection = incoming(listener)
    assert connection.hello == {"fetch": held.snapshot.summary()}
    giving = transfer.serve(connection, held)
    answer = end(taking)
    assert end(giving)["ok"]
    register(snapshot_buffers, taking, answer)
    (entry,) = snapshot_buffers.entries_for(0, 3, LAYOUT.as_dict())
    memory.verify(snapshot_buffers.fds(0)[entry["slot"]], entry)
    copy = snapshot_buffers.find(3, 10, 1, KEY)
    assert copy is not None
    assert copy.snapshot.index == held.snapshot.index


def test_a_snapshot_that_no_node_has_any_more(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    fd = snapshot_buffers.buffer_for(held.snapshot, local=0)
    assert fd is not None
    taking = transfer.fetch(held.snapshot, fd, "127.0.0.1", listener.port, SECRET)
    assert end(transfer.serve(incoming(listener), None))["ok"]
    answer = end(taking)
    assert answer["message"] == "the other side does not have step 10 of rank 3"
    register(snapshot_buffers, taking, answer)
    assert snapshot_buffers.held() == []


def test_a_node_that_holds_a_copy_of_what_it_is_to_run(held: Held, snapshot_buffers: SnapshotBuffers) -> None:
    fd = snapshot_buffers.buffer_for(held.snapshot, local=0)
    assert fd is not None
    moving = transfer.copy(held, fd)
    register(snapshot_buffers, moving, end(moving))
    assert [e["step"] for e in snapshot_buffers.entries_for(0, 3, LAYOUT.as_dict())] == [10]


def test_a_file_that_is_written_over_on_the_way_is_not_taken(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    """The rank has begun its next snapshot in the file that is being sent."""
    put(held.fd, rank=3, step=30, size=3_000_000)
    giving = transfer.push(held, "127.0.0.1", listener.port, SECRET)
    connection = incoming(listener)
    taking = receive(snapshot_buffers, connection)
    answer = end(taking)
    assert "the received data has XXH3-128" in answer["message"]
    assert not end(giving)["ok"]
    register(snapshot_buffers, taking, answer)
    assert snapshot_buffers.held() == []


def speak(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


@pytest.mark.parametrize("sent", [0, 1, 8, 2_000_000])
def test_a_stream_that_ends_early(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener, sent: int
) -> None:
    def half() -> None:
        hello = gives(held.snapshot)
        session = wire.dial("127.0.0.1", listener.port, SECRET, hello, WAIT_S)
        session.send(header(held.snapshot))
        session.sock.sendall(os.pread(held.fd, sent, 0))
        session.close()

    thread = speak(half)
    connection = incoming(listener)
    taking = receive(snapshot_buffers, connection)
    answer = end(taking)
    thread.join()
    assert answer["message"] == f"the stream ended {held.snapshot.bytes - sent} bytes early"
    register(snapshot_buffers, taking, answer)
    assert snapshot_buffers.held() == []


def test_another_snapshot_than_was_announced(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    def other() -> None:
        hello = gives(held.snapshot, rank=4)
        session = wire.dial("127.0.0.1", listener.port, SECRET, hello, WAIT_S)
        session.send(header(held.snapshot))
        with pytest.raises(ConnectionError):
            session.receive()
        session.close()

    thread = speak(other)
    connection = incoming(listener)
    answer = end(receive(snapshot_buffers, connection))
    thread.join()
    assert "requested was Snapshot(rank=4" in answer["message"]


def test_a_stranger_is_refused_and_finds_no_one(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    giving = transfer.push(held, "127.0.0.1", listener.port, b"x" * 32)
    connection = incoming(listener, wanted="refused")
    assert connection.hello == {}
    connection.close()
    answer = end(giving)
    assert not answer["ok"]
    assert "127.0.0.1" in answer["message"]


def test_a_false_server_gets_nothing(held: Held) -> None:
    """The giver proves the other side, too, before it sends a byte."""
    false = wire.Listener("127.0.0.1", b"x" * 32)
    giving = transfer.push(held, "127.0.0.1", false.port, SECRET)
    incoming(false, wanted="refused").close()
    assert not end(giving)["ok"]
    false.close()


def test_no_process_listens(held: Held) -> None:
    listener = wire.Listener("127.0.0.1", SECRET)
    port = listener.port
    listener.close()
    answer = end(transfer.push(held, "127.0.0.1", port, SECRET))
    assert "refused" in answer["message"]


def test_kill_9_of_one_that_takes_leaves_the_file_invalid(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    hello = gives(held.snapshot)
    sessions: list[wire.BlockingLink] = []
    thread = speak(lambda: sessions.append(wire.dial("127.0.0.1", listener.port, SECRET, hello, WAIT_S)))
    connection = incoming(listener)
    thread.join()
    (session,) = sessions
    taking = receive(snapshot_buffers, connection)
    session.send(header(held.snapshot))
    session.sock.sendall(os.pread(held.fd, 1_000_000, 0))
    process.signal_group(taking.pid, signal.SIGKILL)
    answer = end(taking)
    session.close()
    assert answer["message"] == "the process for this receive was killed"
    register(snapshot_buffers, taking, answer)
    assert snapshot_buffers.held() == []


def test_a_child_holds_none_of_the_agents_files(
    held: Held, snapshot_buffers: SnapshotBuffers, listener: wire.Listener
) -> None:
    """A connection that the agent closes must end for the other side, whatever children run."""
    ours, theirs = os.pipe()
    session: list[wire.BlockingLink] = []
    hello = gives(held.snapshot)
    thread = speak(lambda: session.append(wire.dial("127.0.0.1", listener.port, SECRET, hello, WAIT_S)))
    connection = incoming(listener)
    thread.join()
    taking = receive(snapshot_buffers, connection)
    os.close(theirs)
    assert select.select([ours], [], [], WAIT_S)[0]
    assert os.read(ours, 1) == b"", "the child has let go of its copy"
    os.close(ours)
    session[0].close()
    assert not end(taking)["ok"]


# -- to disk

JOB = """
name = "run"
[model]
vocab_size = 264
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 128
[data]
train = "corpus"
[cluster]
nodes = 1
gpus_per_node = 2
[parallel]
shard = 2
[train]
steps = 12
sequence_length = 32
global_batch = 8
microbatch = 2
precision = "fp32"
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 4
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "corpus").mkdir()
    folder = RunFolder(tmp_path / "run")
    for path in (folder.path, folder.checkpoints, folder.control):
        path.mkdir()
    folder.job_toml.write_text(JOB.replace('"corpus"', f'"{tmp_path}/corpus"'))
    folder.plan_json.write_text("{}")
    freeze(folder)
    folder.generation_file.write_text("2\n")
    return folder


def flush(run: RunFolder, generation: int = 2) -> None:
    """Both ranks' parts of step 10, trained by generation 1."""
    for rank in (0, 1):
        fd = os.memfd_create("part")
        held = Held(put(fd, rank=rank), fd, own=True)
        assert end(transfer.flush(held, str(run.checkpoints), generation, read_back=True))["ok"]
        os.close(fd)


def publish(run: RunFolder, generation: int = 2) -> dict[str, Any]:
    place = str(run.checkpoints)
    return end(transfer.publish(run, place, LAYOUT, 10, generation=generation, trained_by=1))


def test_memory_becomes_a_checkpoint(run: RunFolder) -> None:
    flush(run)
    assert publish(run)["ok"]
    manifest = verify(run.checkpoints / folder_name(10))
    assert (manifest.progress.step, manifest.progress.generation) == (10, 1)
    assert (manifest.progress.next_sample, manifest.progress.tokens) == (80, 80 * 32)
    job = load_job(run.job_toml)
    assert manifest.architecture == job.architecture.as_dict()
    assert manifest.layout == LAYOUT.as_dict()
    assert set(manifest.tensors) == {"x/0", "x/1"}
    assert [p.name for p in run.checkpoints.iterdir() if "tmp" in p.name] == []
    answer = publish(run)
    assert answer["ok"]
    assert answer["message"] == "step-00000010 existed already"


def test_a_replica_stands_in_for_ranks_that_are_gone(run: RunFolder) -> None:
    """Rank 1, of the second replica, is all that is left: what rank 0 would have saved is saved from its copy, once."""
    layout = Layout(replicate=2)
    fd = os.memfd_create("part")
    snapshot = put(fd, rank=1, layout=layout_key(layout.as_dict()))
    (piece,) = snapshot.index["pieces"]
    weights = {**piece, "key": "model/w", "owner": False, "stands_in": True}
    held_too = {**piece, "key": "model/copy", "owner": False, "stands_in": False}
    own_random = {**piece, "key": "rng/cpu/1", "owner": True, "stands_in": False}
    snapshot.index["pieces"] = [weights, held_too, own_random]
    held = Held(snapshot, fd, own=True)
    for replica in ((0, True), None):
        told = end(transfer.flush(held, str(run.checkpoints), 2, replica=replica, read_back=True))
        assert told["ok"], told
    os.close(fd)
    answer = end(transfer.publish(run, str(run.checkpoints), layout, 10, generation=2, trained_by=1))
    assert answer["ok"], answer
    manifest = verify(run.checkpoints / folder_name(10))
    assert {key: [p.file for p in entry.parts] for key, entry in manifest.tensors.items()} == {
        "model/w": ["rank-00000.safetensors"],
        "rng/cpu/1": ["rank-00001.safetensors"],
    }


def test_a_generation_that_is_over_publishes_nothing(run: RunFolder) -> None:
    flush(run)
    run.generation_file.write_text("3\n")
    answer = publish(run)
    assert answer["message"] == "generation 3 has begun: generation 2 publishes no checkpoint"
    assert not (run.checkpoints / folder_name(10)).exists()


def test_a_part_that_is_missing_is_missed(run: RunFolder) -> None:
    flush(run)
    (run.checkpoints / "step-00000010.tmp-2-memory" / "index-00001.json").unlink()
    answer = publish(run)
    assert not answer["ok"]
    assert "index-00001.json" in answer["message"]
    assert not (run.checkpoints / folder_name(10)).exists()


def test_a_run_folder_that_is_gone_does_not_come_back(held: Held, tmp_path: Path) -> None:
    gone = RunFolder(tmp_path / "gone")
    answer = end(transfer.flush(held, str(gone.checkpoints), 1, read_back=True))
    assert not answer["ok"]
    assert list(tmp_path.iterdir()) == []
