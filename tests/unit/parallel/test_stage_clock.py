"""The stage clock on a simulated wall clock and a simulated device, and its exposed communication."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from seatrial.job.layout import Layout
from seatrial.parallel import stage_clock
from seatrial.parallel.blocked import Blocked
from seatrial.parallel.mesh import Mesh
from seatrial.parallel.stage_clock import StageClock
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    REPLICATE,
    STAGES,
    STEP_SUM,
    TENSOR,
    VALIDATION,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Wall:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 0
        monkeypatch.setattr(stage_clock.time, "perf_counter_ns", lambda: self.ms * 1_000_000)


class Device:
    """A device whose events are recorded at a time that a test sets, and are complete only up to another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 0
        self.done = 0
        self.made = 0
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                device.made += 1

            def record(self) -> None:
                self.ms = device.ms

            def query(self) -> bool:
                return self.ms <= device.done

            def elapsed_time(self, end: Any) -> float:
                return float(end.ms - self.ms)

        monkeypatch.setattr(torch, "Event", Event)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def told(clock: StageClock) -> dict[int, dict[str, float]]:
    """Step -> stage -> ms of the laps that are known."""
    return {
        step: {name: round(s * 1000, 6) for name, s in zip(STAGES, seconds, strict=True) if s}
        for step, seconds in clock.laps()
    }


def one_step(clock: StageClock, place: Any, step: int) -> None:
    """20 ms: 2 data, 5 host, 6 forward, 7 tensor inside it."""
    with clock.during(DATA):
        place.ms += 2
    place.ms += 4
    with clock.during(FORWARD):
        place.ms += 1
        with clock.during(TENSOR):
            place.ms += 7
        place.ms += 5
    place.ms += 1
    clock.lap(step)


STEP = {"data": 2.0, "host": 5.0, "forward": 6.0, "tensor": 7.0}


class TestOnTheWallClock:
    def test_stages_are_disjoint_and_add_up(self, wall: Wall) -> None:
        clock = StageClock(CPU)
        clock.start()
        one_step(clock, wall, 1)
        one_step(clock, wall, 2)
        assert told(clock) == {1: STEP, 2: STEP}
        assert told(clock) == {}

    def test_only_counts_all_time_for_one_stage(self, wall: Wall) -> None:
        clock = StageClock(CPU)
        clock.start()
        with clock.only(VALIDATION):
            with clock.during(FORWARD):
                wall.ms += 3
            wall.ms += 4
        one_step(clock, wall, 1)
        assert told(clock) == {1: STEP | {"validation": 7.0}}

    def test_an_error_inside_a_stage_restores_the_one_before(self, wall: Wall) -> None:
        clock = StageClock(CPU)
        clock.start()
        with pytest.raises(RuntimeError), clock.during(BACKWARD):
            raise RuntimeError
        assert clock.stage == HOST

    def test_it_does_nothing_before_start_and_after_stop(self, wall: Wall) -> None:
        clock = StageClock(CPU)
        one_step(clock, wall, 1)
        clock.start()
        one_step(clock, wall, 2)
        clock.stop()
        one_step(clock, wall, 3)
        assert told(clock) == {2: STEP}


class TestOnADevice:
    def test_a_lap_is_known_when_the_device_has_completed_it(self, device: Device) -> None:
        clock = StageClock(CUDA)
        clock.start()
        one_step(clock, device, 1)
        assert told(clock) == {}  # nothing is waited for
        device.done = device.ms - 1
        one_step(clock, device, 2)
        assert told(clock) == {}
        device.done = device.ms - 1
        assert told(clock) == {1: STEP}
        device.done = device.ms
        assert told(clock) == {2: STEP}

    def test_events_are_reused(self, device: Device) -> None:
        clock = StageClock(CUDA)
        clock.start()
        for step in range(1, 20):
            one_step(clock, device, step)
            device.done = device.ms
            assert told(clock) == {step: STEP}
        assert device.made < 20


@pytest.fixture
def world() -> Any:
    """A world of one rank, with a second group of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


class TestCollectives:
    def place(self, group: Any) -> Mesh:
        none = dict.fromkeys(("pipeline", "shard", "replicate", "ends"))
        return Mesh(Layout(), 0, Layout().coordinates(0), CPU, tensor=group, **none)  # type: ignore[arg-type]

    def counted(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """(stage left, stage entered) of each change."""
        changes: list[tuple[int, int]] = []
        enter = StageClock.enter

        def noting(clock: StageClock, stage: int) -> int:
            before = enter(clock, stage)
            if before != stage:
                changes.append((before, stage))
            return before

        monkeypatch.setattr(StageClock, "enter", noting)
        return changes

    def test_issuing_and_waiting_count(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = StageClock(CPU)
        spans = Blocked(clock, self.place(world))
        spans.install()
        clock.start()
        changes = self.counted(monkeypatch)
        try:
            clock.enter(FORWARD)
            work = dist.all_reduce(torch.ones(2), group=world, async_op=True)
            assert changes == [(HOST, FORWARD), (FORWARD, TENSOR), (TENSOR, FORWARD)]
            work.wait()
            assert changes[3:] == [(FORWARD, TENSOR), (TENSOR, FORWARD)]
            work.wait()  # counted once: it no longer blocks
            dist.all_reduce(torch.ones(2))  # of a group that is no dimension's
            assert len(changes) == 5
            clock.enter(STEP_SUM)
            dist.all_reduce(torch.ones(2), group=world)
            assert len(changes) == 6
        finally:
            spans.remove()

    def test_calls_and_bytes_count_for_the_dimension(self, world: Any) -> None:
        clock = StageClock(CPU)
        spans = Blocked(clock, self.place(world))
        spans.install()
        clock.start()
        ones = torch.ones(6)
        try:
            with torch.profiler.profile() as trace:
                dist.all_reduce(ones, group=world)  # 24 bytes
                dist.all_gather_single(torch.empty(6), ones, group=world)
                dist.all_gather([torch.empty(6)], ones, group=world)
            dist.reduce_scatter_single(torch.empty(6), ones, group=world)
            dist.barrier(group=world)
            dist.all_reduce(ones)  # of a group that is no dimension's
            clock.enter(STEP_SUM)
            dist.all_reduce(ones[:2])
            dist.all_reduce(ones[:3], group=world)
            assert spans.counted() == {"tensor": (4, 96), "step_sum": (2, 20)}
            assert spans.counted() == {}
        finally:
            spans.remove()
        ranges = [e.key for e in trace.key_averages() if e.key.startswith("tensor ")]
        assert len(ranges) == 3
        assert "tensor allreduce bytes=24 ranks=1" in ranges

    def test_remove_restores_torchs_methods(self, world: Any) -> None:
        def methods() -> dict[str, Any]:
            return {**{f"g{n}": v for n, v in vars(ProcessGroup).items()}, "wait": vars(Work)["wait"]}

        before = methods()
        spans = Blocked(StageClock(CPU), self.place(world))
        spans.install()
        assert methods() != before
        spans.remove()
        assert methods() == before
        dist.barrier()

    def test_on_a_device_only_the_compute_stream_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams.current)
        compute, other = SimpleNamespace(stream_id=0), SimpleNamespace(stream_id=5)
        streams = SimpleNamespace(current=compute)
        layout = Layout(replicate=2)
        none = dict.fromkeys(("tensor", "pipeline", "shard", "ends"))
        group = SimpleNamespace(group_name="r")
        clock = SimpleNamespace(on_accelerator=True, stage=BACKWARD)
        entered: list[int] = []

        def enter(stage: int) -> int:
            entered.append(stage)
            return BACKWARD

        clock.enter = enter
        place = Mesh(layout, 0, layout.coordinates(0), CUDA, replicate=group, **none)  # type: ignore[arg-type]
        spans = Blocked(clock, place)  # type: ignore[arg-type]
        issue = spans._issuing(lambda group: None)
        issue(group)
        assert entered == [REPLICATE, BACKWARD]
        streams.current = other
        issue(group)
        assert len(entered) == 2
        waited = spans._waiting_for_event(lambda stream, event: None)
        waited(other, "event")
        assert len(entered) == 2
        waited(compute, "event")
        assert entered[2:] == [REPLICATE, BACKWARD]
